//! Formats of names.

use super::{Format, require};

/// A name for people: printable, one line.
pub(crate) struct Name;

impl Format for Name {
    const NAME: &'static str = "name";
    const DESCRIPTION: &'static str = "a name of 1 to 128 printable characters";

    fn check(text: &str) -> Result<(), String> {
        let printable =
            |c: char| !c.is_control() && c.escape_debug().count() == 1 || "'\"\\".contains(c);
        require(
            !text.is_empty()
                && text.chars().count() <= 128
                && text.trim() == text
                && text.chars().all(printable),
        )
    }
}

/// A name that becomes part of a path, a URL or a placeholder.
pub(crate) struct Slug;

impl Format for Slug {
    const NAME: &'static str = "slug";
    const DESCRIPTION: &'static str =
        "a name of 1 to 64 letters, digits, '_', '.' or '-' that starts with a letter or digit";

    fn check(text: &str) -> Result<(), String> {
        require(
            text.len() <= 64
                && text.starts_with(|c: char| c.is_ascii_alphanumeric())
                && text
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-')),
        )
    }
}

/// The name of a sandbox, as `sandbox::name::Slug` accepts it.
pub(crate) struct SandboxName;

impl Format for SandboxName {
    const NAME: &'static str = "sandbox-name";
    const DESCRIPTION: &'static str =
        "a name of 1 to 63 lower-case letters and digits, with single dashes in between";

    fn check(text: &str) -> Result<(), String> {
        let is_part = |part: &str| {
            !part.is_empty()
                && part
                    .bytes()
                    .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
        };
        require(text.len() <= 63 && text.split('-').all(is_part))
    }
}

/// A container image.
pub(crate) struct Image;

impl Format for Image {
    const NAME: &'static str = "image";
    const DESCRIPTION: &'static str = "a container image such as busybox:latest";

    fn check(text: &str) -> Result<(), String> {
        require(
            text.len() <= 512
                && text.starts_with(|c: char| c.is_ascii_alphanumeric())
                && text
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b"._-/:@".contains(&b)),
        )
    }
}

/// The name of a header.
pub(crate) struct HeaderName;

impl Format for HeaderName {
    const NAME: &'static str = "header-name";
    const DESCRIPTION: &'static str = "the name of a header";

    fn check(text: &str) -> Result<(), String> {
        require(
            !text.is_empty()
                && text
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b)),
        )
    }
}

/// The public key of an SSH server.
pub(crate) struct HostKey;

impl Format for HostKey {
    const NAME: &'static str = "host-key";
    const DESCRIPTION: &'static str = "a public host key such as 'ssh-ed25519 AAAA…'";

    fn check(text: &str) -> Result<(), String> {
        let mut words = text.split(' ');
        let kind = words.next().unwrap_or_default();
        let key = words.next().unwrap_or_default();
        let known = ["ssh-", "ecdsa-", "sk-"]
            .iter()
            .any(|start| kind.starts_with(start));
        require(
            known
                && !text.contains(char::is_control)
                && !key.is_empty()
                && key
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b"+/=".contains(&b)),
        )
    }
}
