//! DNS server for sandboxes: answers queries by the same allowlist as HTTP.
//!
//! [`NameServer::answer`] parses a query strictly, identifies its client, checks the record type
//! and the name, and then answers in one of two modes.
//!
//! - **Synthetic**: every well-formed name gets an address of a reserved range that stands for
//!   this name in the gate. No query leaves the gate; whether the name may be reached is decided
//!   when the client connects, where it can read the refusal.
//! - **Forward**: a name that is not in the allowlist does not exist. Other names are resolved
//!   upstream, in lower case and without any other data of the client; aliases are flattened,
//!   every hop is checked against the denied names and every address against the address
//!   classes that are never dialled (docs/adr/0021-names-behind-an-alias.md).
//!
//! **Audit records.** Every refusal is recorded, in both modes. Forward mode also records every
//! answer of an upstream, cached ones included. Synthetic mode records no answer: the connection
//! that follows has its own record, and an address without a connection discloses nothing.
//! Queries above a sandbox's rate are dropped and only counted.
//!
//! **Never here:** an upstream query for an unchecked name, an answer that copies bytes of an
//! upstream, work without a limit per sandbox.

mod client_state;
mod decision;
mod forward;
mod labels;
mod lru_map;
mod message;
mod metrics;
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
use policy::host::{GATE_HOST, Host};
use policy::id::SandboxId;
use policy::reason::Reason;
use policy::verdict::{Denial, Question, VerdictKind};
use tokio::time::Instant;

use self::client_state::ClientState;
use self::decision::{
    AnswerKind, AuditVerdict, Decision, ForwardedQuery, LOCAL_TTL, Step, address_of_reverse_name,
    answer_empty, answer_with_addresses, decide_name, denied_decision, empty_code, own_addresses,
    refuse, type_name,
};
use self::forward::{ForwardContext, ForwardOutcome, Forwarder};
pub use self::labels::{DataPattern, LabelBudget, LabelLimits, data_pattern};
use self::message::{ParsedQuery, Reply};
pub use self::metrics::{DnsMetrics, QueryOutcome};
pub use self::serve::{QuerySource, serve_datagrams, serve_stream};
use self::synthetic::AddressIndex;
use self::upstream::{host, wire_name};

/// Rule name of a refused record type.
const TYPE_RULE: &str = "dns:types";

/// Rule name of a malformed message or name.
const MESSAGE_RULE: &str = "dns:message";

/// The client of a query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QueryClient {
    /// A registered sandbox.
    Known(SandboxId),
    /// A client without a valid registration, and its refusal.
    Unknown(Denial),
}

/// How a query arrived, and in which mode it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueryContext {
    /// The transport protocol.
    pub transport: Transport,
    /// Synthetic or forward.
    pub mode: DnsMode,
    /// The gate's address for this client; `None` where every address leads to the gate.
    pub gate: Option<IpAddr>,
}

/// The transport protocol of a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// The answer is limited to the datagram size that the client accepts.
    Udp,
    /// The answer is complete.
    Tcp,
}

/// The answer to a query, and the audit record to write before it is sent.
#[derive(Clone, Debug, PartialEq)]
pub struct DnsResponse {
    /// The DNS message.
    pub bytes: Vec<u8>,
    /// The audit record, if the query needs one.
    pub event: Option<AuditEvent>,
}

/// Limits of the DNS server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DnsLimits {
    /// Time after which a query fails.
    pub deadline: Duration,
    /// Queries in flight per sandbox.
    pub in_flight: usize,
    /// Names with a synthetic address per sandbox.
    pub names: usize,
    /// Cached upstream answers per sandbox.
    pub cached: usize,
    /// Idle timeout of a TCP connection.
    pub idle: Duration,
    /// How many different names a sandbox may resolve.
    pub label_budget: LabelLimits,
}

impl Default for DnsLimits {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(5),
            in_flight: 64,
            names: 4096,
            cached: 512,
            idle: Duration::from_secs(10),
            label_budget: LabelLimits::default(),
        }
    }
}

/// Returns the rules in force, with the hosts that were added for the sandbox, if one is given.
pub type PolicySource = Box<dyn Fn(Option<&SandboxId>) -> NamePolicy + Send + Sync>;

