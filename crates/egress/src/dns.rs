//! DNS as a sandbox meets it: the gate's own answers, by the same allowlist as HTTP.
//!
//! A query's life is [`Names::answer`]: read strictly, ask who, judge the type, judge the
//! name, then answer in one of two modes.
//!
//! - **Synthetic**: every well-formed name gets an address of a reserved range that means
//!   this name to the gate. Nothing leaves; whether the name may be reached is decided on
//!   connect, where a refusal can be read by a person.
//! - **Forward**: a name the allowlist does not have does not exist. Others are asked for
//!   upstream, in lower case and without anything else of the client's; aliases are
//!   flattened, every hop is held against what the operator denied and every address
//!   against what is never dialled (docs/adr/0021-names-behind-an-alias.md).
//!
//! **What is written down.** Every refusal, in both modes. In forward mode also every
//! answer that an upstream gave, now or before. Not in synthetic mode: there the connect
//! that follows is the record, and an address that nobody connects to told nobody
//! anything. Queries beyond a sandbox's share are dropped and only counted.
//!
//! **Never here:** a query for a name that was not judged, an answer that was copied from
//! bytes of an upstream, work without a bound per sandbox.

mod decision;
mod forward;
mod guest;
mod labels;
mod message;
mod metrics;
mod recent;
mod serve;
mod synthetic;
mod upstream;

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use config::Settings;
use config::section::egress::DnsMode;
use decide::grants::Grants;
use decide::hold::Questions;
use decide::snapshot::PolicySnapshot;
use hickory_proto::op::ResponseCode;
use hickory_proto::rr::rdata::PTR;
use hickory_proto::rr::{DNSClass, Name, RData};
use policy::audit::{AuditEvent, Kind};
use policy::bucket::Rate;
use policy::clock::Tick;
use policy::host::{GATE, Host};
use policy::id::SandboxId;
use policy::reason::Reason;
use policy::verdict::{Denial, Question, Word};
use tokio::time::Instant;

use self::decision::{
    Decision, ForwardedQuery, LOCAL_TTL, Record, Service, Step, address_in, denied, empty,
    empty_code, judge, local, own_addresses, refuse, type_name,
};
use self::forward::{Case, Forwarded, Forwarder};
use self::guest::Guest;
pub use self::labels::{LabelBudget, LabelLimits, Oddity, oddity};
use self::message::{Asked, Reply};
pub use self::metrics::{DnsMetrics, Outcome};
pub use self::serve::{Source, serve_datagrams, serve_stream};
use self::synthetic::Place;
use self::upstream::{host, wire_name};

/// The rule's name where a type is refused.
const TYPE_RULE: &str = "dns:types";

/// The rule's name where a message or name cannot be read.
const MESSAGE_RULE: &str = "dns:message";

/// Who asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asker {
    /// This sandbox.
    Known(SandboxId),
    /// Nobody that we serve, and why.
    Unknown(Denial),
}

/// How a query came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// In what.
    pub transport: Transport,
    /// From where it is to be answered.
    pub mode: DnsMode,
    /// Where the asker finds the gate; `None` where every address leads to it.
    pub gate: Option<IpAddr>,
}

/// What a query came in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// A datagram: the answer fits the size that the asker named.
    Udp,
    /// A stream: the answer is whole.
    Tcp,
}

/// An answer, and what is to be written down about it first.
#[derive(Clone, Debug, PartialEq)]
pub struct Answered {
    /// The answer's bytes.
    pub bytes: Vec<u8>,
    /// The record, where there is one.
    pub event: Option<AuditEvent>,
}

/// How much at once and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// After so long a query has failed.
    pub deadline: Duration,
    /// Queries of one sandbox at a time.
    pub in_flight: usize,
    /// Names of one sandbox that have a synthetic address.
    pub names: usize,
    /// Answers of upstreams that are remembered for one sandbox.
    pub cached: usize,
    /// How long a connection may be silent.
    pub idle: Duration,
    /// How much names may say.
    pub labels: LabelLimits,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(5),
            in_flight: 64,
            names: 4096,
            cached: 512,
            idle: Duration::from_secs(10),
            labels: LabelLimits::default(),
        }
    }
}

/// Returns the rules of the moment, for a sandbox or for all.
pub type PolicyNow = Box<dyn Fn(Option<&SandboxId>) -> NamePolicy + Send + Sync>;

