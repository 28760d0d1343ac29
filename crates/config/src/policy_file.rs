//! policy.yaml (blocked API calls, push limits, circuit breakers, rate limits) and allowlist.yaml.

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::time::Duration;

use policy::host::Host;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};

use crate::leaf::{self, KeyedMap, MAX_METHODS, MAX_PATTERNS, MethodName, RegexPattern, Text};
use crate::schema::FileSchema;
use crate::section::egress::DomainRule;
use crate::unavailable;
use crate::version::Version;

/// The schema of policy.yaml.
pub(crate) static POLICY: LazyLock<FileSchema> =
    LazyLock::new(|| FileSchema::for_type::<PolicyFile>(&[], &[]));
/// The schema of allowlist.yaml.
pub(crate) static ALLOWLIST: LazyLock<FileSchema> =
    LazyLock::new(|| FileSchema::for_type::<AllowlistFile>(unavailable::ALLOWLIST, &[]));

/// The content of policy.yaml. Without such a file, the defaults.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PolicyFile {
    /// Rules for the GitHub API and for refs.
    pub policy: ApiPolicy,
    /// Limits of pushes.
    pub git: GitPolicy,
    /// When requests to a failing upstream are refused without trying.
    pub circuit_breakers: CircuitBreakers,
    /// Rate limits per sandbox and upstream.
    pub rate_limits: RateLimits,
}

/// Rules for the GitHub API and for refs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ApiPolicy {
    /// Regular expressions of API paths that are refused, by method: at most 256 for each of at
    /// most 16 methods.
    #[serde(with = "patterns")]
    #[schemars(with = "KeyedMap<MethodName, Patterns>", extend("maxProperties" = MAX_METHODS))]
    pub blocked_api_patterns: BTreeMap<String, Vec<RegexPattern>>,
    /// Whether a push may delete refs.
    pub allow_branch_deletion: bool,
}

/// The patterns of one method, in the schema.
struct Patterns;

impl JsonSchema for Patterns {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Patterns".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let mut schema = Vec::<Text<RegexPattern>>::json_schema(generator);
        schema.insert("maxItems".to_owned(), MAX_PATTERNS.into());
        schema
    }
}

mod patterns {
    use std::collections::BTreeMap;

    use serde::{Deserialize, Deserializer, Serializer};

    use crate::leaf::{Leaf, ParsedLeaf, RegexPattern};

    pub(super) fn serialize<S: Serializer>(
        table: &BTreeMap<String, Vec<RegexPattern>>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_map(table.iter().map(|(method, list)| {
            let list: Vec<String> = list.iter().map(Leaf::write).collect();
            (method, list)
        }))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<BTreeMap<String, Vec<RegexPattern>>, D::Error> {
        let table =
            BTreeMap::<String, Option<Vec<ParsedLeaf<RegexPattern>>>>::deserialize(deserializer)?;
        let unwrap_list = |list: Option<Vec<ParsedLeaf<RegexPattern>>>| {
            let list = list.unwrap_or_default();
            list.into_iter()
                .map(|ParsedLeaf(pattern)| pattern)
                .collect()
        };
        Ok(table
            .into_iter()
            .map(|(method, list)| (method, unwrap_list(list)))
            .collect())
    }
}

/// Limits of pushes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct GitPolicy {
    /// Size limits of a push.
    pub push_limits: PushLimits,
}

/// Size limits of a push.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PushLimits {
    /// A larger push is logged.
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<u64>")]
    pub warning_bytes: u64,
    /// A larger push is refused. At most 500 MiB.
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<u64>")]
    pub hard_limit_bytes: u64,
}

impl Default for PushLimits {
    fn default() -> Self {
        Self {
            warning_bytes: 50 << 20,
            hard_limit_bytes: 100 << 20,
        }
    }
}