/// The rules by which a query is answered.
#[derive(Clone, Debug)]
pub struct NamePolicy {
    /// The rules.
    pub snapshot: Arc<PolicySnapshot>,
    /// The operator's temporary approvals for the sandbox.
    pub grants: Option<Arc<Grants>>,
    /// The current time, on the clock of the grants.
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

/// The DNS server of all sandboxes.
pub struct NameServer {
    policy: PolicySource,
    questions: Questions,
    limits: DnsLimits,
    labels: Arc<LabelBudget>,
    metrics: DnsMetrics,
    forwarder: Forwarder,
    client_states: Mutex<HashMap<SandboxId, Arc<ClientState>>>,
    /// Shared by all clients that are not registered.
    unknown_clients: Arc<ClientState>,
}

impl NameServer {
    /// Creates a server that reads `policy` anew for each query.
    pub fn new(
        policy: PolicySource,
        questions: Questions,
        limits: DnsLimits,
        metrics: DnsMetrics,
    ) -> Self {
        Self {
            policy,
            questions,
            labels: Arc::new(LabelBudget::new(limits.label_budget)),
            forwarder: Forwarder::new(&limits),
            unknown_clients: Arc::new(ClientState::new(&limits)),
            limits,
            metrics,
            client_states: Mutex::default(),
        }
    }

    /// Replaces the upstream resolvers. If `resolvers` is an error, every forwarded query fails
    /// with it.
    pub fn set_resolvers(&self, resolvers: Result<Vec<SocketAddr>, String>) {
        self.forwarder.set_resolvers(resolvers);
    }

    /// The query rate of one client. Each refusal is recorded, so that without a limit an agent
    /// could fill the disk.
    fn query_rate(&self) -> Rate {
        (self.policy)(None)
            .snapshot
            .settings
            .egress
            .dns
            .rate_limit()
    }

    /// The budget of names to resolve, which the dialer shares.
    pub fn label_budget(&self) -> &Arc<LabelBudget> {
        &self.labels
    }

    /// The name that a synthetic address stands for in this sandbox; `None` for other addresses
    /// and evicted names.
    pub fn synthetic_name(&self, sandbox: &SandboxId, ip: IpAddr) -> Option<Host> {
        let index = AddressIndex::from_ip(ip)?;
        if index == AddressIndex::GATE {
            return Host::parse(GATE_HOST).ok();
        }
        let client_state = self.client_states().get(sandbox).map(Arc::clone)?;
        client_state.addresses().name(index).map(Host::Name)
    }

    /// Removes the state of a sandbox whose sockets are no longer served.
    pub fn forget(&self, sandbox: &SandboxId) {
        self.client_states().remove(sandbox);
        self.labels.forget(sandbox);
    }

    /// Removes the state of every sandbox for which `is_removed` is true: on a shared network a
    /// sandbox may have sent DNS queries and no other traffic.
    pub fn prune(&self, is_removed: impl Fn(&SandboxId) -> bool) {
        let sandboxes: Vec<SandboxId> = self.client_states().keys().cloned().collect();
        for sandbox in sandboxes.iter().filter(|sandbox| is_removed(sandbox)) {
            self.forget(sandbox);
        }
    }

    /// Answers one query within the deadline; `None` if the bytes must not be answered, because
    /// they are too short or are an answer. The caller writes the event before it sends the bytes.
    pub async fn answer(
        &self,
        client: &QueryClient,
        query: &[u8],
        context: &QueryContext,
    ) -> Option<DnsResponse> {
        let deadline = Instant::now() + self.limits.deadline;
        self.answer_by(deadline, client, query, context).await
    }

    async fn answer_by(
        &self,
        deadline: Instant,
        client: &QueryClient,
        query: &[u8],
        context: &QueryContext,
    ) -> Option<DnsResponse> {
        let began = Instant::now();
        let parsed = match message::parse(query)? {
            Ok(parsed) => parsed,
            Err(invalid) => return Some(self.answer_invalid(client, invalid)),
        };
        let policy = (self.policy)(match client {
            QueryClient::Known(sandbox) => Some(sandbox),
            QueryClient::Unknown(_) => None,
        });
        let decision = match self.decide_locally(client, &parsed, context, &policy) {
            Step::Settled(decision) => decision,
            Step::Forward(query_to_forward) => {
                self.forward(query_to_forward, &policy.snapshot.settings, deadline)
                    .await
            }
        };
        self.metrics
            .count(decision.outcome, Some(parsed.question.query_type));
        let bytes = parsed.write(&decision.reply, context.transport);
        let event = decision.record.map(|record| {
            let mut event = event(client, record);
            event.host = Some(
                host(&parsed.question.name)
                    .map_or_else(|| parsed.question.name.to_ascii(), |host| host.to_string()),
            );
            event.method = Some(type_name(parsed.question.query_type));
            let ms = began.elapsed().as_secs_f64() * 1000.0;
            event.ms.insert("dns", ms);
            event
        });
        Some(DnsResponse { bytes, event })
    }

