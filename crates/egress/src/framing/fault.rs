//! What was wrong with the framing of a message, in words for who sent it.

use thiserror::Error;

/// A message whose end, or whose recipient, two readers could see differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{what}")]
pub struct Fault {
    /// Which rule it broke.
    pub what: FaultKind,
}

/// The rules, by what breaks them. RFC 9112 where no other source is named.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FaultKind {
    /// Section 3: three parts, one space between them.
    #[error("the request line is not 'METHOD TARGET VERSION' with single spaces")]
    RequestLine,
    /// Section 3.1.
    #[error("the request does not begin with a method; is this HTTP?")]
    Method,
    /// Section 3.2.
    #[error(
        "the request target is not of a form that its method takes, or has a character that must be percent-encoded"
    )]
    Target,
    /// A limit of ours.
    #[error("the request target is longer than the gate reads; put long values into the body")]
    TargetTooLong,
    /// Section 2.3.
    #[error("the request's version is neither HTTP/1.0 nor HTTP/1.1")]
    Version,
    /// Section 2.2: we take no part in the leniency it permits.
    #[error("a line ends in a bare LF; lines end in CRLF")]
    BareLineFeed,
    /// Section 2.2.
    #[error("a line contains a bare CR; lines end in CRLF")]
    BareCarriageReturn,
    /// Section 5.2.
    #[error("a header is folded over several lines; write it on one")]
    Fold,
    /// Section 5.1.
    #[error("a header name is followed by white space; its colon comes at once")]
    SpaceBeforeColon,
    /// RFC 9110, section 5.1.
    #[error("a header line has no name, or a name that is not a token")]
    Name,
    /// RFC 9110, section 5.5.
    #[error("a header value contains a control character")]
    Value,
    /// A limit of ours.
    #[error("the request's head is longer than the gate reads")]
    HeadTooLong,
    /// A limit of ours.
    #[error("the request has more headers than the gate reads")]
    TooManyHeaders,
    /// Section 3.2.
    #[error("the request has no Host header")]
    NoHost,
    /// Section 3.2.
    #[error("the request has more than one Host header")]
    TwoHosts,
    /// Section 6.3: equal ones too, which it lets a recipient merge.
    #[error("the request has more than one Content-Length header")]
    TwoLengths,
    /// RFC 9110, section 8.6.
    #[error("the Content-Length is not one decimal number that the gate can count to")]
    Length,
    /// Section 6.1.
    #[error("the request has both Content-Length and Transfer-Encoding; send one of them")]
    LengthAndCoding,
    /// Section 6.1.
    #[error("the request has more than one Transfer-Encoding header")]
    TwoCodings,
    /// Section 6.1: compression belongs into Content-Encoding.
    #[error("the Transfer-Encoding is not exactly 'chunked'")]
    Coding,
    /// Section 6.1.
    #[error("an HTTP/1.0 request has a Transfer-Encoding; send Content-Length")]
    OldCoding,
    /// RFC 9110, section 9.3.6.
    #[error("a CONNECT request announces a body; it has none")]
    ConnectBody,
    /// Section 7.1.
    #[error("a chunk does not begin with its size in hexadecimal digits")]
    ChunkSize,
    /// Section 7.1.
    #[error("a chunk's size is longer than the gate can count to")]
    ChunkTooLong,
    /// Section 7.1.1: nobody needs them, and readers differ on where they end.
    #[error("a chunk's size is followed by an extension or white space; the gate takes neither")]
    ChunkExtension,
    /// Section 7.1.
    #[error("a chunk's data does not end in CRLF where its size said")]
    ChunkEnd,
    /// Section 6.5.1 of RFC 9110.
    #[error("a trailer names a field that belongs into the head")]
    Trailer,
    /// A limit of ours.
    #[error("the trailers are longer than the gate reads")]
    TrailersTooLong,
    /// Section 8.
    #[error("the connection ended in the middle of a request's head")]
    Cut,
}
