//! One query, read strictly; one answer, written to the size that its asker takes.

use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::SOA;
use hickory_proto::rr::rdata::opt::EdnsOption;
use hickory_proto::rr::{Name, RData, Record};
use policy::reason::Reason;

use super::Transport;

/// RFC 1035, section 4.1.1.
const HEADER: usize = 12;

/// What every client takes (RFC 1035, section 2.3.4).
const SMALLEST_DATAGRAM: u16 = 512;

/// What passes every network unfragmented (RFC 9715).
const LARGEST_DATAGRAM: u16 = 1232;

/// How long clients may remember that there is nothing, in seconds.
const EMPTY_TTL: u32 = 5;

/// RFC 8914: extended errors, for people who look why.
const EXTENDED_ERROR: u16 = 15;

/// A query that can be answered.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    id: u16,
    recursion_desired: bool,
    checking_disabled: bool,
    /// The question, in the letters of the asker.
    pub(super) question: Query,
    /// The size of datagrams the asker takes, where it speaks EDNS.
    datagram: Option<u16>,
    dnssec_ok: bool,
}

/// A query that cannot, and the answer to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    header: [u8; 4],
    code: ResponseCode,
}

/// What goes back.
#[derive(Clone, Debug)]
pub(super) struct Reply {
    pub(super) code: ResponseCode,
    /// What the question's name has.
    pub(super) records: Vec<RData>,
    pub(super) ttl: u32,
    /// Why not.
    pub(super) reason: Option<Reason>,
}

/// Reads a query; `None` where there is nothing to answer: too short to have a header, or
/// itself an answer (two servers could talk for ever).
pub(super) fn read(bytes: &[u8]) -> Option<Result<Asked, Fault>> {
    let (header, rest) = bytes.split_at_checked(HEADER)?;
    let [a, b, flags, more, counts @ ..] = header else {
        return None;
    };
    if flags & 0x80 != 0 {
        return None;
    }
    let fault = |code| {
        Some(Err(Fault {
            header: [*a, *b, *flags, *more],
            code,
        }))
    };
    if (flags >> 3) & 0xf != 0 {
        return fault(ResponseCode::NotImp);
    }
    // One question, no answers, no authorities.
    if !matches!(counts, [0, 1, 0, 0, 0, 0, ..]) || !is_plain(rest) {
        return fault(ResponseCode::FormErr);
    }
    let Ok(message) = Message::from_vec(bytes) else {
        return fault(ResponseCode::FormErr);
    };
    if message.edns.as_ref().is_some_and(|edns| edns.version() > 0) {
        return fault(ResponseCode::BADVERS);
    }
    let datagram = message.edns.as_ref().map(Edns::max_payload);
    let dnssec_ok = message
        .edns
        .as_ref()
        .is_some_and(|edns| edns.flags().dnssec_ok);
    let Some(question) = message.queries.into_iter().next() else {
        return fault(ResponseCode::FormErr);
    };
    Some(Ok(Asked {
        id: u16::from_be_bytes([*a, *b]),
        recursion_desired: flags & 1 != 0,
        checking_disabled: more & 0x10 != 0,
        question,
        datagram,
        dnssec_ok,
    }))
}

/// Whether the question's name is written out. Compression has nothing to point at there,
/// and a pointer into the header is a trick.
fn is_plain(mut rest: &[u8]) -> bool {
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

impl Fault {
    /// The same with another code.
    pub(super) fn with(self, code: ResponseCode) -> Self {
        Self { code, ..self }
    }

    /// The answer: a header, and for a version of EDNS that we do not speak, our own.
    pub(super) fn write(self) -> Vec<u8> {
        let [a, b, flags, more] = self.header;
        let low = self.code.low() & 0xf;
        let high = self.code.high();
        let mut bytes = vec![a, b, 0x80 | (flags & 0x79), 0x80 | (more & 0x10) | low];
        let additional = u8::from(high > 0);
        bytes.extend([0, 0, 0, 0, 0, 0, 0, additional]);
        if high > 0 {
            let [size_a, size_b] = LARGEST_DATAGRAM.to_be_bytes();
            bytes.extend([0, 0, 41, size_a, size_b, high, 0, 0, 0, 0, 0]);
        }
        bytes
    }
}

impl Reply {
    /// No records: a refusal, a failure, or nothing there.
    pub(super) fn without(code: ResponseCode, reason: Option<Reason>) -> Self {
        Self {
            code,
            records: Vec::new(),
            ttl: 0,
            reason,
        }
    }

    /// These records.
    pub(super) fn with(records: Vec<RData>, ttl: u32) -> Self {
        Self {
            code: ResponseCode::NoError,
            records,
            ttl,
            reason: None,
        }
    }
}

impl Asked {
    /// The answer's bytes, never more than the asker takes.
    pub(super) fn write(&self, reply: &Reply, transport: Transport) -> Vec<u8> {
        let message = self.message(reply);
        let most = match (transport, self.datagram) {
            (Transport::Tcp, _) => u16::MAX,
            (Transport::Udp, None) => SMALLEST_DATAGRAM,
            (Transport::Udp, Some(size)) => size.clamp(SMALLEST_DATAGRAM, LARGEST_DATAGRAM),
        };
        let fits = |bytes: &Vec<u8>| bytes.len() <= usize::from(most);
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
            message.add_authority(nothing());
        }
        if self.datagram.is_some() {
            let mut edns = Edns::new();
            edns.set_max_payload(LARGEST_DATAGRAM);
            // RFC 3225, section 3: the bit is copied, whether or not there is anything to it.
            edns.set_dnssec_ok(self.dnssec_ok);
            if let Some(reason) = reply.reason {
                edns.options_mut().insert(explain(reply.code, reason));
            }
            message.set_edns(edns);
        }
        message
    }

    /// A bare failure, where even a truncated answer cannot be written.
    fn fail(&self) -> Vec<u8> {
        let [a, b] = self.id.to_be_bytes();
        let header = [a, b, u8::from(self.recursion_desired), 0];
        let code = ResponseCode::ServFail;
        Fault { header, code }.write()
    }
}

/// The record that says for how long 'nothing' holds (RFC 2308). It stands at the root,
/// which is above every name.
fn nothing() -> Record {
    let soa = SOA::new(Name::root(), Name::root(), 1, 60, 60, 60, EMPTY_TTL);
    Record::from_rdata(Name::root(), EMPTY_TTL, RData::SOA(soa))
}

fn explain(code: ResponseCode, reason: Reason) -> EdnsOption {
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
