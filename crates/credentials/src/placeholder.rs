//! Placeholders: the texts that a sandbox holds instead of credentials.
//!
//! A placeholder has the prefix and the length of the real kind, so that tools accept it. It is
//! derived from the gate's key, the sandbox and the row: the same after a restart, different for
//! every sandbox and row, and stored nowhere. Every placeholder contains [`MARKER`] and a tag, by
//! which the gate also finds the placeholders of other sandboxes, including deleted ones.

use std::fs;
use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;

use aws_lc_rs::hmac;
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use memchr::memmem;
use policy::id::SandboxId;
use zeroize::Zeroizing;

/// Text that every placeholder contains.
pub const MARKER: &str = "PALISADE";

/// Number of base32 characters after the marker.
const TAG_LENGTH: usize = 8;

/// Length of the marker with its tag.
pub const CORE_LENGTH: usize = MARKER.len() + TAG_LENGTH;

const BASE32: &[u8; 32] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";
const ALPHANUMERIC: &[u8; 62] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";

/// Length of the key, in bytes.
const KEY_LENGTH: usize = 32;

/// The shape of a kind of credential, as tools check it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// A prefix, then this many letters and digits (at least [`CORE_LENGTH`]).
    Token {
        /// The fixed prefix, such as `ghp_`.
        prefix: &'static str,
        /// The number of characters after the prefix.
        length: usize,
    },
    /// A JSON Web Token that expires in the year 2100.
    Jwt,
}

impl Shape {
    /// A credential of unknown kind.
    pub const UNKNOWN: Shape = Shape::Token {
        prefix: "",
        length: 40,
    };
}

/// Makes placeholders with the gate's key.
pub struct PlaceholderKey(hmac::Key);

impl std::fmt::Debug for PlaceholderKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PlaceholderKey")
    }
}

impl PlaceholderKey {
    /// Reads the key from `path`, or writes a new one (mode 0600). Blocks.
    pub fn open(path: &Path) -> io::Result<Self> {
        match fs::read(path) {
            Ok(bytes) => {
                let bytes = Zeroizing::new(bytes);
                let key: &[u8; KEY_LENGTH] = bytes.as_slice().try_into().map_err(|_| {
                    let message = format!(
                        "{} is damaged: remove it, and recreate the sandboxes that hold credentials",
                        path.display()
                    );
                    io::Error::new(io::ErrorKind::InvalidData, message)
                })?;
                Ok(Self::from_bytes(key))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Self::create(path),
            Err(error) => Err(error),
        }
    }

    fn create(path: &Path) -> io::Result<Self> {
        let mut bytes = Zeroizing::new([0; KEY_LENGTH]);
        aws_lc_rs::rand::fill(&mut bytes[..]).map_err(|_| io::Error::other("no random numbers"))?;
        let directory = path.parent().unwrap_or(Path::new("."));
        // Created with mode 0600, and visible under its name only when complete.
        let mut file = tempfile::NamedTempFile::new_in(directory)?;
        file.write_all(&bytes[..])?;
        file.as_file().sync_all()?;
        file.persist(path)?;
        fs::File::open(directory)?.sync_all()?;
        Ok(Self::from_bytes(&bytes))
    }

    fn from_bytes(bytes: &[u8; KEY_LENGTH]) -> Self {
        Self(hmac::Key::new(hmac::HMAC_SHA256, bytes))
    }

    /// The placeholder of `sandbox` for `row`. `use_index` tells the variants of a row apart.
    pub fn placeholder(
        &self,
        sandbox: &SandboxId,
        row: &str,
        use_index: usize,
        shape: Shape,
    ) -> String {
        let mut source = DerivedBytes {
            key: &self.0,
            context: format!("{}\0{row}\0{use_index}", sandbox.as_str()),
            block: 0,
            bytes: Vec::new(),
        };
        match shape {
            Shape::Token { prefix, length } => {
                let mut text = String::with_capacity(prefix.len() + length);
                text.push_str(prefix);
                source.push_core(&mut text);
                source.push(&mut text, ALPHANUMERIC, length.saturating_sub(CORE_LENGTH));
                text
            }
            Shape::Jwt => {
                let header = r#"{"alg":"RS256","typ":"JWT"}"#;
                let claims = r#"{"iss":"palisade","sub":"placeholder","exp":4102444800}"#;
                let mut text = format!(
                    "{}.{}.",
                    URL_SAFE_NO_PAD.encode(header),
                    URL_SAFE_NO_PAD.encode(claims)
                );
                source.push_core(&mut text);
                source.push(&mut text, ALPHANUMERIC, 70);
                text
            }
        }
    }
}

/// Characters derived from the key and a context.
struct DerivedBytes<'a> {
    key: &'a hmac::Key,
    context: String,
    block: u32,
    bytes: Vec<u8>,
}

impl DerivedBytes<'_> {
    fn next_byte(&mut self) -> u8 {
        loop {
            if let Some(byte) = self.bytes.pop() {
                return byte;
            }
            let text = format!("palisade placeholder\0{}\0{}", self.context, self.block);
            self.block += 1;
            self.bytes = hmac::sign(self.key, text.as_bytes()).as_ref().to_vec();
        }
    }

    fn push(&mut self, text: &mut String, alphabet: &[u8], count: usize) {
        for _ in 0..count {
            let index = usize::from(self.next_byte()) % alphabet.len();
            text.push(char::from(alphabet.get(index).copied().unwrap_or(b'A')));
        }
    }

    /// Appends the marker and the tag.
    fn push_core(&mut self, text: &mut String) {
        text.push_str(MARKER);
        self.push(text, BASE32, TAG_LENGTH);
    }
}

