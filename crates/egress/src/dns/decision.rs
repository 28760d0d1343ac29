//! Decisions about DNS queries, as far as they need no upstream query.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use config::Settings;
use config::section::egress::DnsMode;
use decide::decision::{Cx, decide};
use decide::subject::{Mode, Subject};
use hickory_proto::op::ResponseCode;
use hickory_proto::rr::rdata::{A, AAAA};
use hickory_proto::rr::{Name, RData, RecordType};
use policy::answer::ApprovalAnswers;
use policy::host::{GATE_HOST, Host, HostName};
use policy::id::SandboxId;
use policy::reason::Reason;
use policy::verdict::{Denial, Question, RuleName, Verdict};

use super::message::Reply;
use super::metrics::QueryOutcome;
use super::synthetic::AddressIndex;
use super::upstream::host_name;
use super::{NamePolicy, QueryContext};

/// TTL of the gate's own answers, in seconds. It is short because a restarted gate has no
/// synthetic addresses any more, and because settings change.
pub(super) const LOCAL_TTL: u32 = 5;

/// The decision about a query.
pub(super) struct Decision {
    pub(super) reply: Reply,
    pub(super) outcome: QueryOutcome,
    /// The audit record; `None` if the query needs no record.
    pub(super) record: Option<AuditVerdict>,
}

/// Verdict, rule and reason for the audit record of a query.
pub(super) enum AuditVerdict {
    Denied(Denial),
    Allowed(Option<RuleName>, Option<Reason>),
}

/// The decision, or the upstream query that it needs.
pub(super) enum Step {
    Settled(Decision),
    /// The answer comes from an upstream.
    Forward(ForwardedQuery),
}

/// An upstream query for an allowed name. Only [`decide_name`] creates it.
pub(super) struct ForwardedQuery {
    pub(super) sandbox: SandboxId,
    pub(super) name: HostName,
    pub(super) kind: RecordType,
    /// The rule that allowed the name.
    pub(super) rule: Option<RuleName>,
}

/// How queries of a record type are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AnswerKind {
    /// With the addresses of the name.
    Addresses,
    /// With the name of a synthetic address.
    Reverse,
    /// With the upstream's records, because the operator listed the type.
    Listed,
    /// Without records, whatever an upstream would answer.
    Empty,
}

impl AnswerKind {
    pub(super) fn of(kind: RecordType, mode: DnsMode, settings: &Settings) -> Option<Self> {
        match kind {
            RecordType::A | RecordType::AAAA => return Some(AnswerKind::Addresses),
            // These types carry keys for encrypted names, other protocols and address hints.
            RecordType::HTTPS | RecordType::SVCB => return Some(AnswerKind::Empty),
            RecordType::PTR if mode == DnsMode::Synthetic => return Some(AnswerKind::Reverse),
            _ => {}
        }
        // Query types and meta types (RFC 6895, section 3.1: 128 to 255), and EDNS itself.
        let number = u16::from(kind);
        if (128..=255).contains(&number) || matches!(kind, RecordType::OPT | RecordType::ZERO) {
            return None;
        }
        let mut listed = settings.egress.dns.extra_types.iter();
        if !listed.any(|listed| read_type(listed) == Some(kind)) {
            return None;
        }
        Some(match mode {
            // No query leaves the gate in this mode.
            DnsMode::Synthetic => AnswerKind::Empty,
            DnsMode::Forward => AnswerKind::Listed,
        })
    }
}

