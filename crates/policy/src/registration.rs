//! A registration: what the gate knows of one sandbox or container.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::clock::UnixMillis;
use crate::id::SandboxId;

/// One row of the registry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registration {
    /// Who it is.
    pub id: SandboxId,
    /// The source address that identifies it on a shared network. A sandbox that is
    /// known by its listeners has none.
    pub ip: Option<IpAddr>,
    /// The repositories it may speak to.
    pub repos: Vec<Repo>,
    /// As whom it pushes.
    pub auth_mode: AuthMode,
    /// When it was registered.
    pub created: UnixMillis,
    /// When it stops counting.
    pub expires: UnixMillis,
    /// What the registering program wanted to remember. Never interpreted.
    #[serde(default)]
    pub metadata: serde_json::Map<String, serde_json::Value>,
}

impl Registration {
    /// Whether it still counts at `now`.
    pub fn is_live(&self, now: UnixMillis) -> bool {
        now < self.expires
    }
}

/// An IPv4 address that came mapped into IPv6 is the IPv4 address: a dual-stack
/// listener reports the peers of one container in either spelling.
pub fn canonical_ip(ip: IpAddr) -> IpAddr {
    ip.to_canonical()
}

/// As whom a sandbox acts on a forge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AuthMode {
    /// With the operator's own account.
    #[default]
    User,
    /// As a bot, which may only push to its own namespaces.
    Bot,
}

impl AuthMode {
    /// The word used in files, requests and rows.
    pub const fn as_str(self) -> &'static str {
        match self {
            AuthMode::User => "user",
            AuthMode::Bot => "bot",
        }
    }
}

/// A repository a sandbox is registered for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Repo {
    /// `owner/name`.
    pub name: RepoName,
    /// A push limit of its own, where one was set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_receive_pack_bytes: Option<u64>,
}

/// The largest push limit a registration may set: 500 MiB.
pub const MAX_RECEIVE_PACK_BYTES: u64 = 500 * 1024 * 1024;

/// `owner/name`, lower case (forges ignore case), without `.git`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RepoName(String);

/// Text that is not `owner/name`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a repository is written owner/name")]
pub struct BadRepoName;

impl RepoName {
    /// Checks and normalises `text`.
    pub fn parse(text: &str) -> Result<Self, BadRepoName> {
        let text = text.strip_suffix(".git").unwrap_or(text);
        let (owner, name) = text.split_once('/').ok_or(BadRepoName)?;
        let ok = |part: &str| {
            !part.is_empty()
                && part.len() <= 100
                && part != "."
                && part != ".."
                && part
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-'))
        };
        if ok(owner) && ok(name) {
            Ok(Self(text.to_ascii_lowercase()))
        } else {
            Err(BadRepoName)
        }
    }

    /// `owner/name`.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for RepoName {
    type Error = BadRepoName;

    fn try_from(text: String) -> Result<Self, BadRepoName> {
        Self::parse(&text)
    }
}

impl From<RepoName> for String {
    fn from(name: RepoName) -> String {
        name.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repository_name_has_one_spelling() {
        for (given, kept) in [
            ("o/r", "o/r"),
            ("Owner/Repo.git", "owner/repo"),
            ("a-b/c.d_e", "a-b/c.d_e"),
        ] {
            assert_eq!(RepoName::parse(given).unwrap().as_str(), kept);
        }
        for bad in [
            "", "r", "/r", "o/", "o/..", "./r", "o/r/x", "o /r", "o/r\n", "ö/r", "o%2Fr", "o/.git",
        ] {
            assert_eq!(RepoName::parse(bad), Err(BadRepoName), "{bad:?}");
        }
    }

    #[test]
    fn a_registration_ends_at_its_expiry() {
        let at = UnixMillis::new(1_000);
        let row = Registration {
            id: SandboxId::parse("a").unwrap(),
            ip: None,
            repos: Vec::new(),
            auth_mode: AuthMode::User,
            created: UnixMillis::new(0),
            expires: at,
            metadata: serde_json::Map::new(),
        };
        assert!(row.is_live(UnixMillis::new(999)));
        assert!(!row.is_live(at));
    }

    #[test]
    fn a_mapped_address_is_its_ipv4_address() {
        let mapped: IpAddr = "::ffff:172.18.0.5".parse().unwrap();
        assert_eq!(
            canonical_ip(mapped),
            "172.18.0.5".parse::<IpAddr>().unwrap()
        );
    }
}
