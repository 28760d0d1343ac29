//! Repositories on the command line: `owner/name`, or `owner/name:500MiB` with a push limit.

use config::leaf::{read_size, show_size};
use policy::registration::{MAX_RECEIVE_PACK_BYTES, Repo, RepoName};

/// Reads `OWNER/NAME` or `OWNER/NAME:SIZE`.
pub fn read(text: &str) -> Result<Repo, String> {
    let (name, limit) = match text.split_once(':') {
        None => (text, None),
        Some((name, size)) => (name, Some(read_limit(size)?)),
    };
    let name = RepoName::parse(name).map_err(|error| error.to_string())?;
    Ok(Repo {
        name,
        max_receive_pack_bytes: limit,
    })
}

/// Formats a repository as [`read`] parses it.
pub fn show(repo: &Repo) -> String {
    let name = repo.name.as_str();
    match repo.max_receive_pack_bytes {
        None => name.to_owned(),
        Some(limit) => format!("{name}:{}", show_size(limit)),
    }
}

fn read_limit(size: &str) -> Result<u64, String> {
    let bytes = read_size(size).map_err(|error| format!("the push limit {error}"))?;
    if (1..=MAX_RECEIVE_PACK_BYTES).contains(&bytes) {
        return Ok(bytes);
    }
    let max = show_size(MAX_RECEIVE_PACK_BYTES);
    Err(format!(
        "the push limit '{size}' must be between 1 byte and {max}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repository_may_have_a_push_limit() {
        for (text, name, limit) in [
            ("acme/app", "acme/app", None),
            ("Acme/App.git", "acme/app", None),
            ("acme/app:500MiB", "acme/app", Some(MAX_RECEIVE_PACK_BYTES)),
            ("acme/app:1000", "acme/app", Some(1000)),
        ] {
            let repo = read(text).unwrap();
            assert_eq!(repo.name.as_str(), name);
            assert_eq!(repo.max_receive_pack_bytes, limit);
            assert_eq!(read(&show(&repo)), Ok(repo));
        }
        for (text, reason) in [
            ("app", "a repository is written owner/name"),
            ("acme/app:", "the push limit '' is not a size"),
            ("acme/app:much", "the push limit 'much' is not a size"),
            ("acme/app:0", "must be between 1 byte and 500MiB"),
            ("acme/app:501MiB", "must be between 1 byte and 500MiB"),
            ("acme/app:1MiB:2", "is not a size"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