/// When requests to a failing upstream are refused without trying.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CircuitBreakers {
    /// Defaults for hosts that `upstreams` does not list, and for keys that an entry there omits.
    pub defaults: BreakerDefaults,
    /// Settings by host. The entries replace the built-in list of AI APIs (3 failures, 60s).
    #[schemars(with = "KeyedMap<Host, Option<BreakerRow>>")]
    pub upstreams: BTreeMap<String, Option<BreakerRow>>,
}

/// Hosts whose requests are slow and expensive: the breaker opens after fewer failures and stays
/// unwrap_list longer.
const AI_APIS: [&str; 6] = [
    "api.anthropic.com",
    "api.openai.com",
    "api.perplexity.ai",
    "api.tavily.com",
    "api.z.ai",
    "generativelanguage.googleapis.com",
];

impl Default for CircuitBreakers {
    fn default() -> Self {
        let row = BreakerRow {
            failure_threshold: Some(3),
            recovery_timeout: Some(Duration::from_secs(60)),
            success_threshold: None,
        };
        Self {
            defaults: BreakerDefaults::default(),
            upstreams: AI_APIS
                .into_iter()
                .map(|host| (host.to_owned(), Some(row.clone())))
                .collect(),
        }
    }
}

/// A circuit breaker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct BreakerDefaults {
    /// Consecutive failures after which the breaker opens.
    #[schemars(range(min = 1))]
    pub failure_threshold: u32,
    /// How long the breaker stays unwrap_list. A bare number is seconds.
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<Duration>")]
    pub recovery_timeout: Duration,
    /// Consecutive successes after which the breaker closes again.
    #[schemars(range(min = 1))]
    pub success_threshold: u32,
}

impl Default for BreakerDefaults {
    fn default() -> Self {
        Self {
            failure_threshold: 5,
            recovery_timeout: Duration::from_secs(30),
            success_threshold: 2,
        }
    }
}

/// Settings of one upstream's breaker that differ from the defaults.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct BreakerRow {
    /// Consecutive failures after which the breaker opens.
    #[schemars(range(min = 1))]
    pub failure_threshold: Option<u32>,
    /// How long the breaker stays unwrap_list. A bare number is seconds.
    #[serde(with = "leaf::optional")]
    #[schemars(with = "Option<Text<Duration>>")]
    pub recovery_timeout: Option<Duration>,
    /// Consecutive successes after which the breaker closes again.
    #[schemars(range(min = 1))]
    pub success_threshold: Option<u32>,
}

/// Rate limits per sandbox and upstream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RateLimits {
    /// Whether rate limits apply.
    pub enabled: bool,
    /// Limit for hosts that `per_upstream` does not list.
    pub defaults: RateRow,
    /// Limits by host.
    #[schemars(with = "KeyedMap<Host, Option<RateRow>>")]
    pub per_upstream: BTreeMap<String, Option<RateRow>>,
}

impl Default for RateLimits {
    fn default() -> Self {
        Self {
            enabled: true,
            defaults: RateRow::default(),
            per_upstream: BTreeMap::new(),
        }
    }
}

/// A rate, per sandbox and upstream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RateRow {
    /// Sustained requests per second.
    #[schemars(extend("exclusiveMinimum" = 0, "maximum" = 1_000_000))]
    pub requests_per_second: f64,
    /// Maximum burst of requests; twice `requests_per_second` if not set.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub burst_size: Option<u32>,
}

impl Default for RateRow {
    fn default() -> Self {
        Self {
            requests_per_second: 100.0,
            burst_size: None,
        }
    }
}

impl RateRow {
    /// Maximum burst: as configured, else twice the rate, so that a slower upstream does not
    /// inherit the burst of a faster one; at least one.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the schema bounds the rate to a million"
    )]
    pub fn burst(&self) -> u32 {
        let twice = (self.requests_per_second * 2.0)
            .ceil()
            .clamp(1.0, 2_000_000.0);
        self.burst_size.unwrap_or(twice as u32)
    }
}

/// allowlist.yaml.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct AllowlistFile {
    /// Version of the file format.
    pub(crate) version: Version,
    /// Hosts that may be reached: a name, or a rule.
    pub(crate) domains: Vec<DomainRule>,
}
