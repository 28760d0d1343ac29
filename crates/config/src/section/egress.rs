//! `egress`: which hosts sandboxes may reach, and how.

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

use crate::leaf::{self, Cidr, DnsType, DnsUpstream, KeyedMap, Leaf, MethodName, Name, Slug, Text};
use crate::section::scan::ScanAction;

/// Which hosts sandboxes may reach, and how.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EgressSection {
    /// Listen addresses of an explicit proxy for containers on a shared network.
    #[serde(with = "leaf::list")]
    #[schemars(with = "Vec<Text<SocketAddr>>")]
    pub listen: Vec<SocketAddr>,
    /// Ports that are intercepted inside each sandbox, in addition to ports of rules, the proxy on
    /// 8080, git on 9418 and DNS on 53. At most 28 in all. The ports are fixed when a sandbox is
    /// created; through the proxy every port of a rule can be reached.
    #[schemars(inner(range(min = 1)))]
    pub transparent_ports: Vec<u16>,
    /// What happens to requests to hosts that no rule names.
    pub unknown: UnknownHostAction,
    /// A file with further domains, `{version: 1, domains: [...]}`; relative to this file.
    #[serde(with = "leaf::optional")]
    #[schemars(with = "Option<Text<PathBuf>>")]
    pub allowlist: Option<PathBuf>,
    /// Hosts that may be reached: a name, or a rule.
    pub domains: Vec<DomainRule>,
    /// Names of presets whose hosts may be reached, too: `palisade preset list` shows them. The
    /// `deny` of other rules applies to their hosts.
    #[schemars(with = "Vec<Text<Slug>>")]
    pub presets: Vec<String>,
    /// A file with limits and blocked API calls (policy.yaml); relative to this file.
    #[serde(with = "leaf::optional")]
    #[schemars(with = "Option<Text<PathBuf>>")]
    pub policy: Option<PathBuf>,
    /// The built-in rules for the GitHub API.
    pub github: GithubSettings,
    /// Hosts whose TLS connections are forwarded without decryption. Their requests get no
    /// credentials.
    #[serde(with = "leaf::list")]
    #[schemars(with = "Vec<Text<HostPattern>>")]
    pub passthrough: Vec<HostPattern>,
    /// Fixed addresses: a host, or host:port, and the address to connect to instead of resolving
    /// the name. The address is then allowed, even if it is private.
    #[schemars(with = "KeyedMap<Authority, Text<SocketAddr>>")]
    pub resolve: FixedAddresses,
    /// Private addresses that the named hosts may resolve to.
    pub allow_private: Vec<PrivateAddressException>,
    /// PEM files with root certificates to trust for upstream TLS, in addition to the system's.
    #[serde(with = "leaf::list")]
    #[schemars(with = "Vec<Text<PathBuf>>")]
    pub extra_roots: Vec<PathBuf>,
    /// Timeouts of requests.
    pub timeouts: EgressTimeouts,
    /// How DNS queries are answered.
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
            presets: Vec::new(),
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

/// What happens to requests to a host that no rule names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum UnknownHostAction {
    /// The request is refused.
    Deny,
    /// The operator is asked for approval.
    Ask,
}

/// One host, or the hosts below one, and the requests that are allowed to it.
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
    /// Requests that are refused although the rest of the rule allows them.
    pub deny: Vec<DenyRule>,
    /// The scanner's reaction for this host, instead of `scan.outbound`.
    pub scan: Option<ScanAction>,
    /// Name in refusals and records of a rule that is in no file, such as `preset:npm`. Not part of
    /// the written form.
    pub rule_name: Option<String>,
}

/// The two forms of a domain in a file.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
enum DomainForm {
    Host(
        #[serde(with = "leaf::scalar")]
        #[schemars(with = "Text<HostPattern>")]
        HostPattern,
    ),
    Rule(Box<DomainTable>),
}

/// A host and the requests that are allowed to it. The first matching `deny` wins.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct DomainTable {
    /// A name, `*.` and a name for every host below it, or an IP address.
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<HostPattern>")]
    host: HostPattern,
    /// Ports; 80 and 443 if not set. New sandboxes intercept them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(inner(range(min = 1)))]
    ports: Vec<u16>,
    /// Methods; all if not set. Where methods or paths are restricted, requests with a method or
    /// path override header are refused.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "Vec<Text<MethodName>>")]
    methods: Vec<String>,
    /// Paths: `*` matches one segment, `**` any number; all if not set.
    #[serde(default, with = "leaf::list", skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "Vec<Text<PathPattern>>")]
    paths: Vec<PathPattern>,
    /// Names of programs inside the sandbox that may use the rule; a convenience, not a security
    /// boundary.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "Vec<Text<Name>>")]
    programs: Vec<String>,
    /// Requests that are refused although the rule allows them. `[{}]` refuses everything: the name
    /// is then not resolved either, and no alias leads to it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    deny: Vec<DenyRule>,
    /// The scanner's reaction for this host, instead of `scan.outbound`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    scan: Option<ScanAction>,
}

