//! Parser of a message head. Each line is checked once, when it is complete.

use http::Uri;
use memchr::{memchr, memrchr};

use super::HeadLimits;
use super::fault::FaultKind;

/// The body that follows a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Body {
    /// No body.
    Empty,
    /// A body of this length, which is not zero.
    Fixed(u64),
    /// A chunked body.
    Chunked,
}

/// Most digits of a Content-Length. hyper's maximum is slightly below that of a u64; nineteen
/// digits stay below it.
const MAX_LENGTH_DIGITS: usize = 19;

/// The state of an incoming head: the lines that were read, and their relevant fields.
#[derive(Debug, Default)]
pub(super) struct Head {
    lines: Lines,
    request: Option<RequestLine>,
    fields: usize,
    host: bool,
    length: Option<u64>,
    chunked: bool,
    upgrade: bool,
}

#[derive(Clone, Copy, Debug)]
struct RequestLine {
    connect: bool,
    /// The target contains the host: authority form or absolute form.
    names_host: bool,
    is_http10: bool,
}

impl Head {
    /// Parses further lines of the head. `bytes` starts with the head, including the lines that
    /// earlier calls parsed. Returns the length of the head once it is complete.
    pub(super) fn scan(
        &mut self,
        bytes: &[u8],
        limits: &HeadLimits,
    ) -> Result<Option<usize>, FaultKind> {
        // Checked before the first line ends: another protocol may never send a line.
        if bytes.first().is_some_and(|first| !is_token_byte(*first)) && self.request.is_none() {
            return Err(match bytes {
                [b'\r' | b'\n', ..] => FaultKind::RequestLine,
                _ => FaultKind::Method,
            });
        }
        let (bytes, is_full) = truncate(bytes, limits.head);
        loop {
            let Some(line) = self.lines.next(bytes)? else {
                return if is_full {
                    Err(FaultKind::HeadTooLong)
                } else {
                    Ok(None)
                };
            };
            if self.request.is_none() {
                self.request = Some(RequestLine::read(line, limits)?);
            } else if line.is_empty() {
                return Ok(Some(self.lines.start));
            } else {
                self.fields += 1;
                if self.fields > limits.headers {
                    return Err(FaultKind::TooManyHeaders);
                }
                self.read_field(line)?;
            }
        }
    }

    fn read_field(&mut self, line: &[u8]) -> Result<(), FaultKind> {
        let (name, value) = split_field(line)?;
        if name.eq_ignore_ascii_case(b"host") {
            if self.host {
                return Err(FaultKind::TwoHosts);
            }
            self.host = true;
        } else if name.eq_ignore_ascii_case(b"content-length") {
            if self.length.is_some() {
                return Err(FaultKind::TwoLengths);
            }
            self.length = Some(parse_length(trim(value)).ok_or(FaultKind::Length)?);
        } else if name.eq_ignore_ascii_case(b"transfer-encoding") {
            if self.chunked {
                return Err(FaultKind::TwoCodings);
            }
            if !trim(value).eq_ignore_ascii_case(b"chunked") {
                return Err(FaultKind::Coding);
            }
            self.chunked = true;
        } else if name.eq_ignore_ascii_case(b"upgrade") {
            self.upgrade = true;
        }
        Ok(())
    }

    /// The result of a complete head: its body, and whether the connection may switch protocols
    /// after it.
    pub(super) fn finish(&self) -> Result<(Body, bool), FaultKind> {
        let request = self.request.ok_or(FaultKind::RequestLine)?;
        // Python's urllib sends CONNECT with HTTP/1.0 and no Host.
        let may_lack_host = request.is_http10 && request.names_host;
        if !self.host && !may_lack_host {
            return Err(FaultKind::NoHost);
        }
        if self.chunked && self.length.is_some() {
            return Err(FaultKind::LengthAndCoding);
        }
        if self.chunked && request.is_http10 {
            return Err(FaultKind::OldCoding);
        }
        let body = match self.length {
            None if self.chunked => Body::Chunked,
            None | Some(0) => Body::Empty,
            Some(length) => Body::Fixed(length),
        };
        if request.connect && body != Body::Empty {
            return Err(FaultKind::ConnectBody);
        }
        // Like hyper, this ignores Upgrade in HTTP/1.0.
        Ok((
            body,
            request.connect || (self.upgrade && !request.is_http10),
        ))
    }
}

impl RequestLine {
    fn read(line: &[u8], limits: &HeadLimits) -> Result<Self, FaultKind> {
        if memchr(b'\r', line).is_some() {
            return Err(FaultKind::BareCarriageReturn);
        }
        let (method, rest) = split(line, memchr(b' ', line)).ok_or(FaultKind::RequestLine)?;
        let (target, version) = split(rest, memrchr(b' ', rest)).ok_or(FaultKind::RequestLine)?;
        if !is_token(method) {
            return Err(FaultKind::Method);
        }
        let is_http10 = match version {
            b"HTTP/1.1" => false,
            b"HTTP/1.0" => true,
            _ => return Err(FaultKind::Version),
        };
        if target.is_empty() || target.contains(&b' ') {
            return Err(FaultKind::RequestLine);
        }
        if target.len() > limits.target {
            return Err(FaultKind::TargetTooLong);
        }
        let connect = method == b"CONNECT";
        let names_host = if connect {
            is_authority(target)
                .then_some(true)
                .ok_or(FaultKind::Target)?
        } else {
            match target {
                [b'/', ..] if is_path(target) => false,
                b"*" if method == b"OPTIONS" => false,
                [b'/', ..] | b"*" => return Err(FaultKind::Target),
                _ if is_absolute(target) => true,
                _ => return Err(FaultKind::Target),
            }
        };
        Ok(Self {
            connect,
            names_host,
            is_http10,
        })
    }
}

