//! Strict parser of DNS queries, and encoder of answers within the client's size limit.

use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::SOA;
use hickory_proto::rr::rdata::opt::EdnsOption;
use hickory_proto::rr::{Name, RData, Record};
use policy::reason::Reason;

use super::Transport;

/// Length of a message header (RFC 1035, section 4.1.1).
const HEADER_LEN: usize = 12;

/// Datagram size that every client accepts (RFC 1035, section 2.3.4).
const MIN_DATAGRAM: u16 = 512;

/// Datagram size that passes every network unfragmented (RFC 9715).
const MAX_DATAGRAM: u16 = 1232;

/// TTL of answers without records, in seconds.
const EMPTY_TTL: u32 = 5;

/// EDNS option code of extended errors (RFC 8914), which carry the refusal's reason.
const EXTENDED_ERROR: u16 = 15;

/// A well-formed query.
#[derive(Clone, Debug)]
pub(super) struct ParsedQuery {
    id: u16,
    recursion_desired: bool,
    checking_disabled: bool,
    /// The question, in the client's upper and lower case.
    pub(super) question: Query,
    /// The datagram size that the client accepts, if it uses EDNS.
    max_datagram: Option<u16>,
    dnssec_ok: bool,
}

/// The error response to a malformed or unsupported query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InvalidQuery {
    header: [u8; 4],
    code: ResponseCode,
}

/// The content of an answer.
#[derive(Clone, Debug)]
pub(super) struct Reply {
    pub(super) code: ResponseCode,
    /// Records of the queried name.
    pub(super) records: Vec<RData>,
    pub(super) ttl: u32,
    /// The reason of a refusal or failure.
    pub(super) reason: Option<Reason>,
}

/// Parses a query. `None` if it must not be answered: it is too short for a header, or is itself
/// an answer (two servers could answer each other endlessly).
pub(super) fn parse(bytes: &[u8]) -> Option<Result<ParsedQuery, InvalidQuery>> {
    let (header, rest) = bytes.split_at_checked(HEADER_LEN)?;
    let [a, b, flags, more, counts @ ..] = header else {
        return None;
    };
    if flags & 0x80 != 0 {
        return None;
    }
    let invalid = |code| {
        Some(Err(InvalidQuery {
            header: [*a, *b, *flags, *more],
            code,
        }))
    };
    if (flags >> 3) & 0xf != 0 {
        return invalid(ResponseCode::NotImp);
    }
    // One question, no answers, no authorities.
    if !matches!(counts, [0, 1, 0, 0, 0, 0, ..]) || !is_uncompressed(rest) {
        return invalid(ResponseCode::FormErr);
    }
    let Ok(message) = Message::from_vec(bytes) else {
        return invalid(ResponseCode::FormErr);
    };
    if message.edns.as_ref().is_some_and(|edns| edns.version() > 0) {
        return invalid(ResponseCode::BADVERS);
    }
    let max_datagram = message.edns.as_ref().map(Edns::max_payload);
    let dnssec_ok = message
        .edns
        .as_ref()
        .is_some_and(|edns| edns.flags().dnssec_ok);
    let Some(question) = message.queries.into_iter().next() else {
        return invalid(ResponseCode::FormErr);
    };
    Some(Ok(ParsedQuery {
        id: u16::from_be_bytes([*a, *b]),
        recursion_desired: flags & 1 != 0,
        checking_disabled: more & 0x10 != 0,
        question,
        max_datagram,
        dnssec_ok,
    }))
}

/// Whether the question's name is uncompressed. At this position a compression pointer could only
/// point into the header, and is refused.
fn is_uncompressed(mut rest: &[u8]) -> bool {
    let mut length = 0;
    while let Some((label, after)) = rest.split_first() {
        let label = usize::from(*label);
        length += label + 1;
        if label == 0 {
            return after.len() >= 4;
        }
        if label > 63 || length > 254 {
            return false;
        }
        rest = after.get(label..).unwrap_or_default();
    }
    false
}

impl InvalidQuery {
    /// The same error with another response code.
    pub(super) fn with(self, code: ResponseCode) -> Self {
        Self { code, ..self }
    }

