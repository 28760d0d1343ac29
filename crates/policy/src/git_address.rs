//! What a request on a git host is about: which repository, and what is asked of it.
//!
//! The path is normalised before it gets here. A spelling that two servers could read
//! differently names nothing.

use crate::allowlist::Target;
use crate::registration::RepoName;
use crate::repository::RepositoryOperation;

/// How much of a repository's name is shown where it is none.
const MOST_SHOWN: usize = 200;

/// A repository, and what is asked of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// What is asked.
    pub operation: RepositoryOperation,
    /// The repository, where it is an `owner/name`.
    pub name: Option<RepoName>,
    /// What it is called in messages and records.
    pub shown: String,
}

/// What a request on a git host is about; none where it is nothing that git asks for.
pub fn recognise(target: &Target) -> Option<Address> {
    let path = &target.path;
    if path.has_encoded_slash() || path.has_trailing_slash() || path.text().contains(';') {
        return None;
    }
    let (method, query) = (target.method.as_str(), path.query());
    let segments: Vec<&str> = path.segments().collect();
    let (repository, operation) = match segments.as_slice() {
        [repository @ .., info, refs] if is(info, "info") && is(refs, "refs") => {
            let service = query.and_then(service)?;
            (repository, advertised(method, &service)?)
        }
        [repository @ .., pack] if is(pack, "git-upload-pack") => (
            repository,
            posted(method, query, RepositoryOperation::Fetch)?,
        ),
        [repository @ .., pack] if is(pack, "git-receive-pack") => (
            repository,
            posted(method, query, RepositoryOperation::Push)?,
        ),
        all => match large_files(all) {
            Some(repository) => (repository, RepositoryOperation::Lfs),
            None => (
                downloaded(method, query, all)?,
                RepositoryOperation::Download,
            ),
        },
    };
    if repository.is_empty() {
        return None;
    }
    let written = repository.join("/");
    let name = RepoName::parse(&written).ok();
    let shown = match &name {
        Some(name) => name.as_str().to_owned(),
        None => written.escape_default().take(MOST_SHOWN).collect(),
    };
    Some(Address {
        operation,
        name,
        shown,
    })
}

/// Whether somebody would take it for a push, in any reading. Asked on hosts that are not
/// known to be git's, where a push would leave without being read.
pub fn is_push(target: &Target) -> bool {
    let text = target.path.text();
    let text = text.strip_suffix('/').unwrap_or(text);
    let last = text.rsplit('/').next().unwrap_or_default();
    let last = last.split(';').next().unwrap_or_default();
    is(last, "git-receive-pack")
        || (is(last, "refs")
            && target
                .path
                .query()
                .is_some_and(|query| query.contains("receive") || query.contains('%')))
}

fn is(segment: &str, word: &str) -> bool {
    segment.eq_ignore_ascii_case(word)
}

fn advertised(method: &str, service: &str) -> Option<RepositoryOperation> {
    match (method, service) {
        ("GET", "git-upload-pack") => Some(RepositoryOperation::AdvertiseFetch),
        ("GET", "git-receive-pack") => Some(RepositoryOperation::AdvertisePush),
        _ => None,
    }
}

/// The service a query names. Nothing else may be in it: of two answers to 'which service'
/// a server takes one and we might take the other.
fn service(query: &str) -> Option<String> {
    let (key, value) = query.split_once('=')?;
    let value = decode(value)?;
    (decode(key)? == "service").then_some(value)
}

/// Undoes percent-encoding of a word that has no business with any other character.
fn decode(text: &str) -> Option<String> {
    let mut decoded = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let (c, length) = match first {
            '%' => {
                let digits = rest.get(1..3)?;
                let plain = digits.bytes().all(|b| b.is_ascii_hexdigit());
                let byte = u8::from_str_radix(digits, 16).ok().filter(|_| plain)?;
                (char::from(byte), 3)
            }
            other => (other, other.len_utf8()),
        };
        if !(c.is_ascii_alphanumeric() || c == '-') {
            return None;
        }
        decoded.push(c);
        rest = rest.get(length..)?;
    }
    Some(decoded)
}

fn posted(
    method: &str,
    query: Option<&str>,
    operation: RepositoryOperation,
) -> Option<RepositoryOperation> {
    (method == "POST" && query.is_none()).then_some(operation)
}

/// The repository before the first `info/lfs/…`, or `gitlab-lfs/objects/…`, where GitLab
/// keeps what the other speaks of.
fn large_files<'a, 'b>(segments: &'a [&'b str]) -> Option<&'a [&'b str]> {
    let at = segments.windows(3).skip(1).position(|three| {
        let [first, second, _] = three else {
            return false;
        };
        (is(first, "info") && is(second, "lfs"))
            || (is(first, "gitlab-lfs") && is(second, "objects"))
    })?;
    segments.get(..at + 1)
}

