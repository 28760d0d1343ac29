//! `egress`: what may leave a sandbox.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::num::{NonZeroU32, NonZeroU64};
use std::path::PathBuf;
use std::time::Duration;

use policy::bucket::Rate;
use policy::endpoint::PathPattern;
use policy::host::{Authority, Host, HostPattern};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::leaf::{self, Cidr, DnsType, DnsUpstream, Keyed, Leaf, MethodName, Name, Slug, Text};
use crate::section::scan::ScanAction;

/// The gate.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EgressSection {
    /// Addresses of an explicit proxy for containers on a shared network.
    #[serde(with = "leaf::list")]
    #[schemars(with = "Vec<Text<SocketAddr>>")]
    pub listen: Vec<SocketAddr>,
    /// Ports that are captured inside each sandbox, beside those that rules name, the proxy on
    /// 8080, git on 9418 and DNS on 53. At most 28 in all. A sandbox captures the ports of the
    /// time it was made; through the proxy every port of a rule can be reached.
    #[schemars(inner(range(min = 1)))]
    pub transparent_ports: Vec<u16>,
    /// What happens to hosts no rule names.
    pub unknown: UnknownHostAction,
    /// A file of domains, `{version: 1, domains: [...]}`; relative to this file.
    #[serde(with = "leaf::maybe")]
    #[schemars(with = "Option<Text<PathBuf>>")]
    pub allowlist: Option<PathBuf>,
    /// Hosts that may be reached: a name, or a rule.
    pub domains: Vec<DomainRule>,
    /// A file of limits and blocked API calls; relative to this file.
    #[serde(with = "leaf::maybe")]
    #[schemars(with = "Option<Text<PathBuf>>")]
    pub policy: Option<PathBuf>,
    /// The built-in rules for the GitHub API.
    pub github: GithubSettings,
    /// Hosts whose TLS is passed on unread. They get no credentials.
    #[serde(with = "leaf::list")]
    #[schemars(with = "Vec<Text<HostPattern>>")]
    pub passthrough: Vec<HostPattern>,
    /// Fixed addresses: a host, or host:port, and where to connect instead of resolving
    /// it. That address is then allowed.
    #[schemars(with = "Keyed<Authority, Text<SocketAddr>>")]
    pub resolve: FixedAddresses,
    /// Private addresses that named hosts may resolve to.
    pub allow_private: Vec<PrivateAddressException>,
    /// PEM files of roots that are trusted for upstream TLS, beside the system's.
    #[serde(with = "leaf::list")]
    #[schemars(with = "Vec<Text<PathBuf>>")]
    pub extra_roots: Vec<PathBuf>,
    /// How long each step may take.
    pub timeouts: EgressTimeouts,
    /// How names are answered.
    pub dns: DnsSettings,
}

impl Default for EgressSection {
    fn default() -> Self {
        Self {
            listen: Vec::new(),
            transparent_ports: vec![80, 443],
            unknown: UnknownHostAction::Deny,
            allowlist: None,
            domains: Vec::new(),
            policy: None,
            github: GithubSettings::default(),
            passthrough: Vec::new(),
            resolve: FixedAddresses::default(),
            allow_private: Vec::new(),
            extra_roots: Vec::new(),
            timeouts: EgressTimeouts::default(),
            dns: DnsSettings::default(),
        }
    }
}

/// What happens to a host no rule names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum UnknownHostAction {
    /// It is refused.
    Deny,
    /// The operator is asked.
    Ask,
}

/// One host, or the hosts below one, and what may be done there.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(from = "DomainForm", into = "DomainForm")]
#[schemars(with = "DomainForm")]
pub struct DomainRule {
    /// The hosts.
    pub host: HostPattern,
    /// The ports; empty for 80 and 443.
    pub ports: Vec<u16>,
    /// The methods; empty for all.
    pub methods: Vec<String>,
    /// The paths; empty for all.
    pub paths: Vec<PathPattern>,
    /// The programs; empty for all.
    pub programs: Vec<String>,
    /// What is refused although the rest of the rule allows it.
    pub deny: Vec<DenyRule>,
    /// What the scanner does here, instead of `scan.outbound`.
    pub scan: Option<ScanAction>,
}

