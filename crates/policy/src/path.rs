//! Request paths, normalised before they are compared with rules and sent.
//!
//! ```text
//! raw target ──parse──▶ text  (decoded once)    ──▶ compared with rules
//!                  └──▶ wire  (encoded again)   ──▶ sent to the upstream
//! ```
//!
//! Different servers interpret some paths differently, and a rule must hold for whichever server
//! receives the request. A path that all servers interpret alike is normalised; a path that could
//! leave its root or hide segments from a rule is refused. Two such differences are common and are
//! modelled as readings: an encoded slash may be a separator or a character, and a path parameter
//! (`;v=1`) may be part of its segment or dropped. A path is refused if the order of splitting and
//! dropping matters (`/a;x%2Fb`) or if servers could treat only some semicolons as parameters
//! (`/a;x/b%3Bc`): such a path has more readings than rules are compared with.

/// The path and query of a request target, validated and normalised.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct CleanPath {
    /// `path` or `path?query`, as it is sent.
    target: Box<str>,
    /// Length of the path in `target`.
    path_len: usize,
    /// The decoded path, if it differs. Encoded slashes are slashes here, too.
    decoded: Option<Box<str>>,
    /// Positions of the slashes of `decoded` that were encoded.
    encoded_slashes: Box<[usize]>,
    /// Whether the text contains a `;`.
    has_parameters: bool,
    /// Whether the text ends in a slash.
    has_trailing_slash: bool,
}

/// Why a path is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadPath {
    /// `*`, a URL, or empty.
    #[error("a path must start with '/'")]
    NotAbsolute,
    /// `#`.
    #[error("a request must not contain a fragment ('#')")]
    Fragment,
    /// `%` without two hexadecimal digits.
    #[error("'%' must be followed by two hexadecimal digits")]
    BadPercent,
    /// `%2541`.
    #[error("the path is percent-encoded twice")]
    DoubleEncoded,
    /// `\` or `%5C`.
    #[error("a path must not contain a backslash, encoded or not")]
    Backslash,
    /// A control character.
    #[error("a path must not contain control characters, encoded or not")]
    Control,
    /// A raw space.
    #[error("a path must not contain whitespace that is not percent-encoded")]
    Whitespace,
    /// `%FF`, or an overlong `%C0%AF`.
    #[error("the path does not decode to UTF-8")]
    NotUtf8,
    /// `/..`.
    #[error("the path leaves its root with '..'")]
    AboveRoot,
    /// `/..;/` or `/;x`.
    #[error("a path parameter (';') must not follow an empty or dot segment")]
    HiddenSegment,
    /// `/a%2F..`, `/%2Fa` or `/a;x%2Fb`.
    #[error(
        "an encoded slash ('%2F') must not create an empty or dot segment, nor follow a ';' in its segment"
    )]
    EncodedSlash,
    /// `/a;x/b%3Bc`.
    #[error("a path must not contain ';' both encoded and not")]
    MixedParameters,
}

/// One of the ways in which a server may interpret a path.
///
/// An allow rule must match in all readings, a deny rule takes effect if it matches in any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reading {
    /// An encoded slash separates segments.
    pub(crate) splits_encoded_slashes: bool,
    /// A segment ends before its first `;`.
    pub(crate) drops_parameters: bool,
}

impl Reading {
    /// The literal reading, in which an encoded slash is a character.
    pub(crate) const LITERAL: Reading = Reading {
        splits_encoded_slashes: false,
        drops_parameters: false,
    };

    /// All readings, the literal one first.
    pub(crate) const ALL: [Reading; 4] = [
        Reading::LITERAL,
        Reading {
            splits_encoded_slashes: true,
            drops_parameters: false,
        },
        Reading {
            splits_encoded_slashes: false,
            drops_parameters: true,
        },
        Reading {
            splits_encoded_slashes: true,
            drops_parameters: true,
        },
    ];
}

impl CleanPath {
    /// Validates and normalises the path and query of a request target (origin form).
    ///
    /// The path is decoded exactly once, `//` becomes `/`, and dot segments are resolved.
    /// The query is not changed: no rule depends on it.
    pub fn parse(target: &str) -> Result<Self, BadPath> {
        let (path, query) = match target.split_once('?') {
            Some((path, query)) => (path, Some(query)),
            None => (target, None),
        };
        let segments = path.strip_prefix('/').ok_or(BadPath::NotAbsolute)?;
        if let Some(query) = query {
            check_query(query)?;
        }

        if is_clean(path) {
            return Ok(Self {
                target: target.into(),
                path_len: path.len(),
                decoded: None,
                encoded_slashes: Box::default(),
                has_parameters: path.contains(';'),
                has_trailing_slash: path.ends_with('/'),
            });
        }
        let mut builder = PathBuilder::with_capacity(target.len());
        for segment in segments.split('/') {
            builder.push(segment)?;
        }
        builder.finish(query)
    }

