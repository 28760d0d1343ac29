//! What becomes of a question, as far as it needs no waiting.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use config::Settings;
use config::section::egress::DnsMode;
use decide::decision::{Cx, decide};
use decide::subject::{Mode, Subject};
use hickory_proto::op::ResponseCode;
use hickory_proto::rr::rdata::{A, AAAA};
use hickory_proto::rr::{Name, RData, RecordType};
use policy::answer::Answers;
use policy::host::{GATE, Host, HostName};
use policy::id::SandboxId;
use policy::reason::Reason;
use policy::verdict::{Denial, Question, RuleName, Verdict};

use super::message::Reply;
use super::metrics::Outcome;
use super::synthetic::Place;
use super::upstream::host_name;
use super::{NamePolicy, Way};

/// How long clients may hold an answer of the gate's own, in seconds. Short, because a gate
/// that was restarted has forgotten its synthetic addresses, and settings change.
pub(super) const LOCAL_TTL: u32 = 5;

/// What becomes of a question.
pub(super) struct Decision {
    pub(super) reply: Reply,
    pub(super) outcome: Outcome,
    /// What is written down, if anything.
    pub(super) record: Option<Record>,
}

/// The part of an audit record that a decision knows.
pub(super) enum Record {
    Denied(Denial),
    Allowed(Option<RuleName>, Option<Reason>),
}

/// Where a question stands after all that needs no waiting.
pub(super) enum Step {
    Settled(Decision),
    /// An upstream has to be asked.
    Forward(ForwardedQuery),
}

/// A question about a name that the allowlist has, for an upstream. Only [`judge`] makes
/// one.
pub(super) struct ForwardedQuery {
    pub(super) sandbox: SandboxId,
    pub(super) name: HostName,
    pub(super) kind: RecordType,
    /// The rule that allowed it.
    pub(super) rule: Option<RuleName>,
}

/// What is done for queries of a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Service {
    /// The name's addresses.
    Addresses,
    /// The name of a synthetic address.
    Reverse,
    /// Records of a type that the operator listed.
    Listed,
    /// The name has nothing of it, whatever an upstream would say.
    Nothing,
}

impl Service {
    pub(super) fn of(kind: RecordType, mode: DnsMode, settings: &Settings) -> Option<Self> {
        match kind {
            RecordType::A | RecordType::AAAA => return Some(Service::Addresses),
            // They carry keys for hidden names, other protocols and address hints.
            RecordType::HTTPS | RecordType::SVCB => return Some(Service::Nothing),
            RecordType::PTR if mode == DnsMode::Synthetic => return Some(Service::Reverse),
            _ => {}
        }
        // Questions about questions (RFC 6895, section 3.1: 128 to 255), and EDNS itself.
        let number = u16::from(kind);
        if (128..=255).contains(&number) || matches!(kind, RecordType::OPT | RecordType::ZERO) {
            return None;
        }
        let mut listed = settings.egress.dns.extra_types.iter();
        if !listed.any(|listed| read_type(listed) == Some(kind)) {
            return None;
        }
        Some(match mode {
            // Nothing leaves in this mode, so nobody knows of any.
            DnsMode::Synthetic => Service::Nothing,
            DnsMode::Forward => Service::Listed,
        })
    }
}

/// Decides about a name in forward mode. A query never waits: where the operator is to be asked,
/// `raise` raises the question, and the name fails until it is answered.
pub(super) fn judge(
    sandbox: &SandboxId,
    name: HostName,
    service: Service,
    kind: RecordType,
    policy: &NamePolicy,
    raise: impl FnOnce(&Question) -> bool,
) -> Step {
    let asked = Host::Name(name.clone());
    let (settings, answers) = (&policy.snapshot.settings, Answers::default());
    let cx = Cx {
        snapshot: &policy.snapshot,
        answers: &answers,
        grants: policy.grants.as_deref(),
        now: policy.now,
    };
    let decided = decide(Subject::Name(sandbox, &asked), Mode::Live, cx).now();
    let rule = match decided.verdict {
        Verdict::Allow { rule } => Some(rule),
        Verdict::Modify(change) => Some(change.rule),
        Verdict::Deny(denial) => {
            return refuse(ResponseCode::NXDomain, *denial, Outcome::Denied);
        }
        Verdict::Ask(question) => {
            let (code, denial) = match raise(&question) {
                true => (
                    ResponseCode::ServFail,
                    question.refused(Reason::AskTimeout).saying(
                        "The operator is asked about this name. Try again after the answer.",
                    ),
                ),
                false => (ResponseCode::NXDomain, question.unattended()),
            };
            return refuse(code, denial, Outcome::Denied);
        }
    };
    if service == Service::Nothing {
        return empty(true);
    }
    // An entry for one port only says nothing about the name as a whole.
    let mut fixed = settings.egress.resolve.iter();
    let fixed = fixed.find(|(from, _)| from.port.is_none() && from.host == asked);
    match fixed.map(|(_, to)| to.ip().to_canonical()) {
        Some(IpAddr::V4(four)) => local(kind, Some(four), None),
        Some(IpAddr::V6(six)) => local(kind, None, Some(six)),
        None => Step::Forward(ForwardedQuery {
            sandbox: sandbox.clone(),
            name,
            kind,
            rule,
        }),
    }
}