    fn answer_invalid(&self, client: &QueryClient, invalid: message::InvalidQuery) -> DnsResponse {
        let (invalid, denial, outcome) = match client {
            QueryClient::Unknown(denial) => (
                invalid.with(ResponseCode::Refused),
                denial.clone(),
                QueryOutcome::Unknown,
            ),
            QueryClient::Known(_) => (
                invalid,
                Denial::new(Reason::Framing, MESSAGE_RULE)
                    .with_message("The DNS query is malformed."),
                QueryOutcome::Malformed,
            ),
        };
        self.metrics.count(outcome, None);
        DnsResponse {
            bytes: invalid.write(),
            event: Some(event(client, AuditVerdict::Denied(denial))),
        }
    }

    /// Decides as far as possible without an upstream query.
    fn decide_locally(
        &self,
        client: &QueryClient,
        parsed: &ParsedQuery,
        context: &QueryContext,
        policy: &NamePolicy,
    ) -> Step {
        let settings = &policy.snapshot.settings;
        let question = &parsed.question;
        let kind = question.query_type;
        let sandbox = match client {
            QueryClient::Known(sandbox) => sandbox,
            QueryClient::Unknown(denial) => {
                return refuse(ResponseCode::Refused, denial.clone(), QueryOutcome::Unknown);
            }
        };
        if question.query_class != DNSClass::IN {
            return refuse(
                ResponseCode::Refused,
                Denial::new(Reason::DnsType, TYPE_RULE)
                    .with_message("Only queries of the class IN are answered."),
                QueryOutcome::Refused,
            );
        }
        let Some(answer_kind) = AnswerKind::of(kind, context.mode, settings) else {
            let denial = Denial::new(Reason::DnsType, TYPE_RULE).with_message(format!(
                "Queries of the type {} are not answered. Ask the operator to list it in \
                 egress.dns.extra_types.",
                type_name(kind)
            ));
            return refuse(ResponseCode::Refused, denial, QueryOutcome::Refused);
        };
        if answer_kind == AnswerKind::Reverse {
            return self.answer_reverse(sandbox, &question.name);
        }
        let name = match host(&question.name) {
            Some(Host::Name(name)) => name,
            Some(Host::Ip(ip)) => {
                let denial = Denial::new(Reason::IpLiteral, MESSAGE_RULE).with_message(format!(
                    "The queried name {ip} is an IP address, not a host name."
                ));
                return refuse(ResponseCode::NXDomain, denial, QueryOutcome::Denied);
            }
            None => {
                let denial = Denial::new(Reason::BadName, MESSAGE_RULE)
                    .with_message("The name is not a valid host name.");
                return refuse(ResponseCode::Refused, denial, QueryOutcome::Denied);
            }
        };
        // The gate's own name and `localhost` are never forwarded, in either mode.
        if let Some((four, six)) = own_addresses(&name, context) {
            return answer_with_addresses(kind, four, six);
        }
        match context.mode {
            DnsMode::Synthetic => {
                if answer_kind == AnswerKind::Empty {
                    return answer_empty(true);
                }
                let index = self.client_state(sandbox).addresses().assign(&name);
                answer_with_addresses(kind, Some(index.v4()), Some(index.v6()))
            }
            DnsMode::Forward => {
                let raise = |question: &Question| self.questions.raise(question);
                decide_name(sandbox, name, answer_kind, kind, policy, raise)
            }
        }
    }

    /// Answers a `PTR` query for a synthetic address.
    fn answer_reverse(&self, sandbox: &SandboxId, name: &Name) -> Step {
        let index = address_of_reverse_name(name).and_then(AddressIndex::from_ip);
        let Some(index) = index else {
            let denial = Denial::new(Reason::DnsType, TYPE_RULE)
                .with_message("Only addresses that the gate assigned have a PTR record.");
            return refuse(ResponseCode::Refused, denial, QueryOutcome::Refused);
        };
        let target = if index == AddressIndex::GATE {
            Some(GATE_HOST.to_owned())
        } else {
            let name = self.client_state(sandbox).addresses().name(index);
            name.map(|name| name.to_string())
        };
        let target = target.and_then(|name| wire_name(&name).ok());
        let Some(target) = target else {
            return answer_empty(false);
        };
        Step::Settled(Decision {
            reply: Reply::with(vec![RData::PTR(PTR(target))], LOCAL_TTL),
            outcome: QueryOutcome::Local,
            record: None,
        })
    }