/// Methods and paths that are refused.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DenyRule {
    /// Methods; all if not set.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "Vec<Text<MethodName>>")]
    pub methods: Vec<String>,
    /// Paths; all if not set.
    #[serde(with = "leaf::list", skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "Vec<Text<PathPattern>>")]
    pub paths: Vec<PathPattern>,
}

impl DomainRule {
    /// A rule that allows everything on `host`.
    pub fn allow_all(host: HostPattern) -> Self {
        Self {
            host,
            ports: Vec::new(),
            methods: Vec::new(),
            paths: Vec::new(),
            programs: Vec::new(),
            deny: Vec::new(),
            scan: None,
            rule_name: None,
        }
    }
}

impl From<DomainForm> for DomainRule {
    fn from(form: DomainForm) -> Self {
        match form {
            DomainForm::Host(host) => Self::allow_all(host),
            DomainForm::Rule(table) => Self {
                host: table.host,
                ports: table.ports,
                methods: table.methods,
                paths: table.paths,
                programs: table.programs,
                deny: table.deny,
                scan: table.scan,
                rule_name: None,
            },
        }
    }
}

impl From<DomainRule> for DomainForm {
    fn from(rule: DomainRule) -> Self {
        let plain = DomainRule {
            rule_name: rule.rule_name.clone(),
            ..DomainRule::allow_all(rule.host.clone())
        };
        if rule == plain {
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
    /// Names of rules to enable in addition to those that are enabled by default; see GitHub rules
    /// below.
    #[schemars(with = "Vec<Text<Slug>>")]
    pub allow: Vec<String>,
}

/// Fixed addresses of hosts, which are not resolved.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FixedAddresses(Vec<(Authority, SocketAddr)>);

impl FixedAddresses {
    /// The address for `host` and `port`; an entry with the port takes precedence.
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
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<HostPattern>")]
    pub host: HostPattern,
    /// The private addresses that the host may resolve to.
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<Cidr>")]
    pub cidr: Cidr,
}

/// Timeouts of requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EgressTimeouts {
    /// Connecting to the upstream, including the TLS handshake.
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<Duration>")]
    pub connect: Duration,
    /// Receiving the client's request head.
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<Duration>")]
    pub header: Duration,
    /// Receiving the first byte of the upstream's response.
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<Duration>")]
    pub response: Duration,
    /// No data in either direction.
    #[serde(with = "leaf::scalar")]
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

/// How DNS queries are answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct DnsSettings {
    /// Listen addresses of the DNS server for containers on a shared network, UDP and TCP. Queries
    /// there are always forwarded: a synthetic address cannot be reached from such a network.
    #[serde(with = "leaf::list")]
    #[schemars(with = "Vec<Text<SocketAddr>>")]
    pub listen: Vec<SocketAddr>,
    /// How queries from sandboxes are answered.
    pub mode: DnsMode,
    /// Upstream resolvers: `system`, or addresses.
    #[serde(with = "leaf::list")]
    #[schemars(with = "Vec<Text<DnsUpstream>>")]
    pub upstreams: Vec<DnsUpstream>,
    /// The file from which the resolvers of `system` are read. A change of the file takes effect
    /// without a restart.
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<PathBuf>")]
    pub resolv_conf: PathBuf,
    /// Sustained queries per second of one sandbox. Queries beyond it are dropped over UDP and
    /// delayed over TCP.
    #[schemars(range(max = 1_000_000))]
    pub rate: NonZeroU32,
    /// Maximum burst of queries; twice `rate` if not set.
    #[schemars(range(max = 1_000_000))]
    pub burst: Option<NonZeroU32>,
    /// Record types that are answered in addition to A and AAAA.
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
    /// The rate limit of one sandbox's queries.
    pub fn rate_limit(&self) -> Rate {
        // Rounded up, so that the rate is never exceeded.
        let nanos = 1_000_000_000_u64.div_ceil(self.rate.get().into());
        let twice = || self.rate.saturating_add(self.rate.get());
        Rate::every(
            NonZeroU64::new(nanos).unwrap_or(NonZeroU64::MIN),
            self.burst.unwrap_or_else(twice),
        )
    }
}

/// How DNS queries of sandboxes are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DnsMode {
    /// With addresses from a reserved range; no query leaves the host, and a host that is not
    /// allowed is refused on connect.
    Synthetic,
    /// By the upstream resolvers, for allowed names only.
    Forward,
}