/// The two ways to write a domain.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
enum DomainForm {
    Host(
        #[serde(with = "leaf::one")]
        #[schemars(with = "Text<HostPattern>")]
        HostPattern,
    ),
    Rule(Box<DomainTable>),
}

/// A host and what may be done there. The first matching `deny` wins.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct DomainTable {
    /// A name, `*.` and a name for everything below it, or an address.
    #[serde(with = "leaf::one")]
    #[schemars(with = "Text<HostPattern>")]
    host: HostPattern,
    /// The ports; 80 and 443 when not given. New sandboxes capture them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(inner(range(min = 1)))]
    ports: Vec<u16>,
    /// The methods; all when not given. Where methods or paths are restricted, requests with
    /// a header that overrides either are refused.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "Vec<Text<MethodName>>")]
    methods: Vec<String>,
    /// The paths: `*` is one segment, `**` any number; all when not given.
    #[serde(default, with = "leaf::list", skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "Vec<Text<PathPattern>>")]
    paths: Vec<PathPattern>,
    /// Names of programs inside the sandbox; a convenience, not a boundary.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "Vec<Text<Name>>")]
    programs: Vec<String>,
    /// What is refused all the same. `[{}]` is everything: then the name is not resolved
    /// either, and no alias leads there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    deny: Vec<DenyRule>,
    /// What the scanner does here, instead of `scan.outbound`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    scan: Option<ScanAction>,
}

/// Methods and paths that are refused.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DenyRule {
    /// The methods; all when not given.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "Vec<Text<MethodName>>")]
    pub methods: Vec<String>,
    /// The paths; all when not given.
    #[serde(with = "leaf::list", skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "Vec<Text<PathPattern>>")]
    pub paths: Vec<PathPattern>,
}

impl DomainRule {
    /// A rule that allows everything on `host`.
    pub fn of(host: HostPattern) -> Self {
        Self {
            host,
            ports: Vec::new(),
            methods: Vec::new(),
            paths: Vec::new(),
            programs: Vec::new(),
            deny: Vec::new(),
            scan: None,
        }
    }
}

impl From<DomainForm> for DomainRule {
    fn from(form: DomainForm) -> Self {
        match form {
            DomainForm::Host(host) => Self::of(host),
            DomainForm::Rule(table) => Self {
                host: table.host,
                ports: table.ports,
                methods: table.methods,
                paths: table.paths,
                programs: table.programs,
                deny: table.deny,
                scan: table.scan,
            },
        }
    }
}

impl From<DomainRule> for DomainForm {
    fn from(rule: DomainRule) -> Self {
        if rule == DomainRule::of(rule.host.clone()) {
            return DomainForm::Host(rule.host);
        }
        DomainForm::Rule(Box::new(DomainTable {
            host: rule.host,
            ports: rule.ports,
            methods: rule.methods,
            paths: rule.paths,
            programs: rule.programs,
            deny: rule.deny,
            scan: rule.scan,
        }))
    }
}

/// The built-in rules for the GitHub API.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct GithubSettings {
    /// Names of rules to switch on beside those that are on anyway; see GitHub rules below.
    #[schemars(with = "Vec<Text<Slug>>")]
    pub allow: Vec<String>,
}

/// Where to connect for a host, instead of resolving it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FixedAddresses(Vec<(Authority, SocketAddr)>);

impl FixedAddresses {
    /// The address for `host` and `port`; an entry that names the port comes first.
    pub fn get(&self, host: &Host, port: u16) -> Option<SocketAddr> {
        let find = |port| {
            let mut entries = self.0.iter();
            entries.find(|(from, _)| from.host == *host && from.port == port)
        };
        find(Some(port)).or_else(|| find(None)).map(|(_, to)| *to)
    }

    /// Every entry.
    pub fn iter(&self) -> impl Iterator<Item = &(Authority, SocketAddr)> {
        self.0.iter()
    }
}

impl Serialize for FixedAddresses {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(from, to)| (from.write(), to.write())))
    }
}

