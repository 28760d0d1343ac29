//! policy.yaml: blocked API calls, push limits, breakers and rate limits; and allowlist.yaml.

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::time::Duration;

use policy::host::Host;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};

use crate::leaf::{self, Keyed, MOST_METHODS, MOST_PATTERNS, MethodName, RegexPattern, Text};
use crate::schema::FileSchema;
use crate::section::egress::DomainRule;
use crate::unavailable;
use crate::version::Version;

/// The schema of policy.yaml.
pub(crate) static POLICY: LazyLock<FileSchema> =
    LazyLock::new(|| FileSchema::of::<PolicyFile>(&[], &[]));
/// The schema of allowlist.yaml and grants.yaml.
pub(crate) static ALLOWLIST: LazyLock<FileSchema> =
    LazyLock::new(|| FileSchema::of::<AllowlistFile>(unavailable::ALLOWLIST, &[]));

/// What policy.yaml says. Without such a file these are the defaults.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PolicyFile {
    /// Rules for the GitHub API and for refs.
    pub policy: ApiPolicy,
    /// Limits of pushes.
    pub git: GitPolicy,
    /// When an upstream that fails is left alone.
    pub circuit_breakers: CircuitBreakers,
    /// How fast a sandbox may send.
    pub rate_limits: RateLimits,
}

/// Rules for the GitHub API and for refs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ApiPolicy {
    /// By method, patterns of API paths that are refused: at most 256 for each of at most
    /// 16 methods.
    #[serde(with = "patterns")]
    #[schemars(with = "Keyed<MethodName, Patterns>", extend("maxProperties" = MOST_METHODS))]
    pub blocked_api_patterns: BTreeMap<String, Vec<RegexPattern>>,
    /// Whether refs may be deleted.
    pub allow_branch_deletion: bool,
}

/// Stands for the patterns of one method in the schema.
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
        schema.insert("maxItems".to_owned(), MOST_PATTERNS.into());
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
        let open = |list: Option<Vec<ParsedLeaf<RegexPattern>>>| {
            let list = list.unwrap_or_default();
            list.into_iter()
                .map(|ParsedLeaf(pattern)| pattern)
                .collect()
        };
        Ok(table
            .into_iter()
            .map(|(method, list)| (method, open(list)))
            .collect())
    }
}

/// Limits of pushes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct GitPolicy {
    /// How large a push may be.
    pub push_limits: PushLimits,
}

/// How large a push may be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PushLimits {
    /// Above this it is logged.
    #[serde(with = "leaf::one")]
    #[schemars(with = "Text<u64>")]
    pub warning_bytes: u64,
    /// Above this it is refused. At most 500 MiB.
    #[serde(with = "leaf::one")]
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

/// When an upstream that fails is left alone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CircuitBreakers {
    /// For upstreams that are not listed, and for what a listed one leaves out.
    pub defaults: BreakerDefaults,
    /// By host. What is listed here takes the place of the built-in list of AI APIs
    /// (3 failures, 60s).
    #[schemars(with = "Keyed<Host, Option<BreakerRow>>")]
    pub upstreams: BTreeMap<String, Option<BreakerRow>>,
}

/// Hosts whose calls are slow and dear: fewer failures, longer rest.
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

/// A breaker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct BreakerDefaults {
    /// Failures in a row before it opens.
    #[schemars(range(min = 1))]
    pub failure_threshold: u32,
    /// How long it stays open. A bare number is seconds.
    #[serde(with = "leaf::one")]
    #[schemars(with = "Text<Duration>")]
    pub recovery_timeout: Duration,
    /// Successes in a row before it closes again.
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

/// What one upstream's breaker does differently.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct BreakerRow {
    /// Failures in a row before it opens.
    #[schemars(range(min = 1))]
    pub failure_threshold: Option<u32>,
    /// How long it stays open.
    #[serde(with = "leaf::maybe")]
    #[schemars(with = "Option<Text<Duration>>")]
    pub recovery_timeout: Option<Duration>,
    /// Successes in a row before it closes again.
    #[schemars(range(min = 1))]
    pub success_threshold: Option<u32>,
}

/// How fast a sandbox may send.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RateLimits {
    /// Whether there are limits at all.
    pub enabled: bool,
    /// For upstreams that are not listed.
    pub defaults: RateRow,
    /// By host.
    #[schemars(with = "Keyed<Host, Option<RateRow>>")]
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
    /// Requests a second, in the long run.
    #[schemars(extend("exclusiveMinimum" = 0, "maximum" = 1_000_000))]
    pub requests_per_second: f64,
    /// Requests at once; twice the rate when not given.
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
    /// Requests at once: as written, else twice the rate, so that a slower upstream does
    /// not inherit the burst of a faster one; at least one.
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

/// allowlist.yaml, and grants.yaml in the same shape.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct AllowlistFile {
    /// The version of the shape.
    pub(crate) version: Version,
    /// Hosts that may be reached: a name, or a rule.
    pub(crate) domains: Vec<DomainRule>,
}