    /// The path as it is sent, without the query: with upper case hexadecimal digits, and without
    /// unnecessary encoding.
    ///
    /// A reserved character stays encoded or not, as the client sent it: `:` and `%3A` differ
    /// (RFC 3986, 2.2), and signatures over the path depend on it.
    pub fn wire(&self) -> &str {
        self.target.get(..self.path_len).unwrap_or(&self.target)
    }

    /// The query as it is sent, without its `?`.
    pub fn query(&self) -> Option<&str> {
        self.target.get(self.path_len + 1..)
    }

    /// Path and query as they are sent.
    pub fn target(&self) -> &str {
        &self.target
    }

    /// The decoded path. An encoded slash is a slash here: check
    /// [`has_encoded_slash`](Self::has_encoded_slash) before relying on a segment.
    pub fn text(&self) -> &str {
        self.decoded.as_deref().unwrap_or_else(|| self.wire())
    }

    /// The decoded segments; an encoded slash is a character of its segment.
    pub fn segments(&self) -> impl Iterator<Item = &str> {
        let mut at = 0;
        std::iter::from_fn(move || {
            let (segment, next) = self.segment_at(at, Reading::LITERAL)?;
            at = next;
            Some(segment)
        })
    }

    /// Whether the path ends in a slash, as the root does.
    pub fn has_trailing_slash(&self) -> bool {
        self.has_trailing_slash
    }

    /// Whether the path contains an encoded slash.
    pub fn has_encoded_slash(&self) -> bool {
        !self.encoded_slashes.is_empty()
    }

    /// Whether all servers interpret the path alike.
    pub(crate) fn has_one_reading(&self) -> bool {
        self.encoded_slashes.is_empty() && !self.has_parameters
    }

    /// The segment at offset `at` (zero for the first), and the offset of the next one.
    pub(crate) fn segment_at(&self, at: usize, reading: Reading) -> Option<(&str, usize)> {
        // The text between the first slash and a trailing one.
        let text = self.text();
        let end = text.len() - usize::from(self.has_trailing_slash);
        let rest = text.get(1 + at..end).filter(|_| end > 1)?;
        let mut slashes = rest.bytes().enumerate().filter(|(_, b)| *b == b'/');
        let end = if reading.splits_encoded_slashes || self.encoded_slashes.is_empty() {
            slashes.next()
        } else {
            slashes.find(|(end, _)| self.encoded_slashes.binary_search(&(1 + at + end)).is_err())
        };
        let end = end.map_or(rest.len(), |(end, _)| end);
        let segment = rest.get(..end)?;
        let segment = match segment.split_once(';') {
            Some((bare, _)) if reading.drops_parameters => bare,
            _ => segment,
        };
        Some((segment, at + end + 1))
    }
}

impl std::fmt::Debug for CleanPath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // A query may contain a token, which must not appear in logs.
        let mark = if self.query().is_some() { "?…" } else { "" };
        write!(f, "CleanPath(\"{}{mark}\")", self.wire())
    }
}

/// Formats the path without its query, which must not appear in logs and records.
impl std::fmt::Display for CleanPath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.wire())
    }
}

/// Whether a path is normalised already. This is the fast path for most requests.
fn is_clean(path: &str) -> bool {
    let Some(body) = path.strip_prefix('/') else {
        return false;
    };
    body.is_empty()
        || body
            .strip_suffix('/')
            .unwrap_or(body)
            .as_bytes()
            .split(|b| *b == b'/')
            .all(|segment| segment.iter().all(|b| is_plain(*b)) && !is_empty_or_dot(segment))
}

/// A path under construction in [`CleanPath::parse`].
struct PathBuilder {
    wire: Vec<u8>,
    text: Vec<u8>,
    encoded_slashes: Vec<usize>,
    /// Whether the last segment was empty or a dot segment; both mean a directory, with a slash
    /// at the end.
    ends_in_slash: bool,
}

