//! `logging`: the gate's own log.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The gate's log on stderr.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LoggingSection {
    /// Minimum level of messages. Changes take effect on reload.
    pub level: LogLevel,
    /// Format of messages.
    pub format: LogFormat,
}

/// Minimum level of messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// Failures.
    Error,
    /// Unexpected events as well.
    Warn,
    /// Normal events as well.
    #[default]
    Info,
    /// Details of operations as well.
    Debug,
    /// Everything.
    Trace,
}

impl LogLevel {
    /// The value as written in the file.
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

/// Format of log messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Text for people.
    #[default]
    Human,
    /// One JSON object per line.
    Json,
}