/// Splits a head or trailers into lines.
#[derive(Debug, Default)]
pub(super) struct Lines {
    /// The start of the current, incomplete line.
    pub(super) start: usize,
    /// There is no line end before this offset.
    scanned: usize,
}

impl Lines {
    /// The next complete line of `bytes`, without its CRLF.
    pub(super) fn next<'a>(&mut self, bytes: &'a [u8]) -> Result<Option<&'a [u8]>, FaultKind> {
        let unseen = bytes.get(self.scanned..).unwrap_or_default();
        let Some(at) = memchr(b'\n', unseen) else {
            self.scanned = bytes.len();
            return Ok(None);
        };
        let end = self.scanned + at;
        let line = bytes.get(self.start..end).unwrap_or_default();
        self.start = end + 1;
        self.scanned = self.start;
        match line.strip_suffix(b"\r") {
            Some(line) => Ok(Some(line)),
            None => Err(FaultKind::BareLineFeed),
        }
    }
}

/// Cuts a section at its size limit, and returns whether the limit is reached. The result does not
/// depend on how the bytes were split.
pub(super) fn truncate(bytes: &[u8], max_len: usize) -> (&[u8], bool) {
    match bytes.get(..max_len) {
        Some(bytes) => (bytes, true),
        None => (bytes, false),
    }
}

/// Splits a header line into name and value, and checks both.
pub(super) fn split_field(line: &[u8]) -> Result<(&[u8], &[u8]), FaultKind> {
    if matches!(line, [b' ' | b'\t', ..]) {
        return Err(FaultKind::Fold);
    }
    let (name, value) = split(line, memchr(b':', line)).ok_or(FaultKind::Name)?;
    if !is_token(name) {
        return Err(match name {
            [before @ .., b' ' | b'\t'] if is_token(before.trim_ascii_end()) => {
                FaultKind::SpaceBeforeColon
            }
            _ => FaultKind::Name,
        });
    }
    // No early exit, so that the compiler can vectorise the loop.
    let has_control = value
        .iter()
        .fold(false, |has_control, byte| has_control | is_control(*byte));
    if has_control {
        return Err(if value.contains(&b'\r') {
            FaultKind::BareCarriageReturn
        } else {
            FaultKind::Value
        });
    }
    Ok((name, value))
}

fn split(bytes: &[u8], at: Option<usize>) -> Option<(&[u8], &[u8])> {
    let (before, rest) = bytes.split_at_checked(at?)?;
    Some((before, rest.get(1..)?))
}

/// Removes surrounding spaces. A tab stays and makes a framing header invalid: ordinary clients do
/// not send tabs there.
fn trim(mut value: &[u8]) -> &[u8] {
    while let [b' ', rest @ ..] | [rest @ .., b' '] = value {
        value = rest;
    }
    value
}

fn parse_length(value: &[u8]) -> Option<u64> {
    if value.is_empty() || value.len() > MAX_LENGTH_DIGITS || !value.iter().all(u8::is_ascii_digit)
    {
        return None;
    }
    value.iter().try_fold(0u64, |sum, digit| {
        sum.checked_mul(10)?.checked_add(u64::from(digit - b'0'))
    })
}

fn is_control(byte: u8) -> bool {
    (byte < b' ' && byte != b'\t') || byte == 0x7f
}

fn is_token(bytes: &[u8]) -> bool {
    !bytes.is_empty() && bytes.iter().all(|byte| is_token_byte(*byte))
}

/// Whether a token may contain the byte (RFC 9110, section 5.6.2).
fn is_token_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
        || matches!(
            byte,
            b'!' | b'#'
                | b'$'
                | b'%'
                | b'&'
                | b'\''
                | b'*'
                | b'+'
                | b'-'
                | b'.'
                | b'^'
                | b'_'
                | b'`'
                | b'|'
                | b'~'
        )
}

/// Whether the target is a path and query that hyper accepts. hyper would answer any other target
/// itself, without calling the service. A target with a fragment is refused, because hyper would
/// drop the fragment.
fn is_path(target: &[u8]) -> bool {
    // Nearly every target has only these bytes; the URI parser, which allocates, checks the rest.
    let is_common_byte = |byte: &u8| {
        byte.is_ascii_alphanumeric()
            || matches!(
                byte,
                b'/' | b'-'
                    | b'.'
                    | b'_'
                    | b'~'
                    | b'%'
                    | b'!'
                    | b'$'
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
                    | b'?'
            )
    };
    target.iter().all(is_common_byte) || (!target.contains(&b'#') && Uri::try_from(target).is_ok())
}

fn is_absolute(target: &[u8]) -> bool {
    !target.contains(&b'#')
        && Uri::try_from(target)
            .is_ok_and(|uri| uri.scheme().is_some() && uri.authority().is_some())
}

fn is_authority(target: &[u8]) -> bool {
    !target.contains(&b'#')
        && Uri::try_from(target).is_ok_and(|uri| {
            uri.scheme().is_none() && uri.authority().is_some() && uri.path_and_query().is_none()
        })
}