/// The rules by which a query is answered.
#[derive(Clone, Debug)]
pub struct NamePolicy {
    /// The rules.
    pub snapshot: Arc<PolicySnapshot>,
    /// What the operator allowed the sandbox for a while.
    pub grants: Option<Arc<Grants>>,
    /// Now, on the clock of the grants.
    pub now: Tick,
}

impl From<Arc<PolicySnapshot>> for NamePolicy {
    fn from(snapshot: Arc<PolicySnapshot>) -> Self {
        Self {
            snapshot,
            grants: None,
            now: Tick::default(),
        }
    }
}

/// Answers queries. One for all sandboxes.
pub struct Names {
    policy: PolicyNow,
    questions: Questions,
    limits: Limits,
    labels: Arc<LabelBudget>,
    metrics: DnsMetrics,
    forwarder: Forwarder,
    guests: Mutex<HashMap<SandboxId, Arc<Guest>>>,
    /// All who are not known share one guest's room.
    strangers: Arc<Guest>,
}

impl Names {
    /// Answers by `policy`, which is read anew for each query.
    pub fn new(
        policy: PolicyNow,
        questions: Questions,
        limits: Limits,
        metrics: DnsMetrics,
    ) -> Self {
        Self {
            policy,
            questions,
            labels: Arc::new(LabelBudget::new(limits.labels)),
            forwarder: Forwarder::new(&limits),
            strangers: Arc::new(Guest::new(&limits)),
            limits,
            metrics,
            guests: Mutex::default(),
        }
    }

    /// Asks these resolvers from now on, or says why there is nobody to ask.
    pub fn follow(&self, resolvers: Result<Vec<SocketAddr>, String>) {
        self.forwarder.follow(resolvers);
    }

    /// How fast one asker may ask now. Each refusal is written down, so that without a limit
    /// an agent could fill the disk.
    fn pace(&self) -> Rate {
        (self.policy)(None).snapshot.settings.egress.dns.pace()
    }

    /// How much names may say: the dialer asks this too before it resolves one.
    pub fn labels(&self) -> &Arc<LabelBudget> {
        &self.labels
    }

    /// The name that an address means to this sandbox, if it is a synthetic one that is
    /// still known.
    pub fn meant(&self, sandbox: &SandboxId, ip: IpAddr) -> Option<Host> {
        let place = Place::of(ip)?;
        if place == Place::GATE {
            return Host::parse(GATE).ok();
        }
        let guest = self.guests().get(sandbox).map(Arc::clone)?;
        guest.addresses().name(place).map(Host::Name)
    }

    /// Forgets a sandbox that is gone, once its sockets are no longer served.
    pub fn forget(&self, sandbox: &SandboxId) {
        self.guests().remove(sandbox);
        self.labels.forget(sandbox);
    }

    /// Forgets every sandbox that `gone` says is: on a shared network one may have asked for
    /// names and sent nothing else.
    pub fn prune(&self, gone: impl Fn(&SandboxId) -> bool) {
        let known: Vec<SandboxId> = self.guests().keys().cloned().collect();
        for sandbox in known.iter().filter(|sandbox| gone(sandbox)) {
            self.forget(sandbox);
        }
    }

    /// Answers one query; `None` where there is nothing to answer. Takes no longer than the
    /// deadline. The event, where there is one, is to be written before the bytes go.
    pub async fn answer(&self, asker: &Asker, query: &[u8], way: &Way) -> Option<Answered> {
        let deadline = Instant::now() + self.limits.deadline;
        self.answer_by(deadline, asker, query, way).await
    }

    async fn answer_by(
        &self,
        deadline: Instant,
        asker: &Asker,
        query: &[u8],
        way: &Way,
    ) -> Option<Answered> {
        let began = Instant::now();
        let asked = match message::read(query)? {
            Ok(asked) => asked,
            Err(fault) => return Some(self.answer_fault(asker, fault)),
        };
        let policy = (self.policy)(match asker {
            Asker::Known(sandbox) => Some(sandbox),
            Asker::Unknown(_) => None,
        });
        let decision = match self.consider(asker, &asked, way, &policy) {
            Step::Settled(decision) => decision,
            Step::Forward(query_to_forward) => {
                self.forward(query_to_forward, &policy.snapshot.settings, deadline)
                    .await
            }
        };
        self.metrics
            .count(decision.outcome, Some(asked.question.query_type));
        let bytes = asked.write(&decision.reply, way.transport);
        let event = decision.record.map(|record| {
            let mut event = event(asker, record);
            event.host = Some(
                host(&asked.question.name)
                    .map_or_else(|| asked.question.name.to_ascii(), |host| host.to_string()),
            );
            event.method = Some(type_name(asked.question.query_type));
            let ms = began.elapsed().as_secs_f64() * 1000.0;
            event.ms.insert("dns", ms);
            event
        });
        Some(Answered { bytes, event })
    }

