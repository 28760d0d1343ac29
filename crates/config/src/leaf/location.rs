//! Paths and URLs.

use std::path::PathBuf;

use policy::host::Authority;

use super::{Format, Leaf, require, with_detail, without_detail};

impl Format for PathBuf {
    const NAME: &'static str = "file-path";
    const DESCRIPTION: &'static str = "a path";

    fn check(text: &str) -> Result<(), String> {
        require(!text.is_empty() && text.len() <= 4096 && !text.contains(char::is_control))
    }
}

impl Leaf for PathBuf {
    fn read(text: &str) -> Result<Self, String> {
        Self::check(text).map(|()| Self::from(text))
    }

    fn write(&self) -> String {
        self.display().to_string()
    }
}

/// The path of a URL.
pub(crate) struct UrlPath;

impl Format for UrlPath {
    const NAME: &'static str = "url-path";
    const DESCRIPTION: &'static str = "a path that begins with '/'";

    fn check(text: &str) -> Result<(), String> {
        require(
            text.starts_with('/') && !text.contains(|c: char| c.is_control() || " ?#".contains(c)),
        )
    }
}

/// A URL with scheme http or https.
pub(crate) struct HttpUrl;

impl Format for HttpUrl {
    const NAME: &'static str = "http-url";
    const DESCRIPTION: &'static str = "an http or https URL";
    const ADDRESS: bool = true;

    fn check(text: &str) -> Result<(), String> {
        let rest = text
            .strip_prefix("http://")
            .or_else(|| text.strip_prefix("https://"));
        let rest = without_detail(rest)?;
        require(!text.contains(|c: char| c.is_control() || c.is_whitespace()))?;
        let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let (authority, _) = without_detail(rest.split_at_checked(end))?;
        with_detail(Authority::parse(authority)).map(drop)
    }
}

/// An http or https URL that is itself a secret.
pub(crate) struct WebhookUrl;

impl Format for WebhookUrl {
    const NAME: &'static str = "webhook-url";
    const DESCRIPTION: &'static str = HttpUrl::DESCRIPTION;
    const SENSITIVE: bool = true;

    fn check(text: &str) -> Result<(), String> {
        HttpUrl::check(text)
    }
}

/// A path inside a repository, as git spells it.
pub(crate) struct TreePath;

impl Format for TreePath {
    const NAME: &'static str = "tree-path";
    const DESCRIPTION: &'static str = "a path inside a repository, without a leading '/' or '..'";

    fn check(text: &str) -> Result<(), String> {
        let parts = text.strip_suffix('/').unwrap_or(text).split('/');
        require(!text.contains(char::is_control))?;
        require(
            parts
                .into_iter()
                .all(|part| !matches!(part, "" | "." | "..")),
        )
    }
}

/// URL of a mirrored repository: `ssh://`, `https://`, `git://` or `user@host:path`.
pub(crate) struct GitUrl;

impl GitUrl {
    /// The parts: whether the protocol is SSH, the user, the host with an optional port, the path.
    pub(crate) fn split(text: &str) -> Option<(bool, Option<&str>, &str, &str)> {
        let split_user = |authority: &'_ str| -> (Option<usize>, usize) {
            match authority.rfind('@') {
                Some(at) => (Some(at), at + 1),
                None => (None, 0),
            }
        };
        let (ssh, authority, path) = match text.split_once("://") {
            Some((scheme, rest)) => {
                let (authority, path) = rest.split_once('/')?;
                let ssh = match scheme {
                    "ssh" => true,
                    "http" | "https" | "git" => false,
                    _ => return None,
                };
                (ssh, authority, path)
            }
            None => {
                let (authority, path) = text.split_once(':')?;
                (true, authority, path)
            }
        };
        let (user_end, host_start) = split_user(authority);
        let user = match user_end {
            Some(end) => Some(authority.get(..end)?),
            None => None,
        };
        let host = authority.get(host_start..)?;
        (!path.is_empty()).then_some((ssh, user, host, path))
    }

    /// Whether the upstream is reached over SSH.
    pub(crate) fn is_ssh(text: &str) -> bool {
        Self::split(text).is_some_and(|(ssh, ..)| ssh)
    }
}

impl Format for GitUrl {
    const NAME: &'static str = "git-url";
    const DESCRIPTION: &'static str = "a git URL such as ssh://git@git.example/app.git";
    // A password in the URL is refused, and the message must not repeat it.
    const SENSITIVE: bool = true;

    fn check(text: &str) -> Result<(), String> {
        // ssh and git parse a leading dash as an option.
        let clean =
            !text.starts_with('-') && !text.contains(|c: char| c.is_control() || c.is_whitespace());
        let (_, user, host, path) = without_detail(Self::split(text).filter(|_| clean))?;
        if user.is_some_and(|user| user.contains(':')) {
            return Err("it must not contain a password".to_owned());
        }
        require(!user.is_some_and(|user| user.is_empty() || user.starts_with('-')))?;
        require(!path.starts_with('-'))?;
        with_detail(Authority::parse(host)).map(drop)
    }
}
