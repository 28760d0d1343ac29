//! `logging`: the gate's own log.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The gate's log on stderr.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LoggingSection {
    /// How much is said. Changes take effect on reload.
    pub level: LogLevel,
    /// For whom.
    pub format: LogFormat,
}

/// How much is said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// Only what failed.
    Error,
    /// And what looks wrong.
    Warn,
    /// And what happened.
    #[default]
    Info,
    /// And how.
    Debug,
    /// Everything.
    Trace,
}

impl LogLevel {
    /// The word in the file.
    pub const fn as_str(self) -> &'static str {
        match self {
            LogLevel::Error => "error",
            LogLevel::Warn => "warn",
            LogLevel::Info => "info",
            LogLevel::Debug => "debug",
            LogLevel::Trace => "trace",
        }
    }
}

/// For whom the log is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Human,
    /// One JSON object a line.
    Json,
}