    /// Resolves an allowed name at an upstream.
    async fn forward(
        &self,
        query_to_forward: ForwardedQuery,
        settings: &Settings,
        deadline: Instant,
    ) -> Decision {
        let client_state = self.client_state(&query_to_forward.sandbox);
        let context = ForwardContext {
            settings,
            labels: &self.labels,
            client_state: &client_state,
            sandbox: &query_to_forward.sandbox,
            deadline,
        };
        let forwarded =
            self.forwarder
                .resolve(context, &query_to_forward.name, query_to_forward.kind);
        let rule = query_to_forward.rule;
        match forwarded.await {
            ForwardOutcome::Found {
                records,
                ttl,
                cached,
            } => Decision {
                reply: Reply::with(records, ttl),
                outcome: if cached {
                    QueryOutcome::Cached
                } else {
                    QueryOutcome::Forwarded
                },
                record: Some(AuditVerdict::Allowed(rule, None)),
            },
            ForwardOutcome::Empty { exists } => Decision {
                reply: Reply::without(empty_code(exists), None),
                outcome: QueryOutcome::Empty,
                record: Some(AuditVerdict::Allowed(rule, None)),
            },
            ForwardOutcome::NameDenied(denial) => {
                denied_decision(ResponseCode::NXDomain, denial, QueryOutcome::Denied)
            }
            // NXDOMAIN would apply to the other address family too (RFC 8020).
            ForwardOutcome::AddressDenied(denial) => {
                denied_decision(ResponseCode::NoError, denial, QueryOutcome::Denied)
            }
            ForwardOutcome::Failed(error) => {
                let sandbox = &query_to_forward.sandbox;
                tracing::debug!(%sandbox, %error, "dns query was not resolved upstream");
                let reason = Some(error.reason());
                Decision {
                    reply: Reply::without(ResponseCode::ServFail, reason),
                    outcome: QueryOutcome::Failed,
                    record: Some(AuditVerdict::Allowed(rule, reason)),
                }
            }
        }
    }

    fn client_state(&self, sandbox: &SandboxId) -> Arc<ClientState> {
        let mut client_states = self.client_states();
        let client_state = client_states
            .entry(sandbox.clone())
            .or_insert_with(|| Arc::new(ClientState::new(&self.limits)));
        Arc::clone(client_state)
    }

    /// The state that a query of this client counts against.
    fn client_state_of(&self, client: &QueryClient) -> Arc<ClientState> {
        match client {
            QueryClient::Known(sandbox) => self.client_state(sandbox),
            QueryClient::Unknown(_) => Arc::clone(&self.unknown_clients),
        }
    }

    fn client_states(&self) -> MutexGuard<'_, HashMap<SandboxId, Arc<ClientState>>> {
        self.client_states
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

fn event(client: &QueryClient, record: AuditVerdict) -> AuditEvent {
    let (verdict, reason, rule) = match record {
        AuditVerdict::Denied(denial) => (VerdictKind::Deny, Some(denial.reason), Some(denial.rule)),
        AuditVerdict::Allowed(rule, reason) => (VerdictKind::Allow, reason, rule),
    };
    AuditEvent {
        sandbox: match client {
            QueryClient::Known(sandbox) => Some(sandbox.clone()),
            QueryClient::Unknown(_) => None,
        },
        port: Some(53),
        stage: Some("dns".to_owned()),
        verdict: Some(verdict),
        reason,
        rule,
        ..AuditEvent::new(Kind::Dns)
    }
}

/// Parses `bytes` as a query, as an upstream's answer and as queries on a stream, and drops the
/// results: a fuzz target that looks for panics and hangs.
pub fn fuzz_check(bytes: &[u8]) {
    let settings = Arc::new(Settings::default());
    let snapshot = Arc::new(PolicySnapshot::without_bundles(settings));
    let policy = NamePolicy::from(snapshot);
    let current_policy = policy.clone();
    let server = NameServer::new(
        Box::new(move |_| current_policy.clone()),
        Questions::default(),
        DnsLimits::default(),
        DnsMetrics::default(),
    );
    let Ok(sandbox) = SandboxId::parse("fuzz") else {
        return;
    };
    let client = QueryClient::Known(sandbox);
    for mode in [DnsMode::Synthetic, DnsMode::Forward] {
        for transport in [Transport::Udp, Transport::Tcp] {
            let context = QueryContext {
                transport,
                mode,
                gate: None,
            };
            if let Some(Ok(parsed)) = message::parse(bytes)
                && let Step::Settled(decision) =
                    server.decide_locally(&client, &parsed, &context, &policy)
            {
                drop(parsed.write(&decision.reply, transport));
            }
        }
    }
    upstream::fuzz_check(bytes);
    serve::fuzz_check(bytes);
}

#[cfg(test)]
mod tests;