/// Finds placeholders in texts. Building the searcher once makes a search a scan for one byte
/// pattern.
#[derive(Clone, Debug)]
pub struct PlaceholderFinder(memmem::Finder<'static>);

impl Default for PlaceholderFinder {
    fn default() -> Self {
        Self(memmem::Finder::new(MARKER.as_bytes()))
    }
}

impl PlaceholderFinder {
    /// The first marker with its tag in `text`.
    pub fn find(&self, text: &[u8]) -> Option<Range<usize>> {
        let mut from = 0;
        loop {
            let start = from + self.0.find(text.get(from..)?)?;
            let end = start + CORE_LENGTH;
            let tag = text.get(start + MARKER.len()..end);
            if tag.is_some_and(|tag| tag.iter().all(|byte| BASE32.contains(byte))) {
                return Some(start..end);
            }
            from = start + 1;
        }
    }

    /// Whether `text` contains a placeholder, as it is or below Base64 as in `Basic`
    /// authentication.
    pub fn is_in(&self, text: &[u8]) -> bool {
        self.find(text).is_some() || decoded_basic(text).is_some_and(|text| self.is_in_plain(&text))
    }

    fn is_in_plain(&self, text: &[u8]) -> bool {
        self.find(text).is_some()
    }
}

/// Whether more bytes after `text` could make it a marker with its tag.
pub(crate) fn begins_core(text: &[u8]) -> bool {
    let (marker, tag) = text.split_at(text.len().min(MARKER.len()));
    text.len() < CORE_LENGTH
        && MARKER.as_bytes().starts_with(marker)
        && tag.iter().all(|byte| BASE32.contains(byte))
}

/// The decoded credentials of `Basic` authentication.
pub(crate) fn decoded_basic(value: &[u8]) -> Option<Vec<u8>> {
    let (scheme, rest) = value.split_at_checked(6)?;
    if !scheme.eq_ignore_ascii_case(b"basic ") {
        return None;
    }
    STANDARD.decode(rest.trim_ascii()).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GITHUB: Shape = Shape::Token {
        prefix: "ghp_",
        length: 36,
    };

    fn key() -> PlaceholderKey {
        PlaceholderKey::from_bytes(&[7; KEY_LENGTH])
    }

    fn sandbox(id: &str) -> SandboxId {
        SandboxId::parse(id).unwrap()
    }

    #[test]
    fn placeholder_has_prefix_and_length_of_its_kind() {
        let key = key();
        let github = key.placeholder(&sandbox("a"), "github", 0, GITHUB);
        assert!(github.starts_with("ghp_PALISADE"), "{github}");
        assert_eq!(github.len(), 40);
        let shape = Shape::Token {
            prefix: "AKIA",
            length: 16,
        };
        let aws = key.placeholder(&sandbox("a"), "aws", 0, shape);
        assert_eq!(aws.len(), 20);
        assert!(aws.bytes().all(|b| BASE32.contains(&b)), "{aws}");
        let jwt = key.placeholder(&sandbox("a"), "chatgpt", 0, Shape::Jwt);
        let claims = jwt.split('.').nth(1).unwrap();
        let claims = String::from_utf8(URL_SAFE_NO_PAD.decode(claims).unwrap()).unwrap();
        assert!(claims.contains("\"exp\":4102444800"), "{claims}");
    }

    #[test]
    fn placeholder_is_stable_and_differs_by_sandbox_row_and_variant() {
        let key = key();
        let of = |id, row, index| key.placeholder(&sandbox(id), row, index, GITHUB);
        assert_eq!(of("a", "github", 0), of("a", "github", 0));
        assert_ne!(of("a", "github", 0), of("b", "github", 0));
        assert_ne!(of("a", "github", 0), of("a", "other", 0));
        assert_ne!(of("a", "github", 0), of("a", "github", 1));
    }

    #[test]
    fn key_survives_reopening_and_is_private() {
        use std::os::unix::fs::PermissionsExt;

        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("placeholders.key");
        let first = PlaceholderKey::open(&path).unwrap();
        let again = PlaceholderKey::open(&path).unwrap();
        let text = |key: &PlaceholderKey| key.placeholder(&sandbox("a"), "github", 0, GITHUB);
        assert_eq!(text(&first), text(&again));
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        fs::write(&path, b"short").unwrap();
        let error = PlaceholderKey::open(&path).unwrap_err();
        assert!(error.to_string().contains("is damaged"), "{error}");
    }

    #[test]
    fn finder_finds_placeholders_in_text_and_basic_credentials() {
        let finder = PlaceholderFinder::default();
        let placeholder = key().placeholder(&sandbox("a"), "github", 0, GITHUB);
        assert!(finder.is_in(format!("token {placeholder}").as_bytes()));
        let basic = STANDARD.encode(format!("x-access-token:{placeholder}"));
        assert!(finder.is_in(format!("basic {basic}").as_bytes()));
        for other in [
            "",
            "PALISADE",
            "PALISADE-no-tag",
            "PALISADEabcdefgh",
            "Basic !",
        ] {
            assert!(!finder.is_in(other.as_bytes()), "{other}");
        }
        let twice = b"PALISADE PALISADEABCDEFGH";
        assert_eq!(finder.find(twice), Some(9..25));
    }

    proptest! {
        #[test]
        fn every_placeholder_is_found_wherever_it_stands(
            before in "[ -~]{0,40}",
            after in "[ -~]{0,40}",
            id in "[a-z]{1,12}",
            index in 0..4_usize,
        ) {
            let placeholder = key().placeholder(&sandbox(&id), "row", index, Shape::UNKNOWN);
            let text = format!("{before}{placeholder}{after}");
            prop_assert!(PlaceholderFinder::default().find(text.as_bytes()).is_some());
        }
    }
}