    fn answer_fault(&self, asker: &Asker, fault: message::Fault) -> Answered {
        let (fault, denial, outcome) = match asker {
            Asker::Unknown(denial) => (
                fault.with(ResponseCode::Refused),
                denial.clone(),
                Outcome::Unknown,
            ),
            Asker::Known(_) => (
                fault,
                Denial::new(Reason::Framing, MESSAGE_RULE).saying("The query cannot be read."),
                Outcome::Malformed,
            ),
        };
        self.metrics.count(outcome, None);
        Answered {
            bytes: fault.write(),
            event: Some(event(asker, Record::Denied(denial))),
        }
    }

    /// All that can be decided without waiting for anybody.
    fn consider(&self, asker: &Asker, asked: &Asked, way: &Way, policy: &NamePolicy) -> Step {
        let settings = &policy.snapshot.settings;
        let question = &asked.question;
        let kind = question.query_type;
        let sandbox = match asker {
            Asker::Known(sandbox) => sandbox,
            Asker::Unknown(denial) => {
                return refuse(ResponseCode::Refused, denial.clone(), Outcome::Unknown);
            }
        };
        if question.query_class != DNSClass::IN {
            return refuse(
                ResponseCode::Refused,
                Denial::new(Reason::DnsType, TYPE_RULE)
                    .saying("Only queries of the class IN are answered."),
                Outcome::Refused,
            );
        }
        let Some(service) = Service::of(kind, way.mode, settings) else {
            let denial = Denial::new(Reason::DnsType, TYPE_RULE).saying(format!(
                "Queries of the type {} are not answered. Ask the operator to list it in \
                 egress.dns.extra_types.",
                type_name(kind)
            ));
            return refuse(ResponseCode::Refused, denial, Outcome::Refused);
        };
        if service == Service::Reverse {
            return self.name_of_address(sandbox, &question.name);
        }
        let name = match host(&question.name) {
            Some(Host::Name(name)) => name,
            Some(Host::Ip(ip)) => {
                let denial = Denial::new(Reason::IpLiteral, MESSAGE_RULE)
                    .saying(format!("{ip} is an address and has no name records."));
                return refuse(ResponseCode::NXDomain, denial, Outcome::Denied);
            }
            None => {
                let denial = Denial::new(Reason::BadName, MESSAGE_RULE)
                    .saying("The name is not one that a host can have.");
                return refuse(ResponseCode::Refused, denial, Outcome::Denied);
            }
        };
        // Names with a meaning of their own never leave, in neither mode.
        if let Some((four, six)) = own_addresses(&name, way) {
            return local(kind, four, six);
        }
        match way.mode {
            DnsMode::Synthetic => {
                if service == Service::Nothing {
                    return empty(true);
                }
                let place = self.guest(sandbox).addresses().place(&name);
                local(kind, Some(place.v4()), Some(place.v6()))
            }
            DnsMode::Forward => {
                let raise = |question: &Question| self.questions.raise(question);
                judge(sandbox, name, service, kind, policy, raise)
            }
        }
    }

    /// `PTR` for a synthetic address.
    fn name_of_address(&self, sandbox: &SandboxId, name: &Name) -> Step {
        let place = address_in(name).and_then(Place::of);
        let Some(place) = place else {
            let denial = Denial::new(Reason::DnsType, TYPE_RULE)
                .saying("Only addresses that the gate gave out have a name here.");
            return refuse(ResponseCode::Refused, denial, Outcome::Refused);
        };
        let known = if place == Place::GATE {
            Some(GATE.to_owned())
        } else {
            let name = self.guest(sandbox).addresses().name(place);
            name.map(|name| name.to_string())
        };
        let known = known.and_then(|name| wire_name(&name).ok());
        let Some(known) = known else {
            return empty(false);
        };
        Step::Settled(Decision {
            reply: Reply::with(vec![RData::PTR(PTR(known))], LOCAL_TTL),
            outcome: Outcome::Local,
            record: None,
        })
    }

