//! Framing faults of HTTP/1 messages, with messages for the client.

use thiserror::Error;

/// A message whose end or recipient two parsers could read differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{kind}")]
pub struct Fault {
    /// The violated rule.
    pub kind: FaultKind,
}

/// The violated rule. Section numbers are of RFC 9112 unless another RFC is named.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FaultKind {
    /// Section 3: three parts, separated by single spaces.
    #[error("the request line is not 'METHOD TARGET VERSION' with single spaces")]
    RequestLine,
    /// Section 3.1.
    #[error("the request does not start with a method; is this HTTP?")]
    Method,
    /// Section 3.2.
    #[error("the request target is invalid for its method, or needs percent-encoding")]
    Target,
    /// The gate's own limit.
    #[error("the request target exceeds the gate's limit; put long values into the body")]
    TargetTooLong,
    /// Section 2.3.
    #[error("the request version is neither HTTP/1.0 nor HTTP/1.1")]
    Version,
    /// Section 2.2 permits to accept a bare LF; the gate does not.
    #[error("a line ends in a bare LF; lines end in CRLF")]
    BareLineFeed,
    /// Section 2.2.
    #[error("a line contains a bare CR; lines end in CRLF")]
    BareCarriageReturn,
    /// Section 5.2.
    #[error("a header is folded over several lines; send it on one line")]
    Fold,
    /// Section 5.1.
    #[error("a header name is followed by white space; the colon must follow at once")]
    SpaceBeforeColon,
    /// RFC 9110, section 5.1.
    #[error("a header line has no name, or a name that is not a token")]
    Name,
    /// RFC 9110, section 5.5.
    #[error("a header value contains a control character")]
    Value,
    /// The gate's own limit.
    #[error("the request head exceeds the gate's size limit")]
    HeadTooLong,
    /// The gate's own limit.
    #[error("the request has more headers than the gate allows")]
    TooManyHeaders,
    /// Section 3.2.
    #[error("the request has no Host header")]
    NoHost,
    /// Section 3.2.
    #[error("the request has more than one Host header")]
    TwoHosts,
    /// Section 6.3 permits to merge equal values; the gate does not.
    #[error("the request has more than one Content-Length header")]
    TwoLengths,
    /// RFC 9110, section 8.6.
    #[error("the Content-Length is not a single decimal number in the supported range")]
    Length,
    /// Section 6.1.
    #[error("the request has both Content-Length and Transfer-Encoding; send one of them")]
    LengthAndCoding,
    /// Section 6.1.
    #[error("the request has more than one Transfer-Encoding header")]
    TwoCodings,
    /// Section 6.1. Compression belongs in Content-Encoding.
    #[error("the Transfer-Encoding is not exactly 'chunked'")]
    Coding,
    /// Section 6.1.
    #[error("an HTTP/1.0 request has a Transfer-Encoding; send a Content-Length")]
    OldCoding,
    /// RFC 9110, section 9.3.6.
    #[error("a CONNECT request announces a body; it must not have one")]
    ConnectBody,
    /// Section 7.1.
    #[error("a chunk does not start with its size in hexadecimal digits")]
    ChunkSize,
    /// Section 7.1.
    #[error("a chunk size has more digits than the gate supports")]
    ChunkTooLong,
    /// Section 7.1.1: chunk extensions are not in use, and parsers disagree on where they end.
    #[error("a chunk size is followed by an extension or white space; the gate accepts neither")]
    ChunkExtension,
    /// Section 7.1.
    #[error("a chunk does not end in CRLF after its announced size")]
    ChunkEnd,
    /// RFC 9110, section 6.5.1.
    #[error("a trailer has a field that belongs in the head")]
    Trailer,
    /// The gate's own limit.
    #[error("the trailers exceed the gate's size limit")]
    TrailersTooLong,
    /// Section 8.
    #[error("the connection ended in the middle of a request's head")]
    Cut,
}