    /// The answer's bytes: a header, and an OPT record if the EDNS version is not supported.
    pub(super) fn write(self) -> Vec<u8> {
        let [a, b, flags, more] = self.header;
        let low = self.code.low() & 0xf;
        let high = self.code.high();
        let mut bytes = vec![a, b, 0x80 | (flags & 0x79), 0x80 | (more & 0x10) | low];
        let additional = u8::from(high > 0);
        bytes.extend([0, 0, 0, 0, 0, 0, 0, additional]);
        if high > 0 {
            let [size_a, size_b] = MAX_DATAGRAM.to_be_bytes();
            bytes.extend([0, 0, 41, size_a, size_b, high, 0, 0, 0, 0, 0]);
        }
        bytes
    }
}

impl Reply {
    /// An answer without records: a refusal, a failure, or an empty result.
    pub(super) fn without(code: ResponseCode, reason: Option<Reason>) -> Self {
        Self {
            code,
            records: Vec::new(),
            ttl: 0,
            reason,
        }
    }

    /// An answer with records.
    pub(super) fn with(records: Vec<RData>, ttl: u32) -> Self {
        Self {
            code: ResponseCode::NoError,
            records,
            ttl,
            reason: None,
        }
    }
}

impl ParsedQuery {
    /// The answer's bytes, within the client's size limit.
    pub(super) fn write(&self, reply: &Reply, transport: Transport) -> Vec<u8> {
        let message = self.message(reply);
        let max_size = match (transport, self.max_datagram) {
            (Transport::Tcp, _) => u16::MAX,
            (Transport::Udp, None) => MIN_DATAGRAM,
            (Transport::Udp, Some(size)) => size.clamp(MIN_DATAGRAM, MAX_DATAGRAM),
        };
        let fits = |bytes: &Vec<u8>| bytes.len() <= usize::from(max_size);
        let whole = message.to_vec().ok().filter(fits);
        whole
            .or_else(|| message.truncate().to_vec().ok().filter(fits))
            .unwrap_or_else(|| self.fail())
    }

    fn message(&self, reply: &Reply) -> Message {
        let mut message = Message::new(self.id, MessageType::Response, OpCode::Query);
        message.metadata.recursion_desired = self.recursion_desired;
        message.metadata.checking_disabled = self.checking_disabled;
        message.metadata.recursion_available = true;
        message.metadata.response_code = reply.code;
        message.add_query(self.question.clone());
        let name = &self.question.name;
        message.add_answers(
            reply
                .records
                .iter()
                .map(|data| Record::from_rdata(name.clone(), reply.ttl, data.clone())),
        );
        let is_empty = matches!(reply.code, ResponseCode::NoError | ResponseCode::NXDomain)
            && reply.records.is_empty();
        if is_empty {
            message.add_authority(negative_soa());
        }
        if self.max_datagram.is_some() {
            let mut edns = Edns::new();
            edns.set_max_payload(MAX_DATAGRAM);
            // RFC 3225, section 3: the bit is copied from the query.
            edns.set_dnssec_ok(self.dnssec_ok);
            if let Some(reason) = reply.reason {
                edns.options_mut()
                    .insert(extended_error(reply.code, reason));
            }
            message.set_edns(edns);
        }
        message
    }

    /// SERVFAIL without a question, if even a truncated answer cannot be encoded.
    fn fail(&self) -> Vec<u8> {
        let [a, b] = self.id.to_be_bytes();
        let header = [a, b, u8::from(self.recursion_desired), 0];
        let code = ResponseCode::ServFail;
        InvalidQuery { header, code }.write()
    }
}

/// The SOA record with the TTL of a negative answer (RFC 2308). Its owner is the root, which is
/// above every name.
fn negative_soa() -> Record {
    let soa = SOA::new(Name::root(), Name::root(), 1, 60, 60, 60, EMPTY_TTL);
    Record::from_rdata(Name::root(), EMPTY_TTL, RData::SOA(soa))
}

/// The extended DNS error of a refusal.
fn extended_error(code: ResponseCode, reason: Reason) -> EdnsOption {
    let info: u16 = if reason == Reason::DnsType {
        21 // Not Supported
    } else if code == ResponseCode::Refused {
        18 // Prohibited
    } else if code == ResponseCode::ServFail && reason != Reason::AskTimeout {
        23 // Network Error
    } else {
        15 // Blocked
    };
    let mut bytes = info.to_be_bytes().to_vec();
    bytes.extend(reason.code().as_bytes());
    EdnsOption::Unknown(EXTENDED_ERROR, bytes)
}
