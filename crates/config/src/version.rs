//! The key `version`, which every file but policy.yaml has.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The only version, in each accepted spelling.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Value", into = "&'static str")]
pub(crate) struct Version;

impl From<Value> for Version {
    fn from(_: Value) -> Self {
        Self
    }
}

impl From<Version> for &'static str {
    fn from(_: Version) -> Self {
        "1.0"
    }
}

impl JsonSchema for Version {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Version".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": ["string", "number"], "enum": ["1.0", "1", 1] })
    }
}