impl PathBuilder {
    fn with_capacity(len: usize) -> Self {
        Self {
            wire: Vec::with_capacity(len),
            text: Vec::with_capacity(len),
            encoded_slashes: Vec::new(),
            ends_in_slash: true,
        }
    }

    /// Adds one raw segment.
    fn push(&mut self, raw: &str) -> Result<(), BadPath> {
        let (wire_start, text_start) = (self.wire.len(), self.text.len());
        self.wire.push(b'/');
        self.text.push(b'/');

        let mut rest = raw.as_bytes();
        let (mut has_percent, mut has_encoded_slash) = (false, false);
        loop {
            let end = rest.iter().position(|b| !is_plain(*b));
            let (run, after) = rest.split_at(end.unwrap_or(rest.len()));
            self.wire.extend_from_slice(run);
            self.text.extend_from_slice(run);
            let Some((unit, after)) = decode_byte(after)? else {
                break;
            };
            rest = after;
            has_percent |= unit.byte == b'%';
            if unit.byte == b'/' {
                has_encoded_slash = true;
                self.encoded_slashes.push(self.text.len());
            }
            self.text.push(unit.byte);
            unit.write_to(&mut self.wire);
        }

        let segment = self.text.get(text_start + 1..).unwrap_or_default();
        if has_percent && is_double_encoded(segment) {
            return Err(BadPath::DoubleEncoded);
        }
        if has_encoded_slash {
            if segment.split(|b| *b == b'/').any(is_empty_or_dot)
                || has_slash_in_parameters(segment)
            {
                return Err(BadPath::EncodedSlash);
            }
            self.ends_in_slash = false;
            return Ok(());
        }
        self.ends_in_slash = matches!(segment, b"" | b"." | b"..");
        if !self.ends_in_slash {
            return if is_empty_or_dot(segment) {
                Err(BadPath::HiddenSegment)
            } else {
                Ok(())
            };
        }
        let is_parent = segment == b"..";
        self.wire.truncate(wire_start);
        self.text.truncate(text_start);
        if is_parent { self.pop() } else { Ok(()) }
    }

    /// Removes the last segment.
    fn pop(&mut self) -> Result<(), BadPath> {
        // In the wire form an encoded slash is `%2F`, so the last slash is a separator.
        let at = self.wire.iter().rposition(|b| *b == b'/');
        self.wire.truncate(at.ok_or(BadPath::AboveRoot)?);
        while let Some(at) = self.text.iter().rposition(|b| *b == b'/') {
            self.text.truncate(at);
            if self.encoded_slashes.last() == Some(&at) {
                self.encoded_slashes.pop();
            } else {
                break;
            }
        }
        Ok(())
    }

    /// Completes the path and adds the query.
    fn finish(mut self, query: Option<&str>) -> Result<CleanPath, BadPath> {
        if self.ends_in_slash {
            self.wire.push(b'/');
            self.text.push(b'/');
        }
        let text = String::from_utf8(self.text).map_err(|_| BadPath::NotUtf8)?;
        // ASCII control characters were rejected before; these are U+0080 to U+009F.
        if !text.is_ascii() && text.chars().any(char::is_control) {
            return Err(BadPath::Control);
        }
        if has_mixed_parameters(&self.wire) {
            return Err(BadPath::MixedParameters);
        }
        let path_len = self.wire.len();
        let has_parameters = text.contains(';');
        let decoded = (text.as_bytes() != self.wire).then(|| text.into());
        if let Some(query) = query {
            self.wire.push(b'?');
            self.wire.extend_from_slice(query.as_bytes());
        }
        let target = String::from_utf8(self.wire).map_err(|_| BadPath::NotUtf8)?;
        Ok(CleanPath {
            target: target.into(),
            path_len,
            decoded,
            has_parameters,
            has_trailing_slash: self.ends_in_slash,
            encoded_slashes: self.encoded_slashes.into(),
        })
    }
}

/// One decoded byte of a path, and whether it was encoded as `%XX`.
#[derive(Clone, Copy)]
pub(crate) struct DecodedByte {
    pub(crate) byte: u8,
    pub(crate) encoded: bool,
}

impl DecodedByte {
    fn write_to(self, wire: &mut Vec<u8>) {
        if is_unreserved(self.byte) || (is_plain(self.byte) && !self.encoded) {
            wire.push(self.byte);
        } else {
            let digit = |n: u8| if n < 10 { b'0' + n } else { b'A' + n - 10 };
            wire.extend([b'%', digit(self.byte >> 4), digit(self.byte & 15)]);
        }
    }
}