/// Decides about a name in forward mode. A query never waits for the operator: if the name needs
/// an approval, `raise` requests it, and the name fails until the operator answers.
pub(super) fn decide_name(
    sandbox: &SandboxId,
    name: HostName,
    answer_kind: AnswerKind,
    kind: RecordType,
    policy: &NamePolicy,
    raise: impl FnOnce(&Question) -> bool,
) -> Step {
    let host = Host::Name(name.clone());
    let (settings, answers) = (&policy.snapshot.settings, ApprovalAnswers::default());
    let cx = Cx {
        snapshot: &policy.snapshot,
        answers: &answers,
        grants: policy.grants.as_deref(),
        now: policy.now,
    };
    let decided = decide(Subject::Name(sandbox, &host), Mode::Live, cx).into_outcome();
    let rule = match decided.verdict {
        Verdict::Allow { rule } => Some(rule),
        Verdict::Modify(change) => Some(change.rule),
        Verdict::Deny(denial) => {
            return refuse(ResponseCode::NXDomain, *denial, QueryOutcome::Denied);
        }
        Verdict::Ask(question) => {
            let (code, denial) = match raise(&question) {
                true => (
                    ResponseCode::ServFail,
                    question.denial(Reason::AskTimeout).with_message(
                        "This name waits for the operator's approval. Try again later.",
                    ),
                ),
                false => (ResponseCode::NXDomain, question.unattended_denial()),
            };
            return refuse(code, denial, QueryOutcome::Denied);
        }
    };
    if answer_kind == AnswerKind::Empty {
        return answer_empty(true);
    }
    // An entry for a single port does not apply to the whole name.
    let mut fixed = settings.egress.resolve.iter();
    let fixed = fixed.find(|(from, _)| from.port.is_none() && from.host == host);
    match fixed.map(|(_, to)| to.ip().to_canonical()) {
        Some(IpAddr::V4(four)) => answer_with_addresses(kind, Some(four), None),
        Some(IpAddr::V6(six)) => answer_with_addresses(kind, None, Some(six)),
        None => Step::Forward(ForwardedQuery {
            sandbox: sandbox.clone(),
            name,
            kind,
            rule,
        }),
    }
}

/// Addresses of the names that the gate resolves itself: its own name and `localhost`.
pub(super) fn own_addresses(name: &HostName, context: &QueryContext) -> Option<OwnAddresses> {
    let (four, six) = if name.as_str() == GATE_HOST {
        match context.gate.map(|gate| gate.to_canonical()) {
            None => (Some(AddressIndex::GATE.v4()), Some(AddressIndex::GATE.v6())),
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

/// An IPv4 and an IPv6 address, each optional.
pub(super) type OwnAddresses = (Option<Ipv4Addr>, Option<Ipv6Addr>);

/// The gate's own answer: an address record for A and AAAA, no records for other types.
pub(super) fn answer_with_addresses(
    kind: RecordType,
    four: Option<Ipv4Addr>,
    six: Option<Ipv6Addr>,
) -> Step {
    let record = match kind {
        RecordType::A => four.map(|four| RData::A(A(four))),
        RecordType::AAAA => six.map(|six| RData::AAAA(AAAA(six))),
        _ => None,
    };
    match record {
        None => answer_empty(true),
        Some(record) => Step::Settled(Decision {
            reply: Reply::with(vec![record], LOCAL_TTL),
            outcome: QueryOutcome::Local,
            record: None,
        }),
    }
}

/// The gate's own answer without records. `exists` selects NOERROR or NXDOMAIN.
pub(super) fn answer_empty(exists: bool) -> Step {
    Step::Settled(Decision {
        reply: Reply::without(empty_code(exists), None),
        outcome: QueryOutcome::Empty,
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

pub(super) fn refuse(code: ResponseCode, denial: Denial, outcome: QueryOutcome) -> Step {
    Step::Settled(denied_decision(code, denial, outcome))
}

pub(super) fn denied_decision(
    code: ResponseCode,
    denial: Denial,
    outcome: QueryOutcome,
) -> Decision {
    Decision {
        reply: Reply::without(code, Some(denial.reason)),
        outcome,
        record: Some(AuditVerdict::Denied(denial)),
    }
}

/// The name of a record type; `TYPE123` if it has none (RFC 3597, section 5).
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

/// The complete address that a reverse-lookup name encodes.
pub(super) fn address_of_reverse_name(name: &Name) -> Option<IpAddr> {
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