/// The repository of an archive or a file of a release.
fn downloaded<'a, 'b>(
    method: &str,
    query: Option<&str>,
    segments: &'a [&'b str],
) -> Option<&'a [&'b str]> {
    // A query may carry a token, which makes it anything but anonymous.
    if !matches!(method, "GET" | "HEAD") || query.is_some() {
        return None;
    }
    let repository = segments.get(..2)?;
    match segments.get(2..)? {
        ["archive" | "tarball" | "zipball", _, ..]
        | ["releases", "download", _, _]
        | ["releases", "latest", "download", _] => Some(repository),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use crate::endpoint::Method;
    use crate::host::Host;
    use crate::id::SandboxId;
    use crate::path::CleanPath;

    use super::*;

    fn target(method: &str, path: &str) -> Target {
        Target {
            sandbox: SandboxId::parse("a").unwrap(),
            method: Method::parse(method).unwrap(),
            host: Host::parse("github.com").unwrap(),
            port: 443,
            path: CleanPath::parse(path).unwrap(),
            program: None,
        }
    }

    fn address(line: &str) -> Option<Address> {
        let (method, path) = line.split_once(' ').unwrap();
        recognise(&target(method, path))
    }

    #[test]
    fn what_git_asks_for_is_recognised_in_every_spelling() {
        use RepositoryOperation::{AdvertiseFetch, AdvertisePush, Download, Fetch, Lfs, Push};
        for (line, operation, shown) in [
            (
                "GET /o/r/info/refs?service=git-upload-pack",
                AdvertiseFetch,
                "o/r",
            ),
            (
                "GET /o/r.git/info/refs?service=git-receive-pack",
                AdvertisePush,
                "o/r",
            ),
            (
                "GET /O/R.GIT/Info/Refs?service=git%2Dreceive%2dpack",
                AdvertisePush,
                "o/r",
            ),
            ("POST /o/r/git-upload-pack", Fetch, "o/r"),
            ("POST //o/x/../r.git/./git%2Dreceive-pack", Push, "o/r"),
            ("POST /o/%72/GIT-RECEIVE-PACK", Push, "o/r"),
            ("POST /o/r.wiki.git/git-receive-pack", Push, "o/r.wiki"),
            (
                "POST /abcdef0123.git/git-receive-pack",
                Push,
                "abcdef0123.git",
            ),
            (
                "POST /group/sub/r.git/git-upload-pack",
                Fetch,
                "group/sub/r.git",
            ),
            ("POST /o/r.git/info/lfs/objects/batch", Lfs, "o/r"),
            ("GET /o/r/info/lfs/locks?path=a", Lfs, "o/r"),
            ("GET /info/lfs/info/lfs/locks", Lfs, "info/lfs"),
            ("PUT /o/r.git/gitlab-lfs/objects/ab/12", Lfs, "o/r"),
            ("GET /O/R.git/GitLab-LFS/objects/ab", Lfs, "o/r"),
            ("GET /o/r/gitlab-lfs/objects/ab/info/lfs/x", Lfs, "o/r"),
            (
                "POST /o/r/info/lfs/x/git-receive-pack",
                Push,
                "o/r/info/lfs/x",
            ),
            ("GET /o/r/archive/refs/heads/main.tar.gz", Download, "o/r"),
            ("HEAD /o/r/releases/download/v1/x.tar.gz", Download, "o/r"),
            ("GET /o/r/releases/latest/download/x", Download, "o/r"),
            ("POST /ö/r/git-receive-pack", Push, "\\u{f6}/r"),
        ] {
            let address = address(line).unwrap_or_else(|| panic!("{line}"));
            assert_eq!(
                (address.operation, address.shown.as_str()),
                (operation, shown)
            );
            assert_eq!(
                address.name.map(|name| name.as_str().to_owned()),
                RepoName::parse(shown)
                    .ok()
                    .map(|name| name.as_str().to_owned()),
                "{line}"
            );
        }
    }

    #[test]
    fn a_push_is_known_on_any_host_in_any_reading() {
        for (line, expected) in [
            ("POST /x.git/git-receive-pack", true),
            ("PUT /x/y/GIT-receive-pack/", true),
            ("POST /x/git-receive%2Dpack;v=1?q", true),
            ("POST /x%2Fgit-receive-pack", true),
            ("GET /x/info/refs?service=git-receive-pack", true),
            ("GET /x/info/refs?a=b&service=git-rec%65ive-pack", true),
            ("GET /x/info/refs?service=git-upload-pack", false),
            ("GET /x/info/refs", false),
            ("POST /x/git-upload-pack", false),
            ("GET /git-receive-pack/x", false),
            ("GET /", false),
        ] {
            let (method, target) = line.split_once(' ').unwrap();
            assert_eq!(is_push(&self::target(method, target)), expected, "{line}");
        }
    }

    #[test]
    fn what_could_be_read_in_two_ways_or_is_not_git_names_nothing() {
        for line in [
            "GET /",
            "GET /o/r",
            "GET /o/r/blob/main/x",
            "GET /o/r/info/refs",
            "GET /o/r/info/refs?service=git-receive-pack&service=git-upload-pack",
            "GET /o/r/info/refs?service=git-upload-pack&x=1",
            "GET /o/r/info/refs?x=1&service=git-upload-pack",
            "GET /o/r/info/refs?service=git-upload-archive",
            "GET /o/r/info/refs?service=git-upload-pack%00",
            "GET /o/r/info/refs/?service=git-upload-pack",
            "POST /o/r/info/refs?service=git-upload-pack",
            "GET /o/r/git-receive-pack",
            "POST /o/r/git-receive-pack?x",
            "POST /o/r/git-receive-pack/",
            "POST /o%2Fr/git-receive-pack",
            "POST /o/r;x/git-receive-pack",
            "POST /git-receive-pack",
            "GET /info/lfs/locks",
            "GET /gitlab-lfs/objects/ab",
            "GET /o/r/gitlab-lfs/objects",
            "GET /o/r/gitlab-lfs/ab",
            "GET /o/r/HEAD",
            "GET /o/r/objects/info/packs",
            "POST /o/r/archive/main.zip",
            "GET /o/r/archive/main.zip?token=x",
            "GET /o/r/archive",
            "GET /o/r/releases/download/v1",
        ] {
            assert_eq!(address(line), None, "{line}");
        }
    }
}
