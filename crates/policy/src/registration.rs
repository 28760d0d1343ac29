//! Registrations: the registry's data about one sandbox or container.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::clock::UnixMillis;
use crate::id::SandboxId;

/// One row of the registry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registration {
    /// The id of the sandbox or container.
    pub id: SandboxId,
    /// The source address that identifies it on a shared network. None for a sandbox that is
    /// identified by its own listeners.
    pub ip: Option<IpAddr>,
    /// The repositories that the sandbox may access.
    pub repos: Vec<Repo>,
    /// The identity for git push.
    pub auth_mode: AuthMode,
    /// Names of the credentials that the gate adds to requests of the sandbox.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub credentials: Vec<String>,
    /// The time of the registration.
    pub created: UnixMillis,
    /// The time at which the registration expires.
    pub expires: UnixMillis,
    /// Data of the registering program. Never interpreted.
    #[serde(default)]
    pub metadata: serde_json::Map<String, serde_json::Value>,
}

impl Registration {
    /// Whether the registration has not expired at `now`.
    pub fn is_live(&self, now: UnixMillis) -> bool {
        now < self.expires
    }
}

/// Converts an IPv4-mapped IPv6 address to the IPv4 address: a dual-stack listener reports the
/// peers of one container in either form.
pub fn canonical_ip(ip: IpAddr) -> IpAddr {
    ip.to_canonical()
}

/// The identity that a sandbox has on a git hosting service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AuthMode {
    /// The operator's own account.
    #[default]
    User,
    /// A bot, which may only push to its own namespaces.
    Bot,
}

impl AuthMode {
    /// The name in files, requests and rows.
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
    /// The push size limit of this repository; none for the default limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_receive_pack_bytes: Option<u64>,
}

/// Maximum push size limit that a registration may set: 500 MiB.
pub const MAX_RECEIVE_PACK_BYTES: u64 = 500 * 1024 * 1024;

/// `owner/name` in lower case (hosting services ignore case), without `.git`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RepoName(String);

/// Text that is not `owner/name`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a repository is written owner/name")]
pub struct BadRepoName;

impl RepoName {
    /// Validates and normalises `text`. The result parses back unchanged, since stored rows are
    /// parsed again at the next start; so a name that still ends in `.git` after the suffix was
    /// removed is rejected.
    pub fn parse(text: &str) -> Result<Self, BadRepoName> {
        let text = text.to_ascii_lowercase();
        let text = text.strip_suffix(".git").unwrap_or(&text);
        let (owner, name) = text.split_once('/').ok_or(BadRepoName)?;
        let ok = |part: &str| {
            !part.is_empty()
                && part.len() <= 100
                && part != "."
                && part != ".."
                && !part.ends_with(".git")
                && part
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-'))
        };
        if ok(owner) && ok(name) {
            Ok(Self(text.to_owned()))
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
    use proptest::prelude::*;
    use serde_json::{Map, Value};

    use super::*;

    #[test]
    fn repository_name_is_normalised_to_one_spelling() {
        for (given, kept) in [
            ("o/r", "o/r"),
            ("Owner/Repo.git", "owner/repo"),
            ("Owner/Repo.GIT", "owner/repo"),
            ("a-b/c.d_e", "a-b/c.d_e"),
            ("o/git", "o/git"),
        ] {
            assert_eq!(RepoName::parse(given).unwrap().as_str(), kept);
        }
        for bad in [
            "",
            "r",
            "/r",
            "o/",
            "o/..",
            "./r",
            "o/r/x",
            "o /r",
            "o/r\n",
            "ö/r",
            "o%2Fr",
            "o/.git",
            "o/.git.git",
            "o/r.git.git",
            "o/r.git.GIT",
            "o.git/r",
        ] {
            assert_eq!(RepoName::parse(bad), Err(BadRepoName), "{bad:?}");
        }
    }

    #[test]
    fn registration_expires_at_its_expiry_time() {
        let at = UnixMillis::new(1_000);
        let row = Registration {
            id: SandboxId::parse("a").unwrap(),
            ip: None,
            repos: Vec::new(),
            auth_mode: AuthMode::User,
            credentials: Vec::new(),
            created: UnixMillis::new(0),
            expires: at,
            metadata: Map::new(),
        };
        assert!(row.is_live(UnixMillis::new(999)));
        assert!(!row.is_live(at));
    }

    #[test]
    fn ipv4_mapped_address_becomes_ipv4_address() {
        let mapped: IpAddr = "::ffff:172.18.0.5".parse().unwrap();
        assert_eq!(
            canonical_ip(mapped),
            "172.18.0.5".parse::<IpAddr>().unwrap()
        );
    }

    fn json() -> impl Strategy<Value = Value> + Clone {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            proptest::num::f64::NORMAL.prop_map(Value::from),
            any::<String>().prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 16, 4, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                object(inner).prop_map(Value::from),
            ]
        })
    }

    fn object(value: impl Strategy<Value = Value>) -> impl Strategy<Value = Map<String, Value>> {
        proptest::collection::vec((any::<String>(), value), 0..4)
            .prop_map(|pairs| pairs.into_iter().collect())
    }

    proptest! {
        /// Stored names are parsed again at the next start and must be the same repository.
        #[test]
        fn stored_repository_name_parses_back_unchanged(
            text in "[oO./]{0,2}/?(\\.|[rR]|\\.git|\\.GIT|\\.Git){0,4}",
        ) {
            if let Ok(name) = RepoName::parse(&text) {
                prop_assert_eq!(RepoName::parse(name.as_str()), Ok(name));
            }
        }

        #[test]
        fn stored_registration_parses_back_unchanged(
            id in "[a-zA-Z0-9][a-zA-Z0-9_.-]{0,20}",
            ip in any::<Option<IpAddr>>(),
            repos in proptest::collection::vec(("[a-zA-Z.]{1,6}/[a-zA-Z.]{1,8}", any::<Option<u64>>()), 0..4),
            bot: bool,
            credentials in proptest::collection::vec("[a-z-]{1,8}", 0..3),
            created: i64,
            expires: i64,
            metadata in object(json()),
        ) {
            let repo = |(name, max_receive_pack_bytes): (String, _)| {
                let name = RepoName::parse(&name).ok()?;
                Some(Repo { name, max_receive_pack_bytes })
            };
            let row = Registration {
                id: SandboxId::parse(&id).unwrap(),
                ip,
                repos: repos.into_iter().filter_map(repo).collect(),
                auth_mode: if bot { AuthMode::Bot } else { AuthMode::User },
                credentials,
                created: UnixMillis::new(created),
                expires: UnixMillis::new(expires),
                metadata,
            };
            let stored = serde_json::to_string(&row).unwrap();
            prop_assert_eq!(serde_json::from_str::<Registration>(&stored).unwrap(), row);
        }
    }
}
