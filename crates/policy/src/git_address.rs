//! Recognises git requests on a git host: the repository and the operation.
//!
//! The path has been normalised. A path that servers could interpret differently is not recognised.

use crate::allowlist::Target;
use crate::registration::RepoName;
use crate::repository::RepositoryOperation;

/// Maximum length of an invalid repository name in messages.
const MAX_SHOWN_LEN: usize = 200;

/// A repository, and the operation on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepositoryAddress {
    /// The operation.
    pub operation: RepositoryOperation,
    /// The repository, if it is an `owner/name`.
    pub name: Option<RepoName>,
    /// The repository's name in messages and records.
    pub display_name: String,
}

/// The repository and operation of a request; none if it is not a git request.
pub fn recognise(target: &Target) -> Option<RepositoryAddress> {
    let path = &target.path;
    if path.has_encoded_slash() || path.has_trailing_slash() || path.text().contains(';') {
        return None;
    }
    let (method, query) = (target.method.as_str(), path.query());
    let segments: Vec<&str> = path.segments().collect();
    let (repository, operation) = match segments.as_slice() {
        [repository @ .., info, refs]
            if eq_ignore_case(info, "info") && eq_ignore_case(refs, "refs") =>
        {
            let service = query.and_then(parse_service)?;
            (repository, advertise_operation(method, &service)?)
        }
        [repository @ .., pack] if eq_ignore_case(pack, "git-upload-pack") => (
            repository,
            check_post(method, query, RepositoryOperation::Fetch)?,
        ),
        [repository @ .., pack] if eq_ignore_case(pack, "git-receive-pack") => (
            repository,
            check_post(method, query, RepositoryOperation::Push)?,
        ),
        all => match lfs_repository(all) {
            Some(repository) => (repository, RepositoryOperation::Lfs),
            None => (
                download_repository(method, query, all)?,
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
        None => written.escape_default().take(MAX_SHOWN_LEN).collect(),
    };
    Some(RepositoryAddress {
        operation,
        name,
        display_name: shown,
    })
}

/// Whether some server could treat the request as a push, in any reading. Used for hosts that are
/// not configured as git hosts, where a push would pass unchecked.
pub fn is_push(target: &Target) -> bool {
    let text = target.path.text();
    let text = text.strip_suffix('/').unwrap_or(text);
    let last = text.rsplit('/').next().unwrap_or_default();
    let last = last.split(';').next().unwrap_or_default();
    eq_ignore_case(last, "git-receive-pack")
        || (eq_ignore_case(last, "refs")
            && target
                .path
                .query()
                .is_some_and(|query| query.contains("receive") || query.contains('%')))
}

fn eq_ignore_case(segment: &str, word: &str) -> bool {
    segment.eq_ignore_ascii_case(word)
}

fn advertise_operation(method: &str, service: &str) -> Option<RepositoryOperation> {
    match (method, service) {
        ("GET", "git-upload-pack") => Some(RepositoryOperation::AdvertiseFetch),
        ("GET", "git-receive-pack") => Some(RepositoryOperation::AdvertisePush),
        _ => None,
    }
}

/// The service in a query. The query must contain nothing else: of two `service` parameters the
/// server might use the other one.
fn parse_service(query: &str) -> Option<String> {
    let (key, value) = query.split_once('=')?;
    let value = decode(value)?;
    (decode(key)? == "service").then_some(value)
}

/// Decodes percent-encoding. None if the result contains other characters than letters, digits
/// and `-`.
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

fn check_post(
    method: &str,
    query: Option<&str>,
    operation: RepositoryOperation,
) -> Option<RepositoryOperation> {
    (method == "POST" && query.is_none()).then_some(operation)
}

/// The repository before the first `info/lfs/…`, or `gitlab-lfs/objects/…`, where GitLab stores
/// LFS objects.
fn lfs_repository<'a, 'b>(segments: &'a [&'b str]) -> Option<&'a [&'b str]> {
    let at = segments.windows(3).skip(1).position(|three| {
        let [first, second, _] = three else {
            return false;
        };
        (eq_ignore_case(first, "info") && eq_ignore_case(second, "lfs"))
            || (eq_ignore_case(first, "gitlab-lfs") && eq_ignore_case(second, "objects"))
    })?;
    segments.get(..at + 1)
}

/// The repository of an archive or a release file.
fn download_repository<'a, 'b>(
    method: &str,
    query: Option<&str>,
    segments: &'a [&'b str],
) -> Option<&'a [&'b str]> {
    // A query may contain a token, and the request would not be anonymous.
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

    fn address(line: &str) -> Option<RepositoryAddress> {
        let (method, path) = line.split_once(' ').unwrap();
        recognise(&target(method, path))
    }

    #[test]
    fn git_request_is_recognised_in_every_spelling() {
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
                (address.operation, address.display_name.as_str()),
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
    fn push_is_detected_on_any_host_in_any_reading() {
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
    fn ambiguous_or_other_request_is_not_recognised() {
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