/// Unreserved characters of RFC 3986, which are never encoded.
const fn is_unreserved(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~')
}

/// Characters that are allowed in a segment without encoding.
const fn is_plain(byte: u8) -> bool {
    is_unreserved(byte)
        || matches!(
            byte,
            b'!' | b'$'
                | b'&'
                | b'\''
                | b'('
                | b')'
                | b'*'
                | b'+'
                | b','
                | b';'
                | b'='
                | b':'
                | b'@'
        )
}

/// Decodes the first byte of `raw`, and returns it with the rest.
///
/// A returned `/` was encoded: raw slashes separate segments and are never in `raw`.
pub(crate) fn decode_byte(raw: &[u8]) -> Result<Option<(DecodedByte, &[u8])>, BadPath> {
    let (unit, rest) = match raw {
        [] => return Ok(None),
        [b'%', rest @ ..] => {
            let [high, low, rest @ ..] = rest else {
                return Err(BadPath::BadPercent);
            };
            let (high, low) = (hex_value(*high), hex_value(*low));
            let byte = high.zip(low).map(|(high, low)| (high << 4) | low);
            let byte = byte.ok_or(BadPath::BadPercent)?;
            (
                DecodedByte {
                    byte,
                    encoded: true,
                },
                rest,
            )
        }
        [b'#', ..] => return Err(BadPath::Fragment),
        [b' ', ..] => return Err(BadPath::Whitespace),
        [byte, rest @ ..] => (
            DecodedByte {
                byte: *byte,
                encoded: false,
            },
            rest,
        ),
    };
    match unit.byte {
        b'\\' => Err(BadPath::Backslash),
        byte if byte.is_ascii_control() => Err(BadPath::Control),
        _ => Ok(Some((unit, rest))),
    }
}

/// Whether decoded text could be decoded once more.
pub(crate) fn is_double_encoded(text: &[u8]) -> bool {
    text.windows(3).any(|three| {
        matches!(three, [b'%', high, low] if high.is_ascii_hexdigit() && low.is_ascii_hexdigit())
    })
}

/// Whether the segment without its parameters is empty or a dot segment.
pub(crate) fn is_empty_or_dot(segment: &[u8]) -> bool {
    let bare = segment.split(|b| *b == b';').next().unwrap_or(segment);
    matches!(bare, b"" | b"." | b"..")
}

/// Whether a decoded segment contains a slash after a `;`. Servers that drop parameters before
/// they split the path do not see the slash, others do.
pub(crate) fn has_slash_in_parameters(segment: &[u8]) -> bool {
    let mut bytes = segment.iter().skip_while(|b| **b != b';');
    bytes.any(|b| *b == b'/')
}

/// Whether an encoded path contains both `;` and `%3B`: a server that drops parameters before it
/// decodes the path drops only one of them.
pub(crate) fn has_mixed_parameters(encoded: &[u8]) -> bool {
    encoded.contains(&b';')
        && encoded
            .windows(3)
            .any(|three| three.eq_ignore_ascii_case(b"%3B"))
}

const fn hex_value(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        b'A'..=b'F' => Some(digit - b'A' + 10),
        _ => None,
    }
}

fn check_query(query: &str) -> Result<(), BadPath> {
    for c in query.chars() {
        if c == '#' {
            return Err(BadPath::Fragment);
        }
        if c.is_control() {
            return Err(BadPath::Control);
        }
        if c.is_whitespace() {
            return Err(BadPath::Whitespace);
        }
    }
    Ok(())
}

/// Fuzzing entry point: the wire form parses to the same path, and the decoded path contains no
/// dot segments, backslashes or control characters.
pub fn fuzz_check(text: &str) {
    let Ok(path) = CleanPath::parse(text) else {
        return;
    };
    let again = CleanPath::parse(path.target());
    assert_eq!(again.as_ref(), Ok(&path), "{text:?}");
    assert!(path.text().starts_with('/'), "{text:?}");
    let hidden = |c: char| c == '\\' || c.is_control();
    assert!(!path.text().contains(hidden), "{text:?}");
    for segment in path.segments() {
        assert!(!matches!(segment, "." | ".."), "{text:?}");
    }
}

#[cfg(test)]
mod tests;