impl<'de> Deserialize<'de> for FixedAddresses {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        use serde::de::Error as _;
        let table = BTreeMap::<String, leaf::ParsedLeaf<SocketAddr>>::deserialize(deserializer)?;
        let read = |(from, leaf::ParsedLeaf(to)): (String, _)| match Authority::read(&from) {
            Ok(from) => Ok((from, to)),
            Err(detail) => Err(D::Error::custom(detail)),
        };
        table
            .into_iter()
            .map(read)
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

/// A host that may resolve to private addresses.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PrivateAddressException {
    /// The host.
    #[serde(with = "leaf::one")]
    #[schemars(with = "Text<HostPattern>")]
    pub host: HostPattern,
    /// The addresses it may have.
    #[serde(with = "leaf::one")]
    #[schemars(with = "Text<Cidr>")]
    pub cidr: Cidr,
}

/// How long each step of a request may take.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EgressTimeouts {
    /// Connecting to the upstream, TLS included.
    #[serde(with = "leaf::one")]
    #[schemars(with = "Text<Duration>")]
    pub connect: Duration,
    /// The client's own head.
    #[serde(with = "leaf::one")]
    #[schemars(with = "Text<Duration>")]
    pub header: Duration,
    /// The first byte from upstream.
    #[serde(with = "leaf::one")]
    #[schemars(with = "Text<Duration>")]
    pub response: Duration,
    /// Silence in either direction.
    #[serde(with = "leaf::one")]
    #[schemars(with = "Text<Duration>")]
    pub idle: Duration,
}

impl Default for EgressTimeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            header: Duration::from_secs(30),
            response: Duration::from_secs(600),
            idle: Duration::from_secs(300),
        }
    }
}

/// How names are answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DnsSettings {
    /// Addresses at which containers on a shared network are answered, over UDP and TCP.
    /// There names are always forwarded: a synthetic address would lead nowhere.
    #[serde(with = "leaf::list")]
    #[schemars(with = "Vec<Text<SocketAddr>>")]
    pub listen: Vec<SocketAddr>,
    /// From where a sandbox's names are answered.
    pub mode: DnsMode,
    /// Resolvers the gate asks: `system`, or addresses.
    #[serde(with = "leaf::list")]
    #[schemars(with = "Vec<Text<DnsUpstream>>")]
    pub upstreams: Vec<DnsUpstream>,
    /// The file that says which resolvers `system` means. A change of it is noticed.
    #[serde(with = "leaf::one")]
    #[schemars(with = "Text<PathBuf>")]
    pub resolv_conf: PathBuf,
    /// Queries a second of one sandbox, in the long run. What is beyond is dropped over UDP
    /// and waits over TCP.
    #[schemars(range(max = 1_000_000))]
    pub rate: NonZeroU32,
    /// Queries at once; twice the rate when not given.
    #[schemars(range(max = 1_000_000))]
    pub burst: Option<NonZeroU32>,
    /// Record types that are answered beside A and AAAA.
    #[schemars(with = "Vec<Text<DnsType>>")]
    pub extra_types: Vec<String>,
}

impl Default for DnsSettings {
    fn default() -> Self {
        Self {
            listen: Vec::new(),
            mode: DnsMode::Synthetic,
            upstreams: vec![DnsUpstream::System],
            resolv_conf: PathBuf::from("/etc/resolv.conf"),
            rate: const { NonZeroU32::new(200).expect("it is not zero") },
            burst: None,
            extra_types: Vec::new(),
        }
    }
}

impl DnsSettings {
    /// How fast one sandbox may ask.
    pub fn pace(&self) -> Rate {
        // Rounded up: rather a nanosecond slow than a query fast.
        let nanos = 1_000_000_000_u64.div_ceil(self.rate.get().into());
        let twice = || self.rate.saturating_add(self.rate.get());
        Rate::every(
            NonZeroU64::new(nanos).unwrap_or(NonZeroU64::MIN),
            self.burst.unwrap_or_else(twice),
        )
    }
}

/// Where answers come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DnsMode {
    /// From a reserved range; nothing leaves, and the refusal comes on connect.
    Synthetic,
    /// From the upstream resolvers, for allowed names only.
    Forward,
}