    /// Asks an upstream about a name that was judged.
    async fn forward(
        &self,
        query_to_forward: ForwardedQuery,
        settings: &Settings,
        deadline: Instant,
    ) -> Decision {
        let guest = self.guest(&query_to_forward.sandbox);
        let case = Case {
            settings,
            labels: &self.labels,
            guest: &guest,
            sandbox: &query_to_forward.sandbox,
            deadline,
        };
        let forwarded = self
            .forwarder
            .resolve(case, &query_to_forward.name, query_to_forward.kind);
        let rule = query_to_forward.rule;
        match forwarded.await {
            Forwarded::Found {
                records,
                ttl,
                cached,
            } => Decision {
                reply: Reply::with(records, ttl),
                outcome: if cached {
                    Outcome::Cached
                } else {
                    Outcome::Forwarded
                },
                record: Some(Record::Allowed(rule, None)),
            },
            Forwarded::Empty { exists } => Decision {
                reply: Reply::without(empty_code(exists), None),
                outcome: Outcome::Empty,
                record: Some(Record::Allowed(rule, None)),
            },
            Forwarded::NameDenied(denial) => {
                denied(ResponseCode::NXDomain, denial, Outcome::Denied)
            }
            // 'Does not exist' would hold for the other family of addresses too (RFC 8020).
            Forwarded::AddressDenied(denial) => {
                denied(ResponseCode::NoError, denial, Outcome::Denied)
            }
            Forwarded::Failed(error) => {
                tracing::debug!(sandbox = %query_to_forward.sandbox, %error, "a name was not resolved");
                let reason = Some(error.reason());
                Decision {
                    reply: Reply::without(ResponseCode::ServFail, reason),
                    outcome: Outcome::Failed,
                    record: Some(Record::Allowed(rule, reason)),
                }
            }
        }
    }

    fn guest(&self, sandbox: &SandboxId) -> Arc<Guest> {
        let mut guests = self.guests();
        let guest = guests
            .entry(sandbox.clone())
            .or_insert_with(|| Arc::new(Guest::new(&self.limits)));
        Arc::clone(guest)
    }

    /// Whose room a query takes.
    fn guest_of(&self, asker: &Asker) -> Arc<Guest> {
        match asker {
            Asker::Known(sandbox) => self.guest(sandbox),
            Asker::Unknown(_) => Arc::clone(&self.strangers),
        }
    }

    fn guests(&self) -> MutexGuard<'_, HashMap<SandboxId, Arc<Guest>>> {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn event(asker: &Asker, record: Record) -> AuditEvent {
    let (verdict, reason, rule) = match record {
        Record::Denied(denial) => (Word::Deny, Some(denial.reason), Some(denial.rule)),
        Record::Allowed(rule, reason) => (Word::Allow, reason, rule),
    };
    AuditEvent {
        sandbox: match asker {
            Asker::Known(sandbox) => Some(sandbox.clone()),
            Asker::Unknown(_) => None,
        },
        port: Some(53),
        stage: Some("dns".to_owned()),
        verdict: Some(verdict),
        reason,
        rule,
        ..AuditEvent::new(Kind::Dns)
    }
}

/// Reads `bytes` as a query, as an upstream's answer and as queries on a stream, and
/// forgets what comes of it: for fuzzing, where only a panic or a hang is news.
pub fn exercise(bytes: &[u8]) {
    let settings = Arc::new(Settings::default());
    let snapshot = Arc::new(PolicySnapshot::without_bundles(settings));
    let policy = NamePolicy::from(snapshot);
    let now = policy.clone();
    let names = Names::new(
        Box::new(move |_| now.clone()),
        Questions::default(),
        Limits::default(),
        DnsMetrics::default(),
    );
    let Ok(sandbox) = SandboxId::parse("exercise") else {
        return;
    };
    let asker = Asker::Known(sandbox);
    for mode in [DnsMode::Synthetic, DnsMode::Forward] {
        for transport in [Transport::Udp, Transport::Tcp] {
            let way = Way {
                transport,
                mode,
                gate: None,
            };
            if let Some(Ok(asked)) = message::read(bytes)
                && let Step::Settled(decision) = names.consider(&asker, &asked, &way, &policy)
            {
                drop(asked.write(&decision.reply, transport));
            }
        }
    }
    upstream::exercise(bytes);
    serve::exercise(bytes);
}

#[cfg(test)]
mod tests;