/// Addresses of names that mean something here: the gate's, and the asker's own.
pub(super) fn own_addresses(name: &HostName, way: &Way) -> Option<OwnAddresses> {
    let (four, six) = if name.as_str() == GATE {
        match way.gate.map(|gate| gate.to_canonical()) {
            None => (Some(Place::GATE.v4()), Some(Place::GATE.v6())),
            Some(IpAddr::V4(gate)) => (Some(gate), None),
            Some(IpAddr::V6(gate)) => (None, Some(gate)),
        }
    } else if name.as_str() == "localhost" || name.as_str().ends_with(".localhost") {
        // RFC 6761, section 6.3.
        (Some(Ipv4Addr::LOCALHOST), Some(Ipv6Addr::LOCALHOST))
    } else {
        return None;
    };
    Some((four, six))
}

/// An IPv4 and an IPv6 address, where there is one.
pub(super) type OwnAddresses = (Option<Ipv4Addr>, Option<Ipv6Addr>);

/// The gate's own answer. Other types than addresses have none.
pub(super) fn local(kind: RecordType, four: Option<Ipv4Addr>, six: Option<Ipv6Addr>) -> Step {
    let record = match kind {
        RecordType::A => four.map(|four| RData::A(A(four))),
        RecordType::AAAA => six.map(|six| RData::AAAA(AAAA(six))),
        _ => None,
    };
    match record {
        None => empty(true),
        Some(record) => Step::Settled(Decision {
            reply: Reply::with(vec![record], LOCAL_TTL),
            outcome: Outcome::Local,
            record: None,
        }),
    }
}

pub(super) fn empty(exists: bool) -> Step {
    Step::Settled(Decision {
        reply: Reply::without(empty_code(exists), None),
        outcome: Outcome::Empty,
        record: None,
    })
}

pub(super) fn empty_code(exists: bool) -> ResponseCode {
    if exists {
        ResponseCode::NoError
    } else {
        ResponseCode::NXDomain
    }
}

pub(super) fn refuse(code: ResponseCode, denial: Denial, outcome: Outcome) -> Step {
    Step::Settled(denied(code, denial, outcome))
}

pub(super) fn denied(code: ResponseCode, denial: Denial, outcome: Outcome) -> Decision {
    Decision {
        reply: Reply::without(code, Some(denial.reason)),
        outcome,
        record: Some(Record::Denied(denial)),
    }
}

/// RFC 3597, section 5, for types without a name.
pub(super) fn type_name(kind: RecordType) -> String {
    match kind {
        RecordType::Unknown(number) => format!("TYPE{number}"),
        known => known.to_string(),
    }
}

pub(super) fn read_type(text: &str) -> Option<RecordType> {
    let numbered = text
        .strip_prefix("TYPE")
        .and_then(|n| n.parse::<u16>().ok());
    numbered
        .map(RecordType::from)
        .or_else(|| RecordType::from_str(text).ok())
}

/// The address that a reverse name spells out, whole.
pub(super) fn address_in(name: &Name) -> Option<IpAddr> {
    let text = host_name(name)?;
    let text = text.as_str();
    if let Some(digits) = text.strip_suffix(".in-addr.arpa") {
        let mut octets = [0; 4];
        let mut labels = digits.split('.').rev();
        for octet in &mut octets {
            let label = labels.next()?;
            *octet = label.parse().ok().filter(|n: &u8| n.to_string() == label)?;
        }
        return labels.next().is_none().then(|| octets.into());
    }
    let digits = text.strip_suffix(".ip6.arpa")?;
    let mut bits = 0_u128;
    let mut count = 0;
    for label in digits.split('.').rev() {
        let digit = u128::from_str_radix(label, 16).ok()?;
        count += 1;
        if label.len() != 1 || count > 32 {
            return None;
        }
        bits = (bits << 4) | digit;
    }
    (count == 32).then(|| Ipv6Addr::from_bits(bits).into())
}
