//! URLs of remotes, in both forms that git accepts: `scheme://user@host:port/path` and
//! `user@host:path` (git-fetch(1), 'Git URLs').

/// The parts of a remote's URL as written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteUrl<'a> {
    /// The scheme; `None` in the form `user@host:path`, which means ssh.
    pub scheme: Option<&'a str>,
    /// The text before the `@`, including a password.
    pub user: Option<&'a str>,
    /// The host, and the port if there is one.
    pub address: &'a str,
    /// The text after the first `/` or, without a scheme, after the colon.
    pub path: &'a str,
}

impl<'a> RemoteUrl<'a> {
    /// Splits `url`; `None` for a local path and for `helper::address`.
    pub fn parse(url: &'a str) -> Option<Self> {
        let (scheme, authority, path) = match url.split_once("://") {
            Some((scheme, rest)) => {
                let (authority, path) = rest.split_once('/')?;
                (Some(scheme), authority, path)
            }
            // A slash before the colon means a local path.
            None => {
                let (authority, path) = url.split_once(':')?;
                if authority.contains('/') || path.starts_with(':') {
                    return None;
                }
                (None, authority, path)
            }
        };
        let (user, address) = match authority.rsplit_once('@') {
            Some((user, address)) => (Some(user), address),
            None => (None, authority),
        };
        (!address.is_empty()).then_some(Self {
            scheme,
            user,
            address,
            path,
        })
    }

    /// Whether git would use ssh.
    pub fn is_ssh(&self) -> bool {
        matches!(self.scheme, None | Some("ssh" | "git+ssh" | "ssh+git"))
    }

    /// The host without its port.
    pub fn host(&self) -> &'a str {
        self.address.split(':').next().unwrap_or_default()
    }

    /// The repository's name on a forge: without leading and trailing slashes and without `.git`.
    pub fn repository(&self) -> &'a str {
        let path = self.path.trim_matches('/');
        path.strip_suffix(".git").unwrap_or(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remote_urls_split_into_host_and_repository() {
        for (url, expected) in [
            ("git@github.com:o/r", Some((true, "github.com", "o/r"))),
            ("github.com:/o/r.git", Some((true, "github.com", "o/r"))),
            ("ssh://git@h:22/o/r.git/", Some((true, "h", "o/r"))),
            ("git+ssh://h/o/r", Some((true, "h", "o/r"))),
            ("https://me:pw@h:8443/o/r", Some((false, "h", "o/r"))),
            ("/srv/git/a", None),
            ("./a:b", None),
            ("ext::sh -c true", None),
            ("file:///srv/a", None),
        ] {
            let parts = RemoteUrl::parse(url);
            let parts = parts.map(|url| (url.is_ssh(), url.host(), url.repository()));
            assert_eq!(parts, expected, "{url}");
        }
    }
}
