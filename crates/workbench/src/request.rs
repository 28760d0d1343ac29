//! Requests and results of the tools. The HTTP service, the client and direct callers use the same
//! types.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::ToolError;
use crate::truncation::Truncation;

/// Default timeout of a command, in seconds.
pub const DEFAULT_TIMEOUT: f64 = 300.0;

/// Runs a command in the workspace's root.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BashRequest {
    /// The command line for the shell.
    pub command: String,
    /// Timeout in seconds, after which the command and its child processes are killed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<f64>,
}

/// Reads a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ReadFileRequest {
    /// The path of the file.
    pub path: String,
    /// The first line, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offset: Option<i64>,
    /// The number of lines.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
}

/// Writes a file whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WriteRequest {
    /// The path of the file.
    pub path: String,
    /// The new content.
    pub content: String,
}

/// Replaces a text that is in a file exactly once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EditRequest {
    /// The path of the file.
    pub path: String,
    /// The text to replace.
    pub old_text: String,
    /// The replacement.
    pub new_text: String,
}

/// Lists a directory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LsRequest {
    /// The directory; the root by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Maximum number of names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
}

/// Finds files by name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FindRequest {
    /// A glob for the name, or for the path if the glob contains a slash.
    pub pattern: String,
    /// The directory to search; the root by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Maximum number of files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
}

/// Finds lines in files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GrepRequest {
    /// A regular expression.
    pub pattern: String,
    /// A file, or a directory to search.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// A glob; only files that match it are searched.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub glob: Option<String>,
    /// Whether letter case is ignored.
    pub ignore_case: bool,
    /// Whether the pattern is literal text.
    pub literal: bool,
    /// Lines before and after a match.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<u64>,
    /// Maximum number of matches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
}

/// The content of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum ReadResult {
    /// Text.
    #[serde(rename_all = "camelCase")]
    Text {
        /// The requested lines, or as many as fit into the limit.
        content: String,
        /// The number of lines of the file.
        total_lines: u64,
        /// Whether more lines follow.
        has_more: bool,
        /// How the content was truncated.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        truncation: Option<Truncation>,
    },
    /// An image.
    #[serde(rename_all = "camelCase")]
    Image {
        /// The content in base64.
        data: String,
        /// The media type.
        mime_type: String,
    },
}

/// The result of a write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteResult {
    /// Always true.
    pub ok: bool,
    /// The path relative to the root.
    pub path: String,
    /// The size in bytes.
    pub bytes: u64,
}

/// The result of an edit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EditResult {
    /// Always true.
    pub ok: bool,
    /// The path of the request.
    pub path: String,
    /// The removed and added lines with their numbers.
    pub diff: String,
}

/// The entries of a directory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LsResult {
    /// One name per line; directories end with a slash.
    pub output: String,
    /// How the result was truncated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub truncation: Option<Truncation>,
}

/// The result of a find.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FindResult {
    /// The paths relative to the directory.
    pub files: Vec<String>,
    /// Whether the limit was reached.
    pub truncated: bool,
    /// The limit of the request.
    pub limit: u64,
    /// How the result was truncated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub truncation: Option<Truncation>,
}

/// The result of a grep.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrepResult {
    /// The lines with path and number, or `No matches found`.
    pub content: String,
    /// How the result was truncated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub details: Option<GrepDetails>,
}

/// How the matches were truncated.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GrepDetails {
    /// Truncation of the whole text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub truncation: Option<Truncation>,
    /// The limit, if there may be more matches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub match_limit_reached: Option<u64>,
    /// Whether long lines were shortened.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lines_truncated: bool,
}

/// The fields of a request body. A null value counts as missing.
#[derive(Debug)]
pub(crate) struct Fields<'a>(pub(crate) &'a Map<String, Value>);

impl Fields<'_> {
    fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    /// A required string, which may be empty.
    fn text(&self, name: &'static str) -> Result<String, ToolError> {
        let value = self.get(name).and_then(Value::as_str);
        value
            .map(str::to_owned)
            .ok_or(ToolError::InvalidField(name))
    }

    /// A required string that is not blank.
    fn non_blank_text(&self, name: &'static str) -> Result<String, ToolError> {
        self.text(name)
            .ok()
            .filter(|text| !text.trim().is_empty())
            .ok_or(ToolError::InvalidField(name))
    }

    /// An optional string; a blank one counts as missing.
    fn optional_text(&self, name: &'static str) -> Result<Option<String>, ToolError> {
        match self.get(name) {
            None => Ok(None),
            Some(_) => Ok(Some(self.text(name)?).filter(|text| !text.trim().is_empty())),
        }
    }

    fn flag(&self, name: &'static str) -> Result<bool, ToolError> {
        match self.get(name) {
            None => Ok(false),
            Some(value) => value.as_bool().ok_or(ToolError::InvalidField(name)),
        }
    }

    fn number(&self, name: &'static str) -> Result<Option<f64>, ToolError> {
        match self.get(name) {
            None => Ok(None),
            Some(value) => value
                .as_f64()
                .map(Some)
                .ok_or(ToolError::InvalidField(name)),
        }
    }

    /// An optional count. Zero and negative numbers, which clients send for the default, count as
    /// missing.
    fn count(&self, name: &'static str) -> Result<Option<u64>, ToolError> {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "positive, and the cast saturates"
        )]
        let whole = |number: f64| number.ceil() as u64;
        Ok(self.number(name)?.filter(|number| *number > 0.0).map(whole))
    }
}

/// A request that is parsed from the fields of a body.
pub(crate) trait FromFields: Sized {
    fn from_fields(fields: &Fields<'_>) -> Result<Self, ToolError>;
}

impl FromFields for BashRequest {
    fn from_fields(fields: &Fields<'_>) -> Result<Self, ToolError> {
        Ok(Self {
            command: fields.non_blank_text("command")?,
            timeout_seconds: fields.number("timeoutSeconds")?.filter(|time| *time > 0.0),
        })
    }
}

impl FromFields for ReadFileRequest {
    fn from_fields(fields: &Fields<'_>) -> Result<Self, ToolError> {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "offsets are whole numbers, and the cast saturates"
        )]
        let whole = |number: f64| number.floor() as i64;
        Ok(Self {
            path: fields.non_blank_text("path")?,
            offset: fields.number("offset")?.map(whole),
            limit: fields.count("limit")?,
        })
    }
}

impl FromFields for WriteRequest {
    fn from_fields(fields: &Fields<'_>) -> Result<Self, ToolError> {
        Ok(Self {
            path: fields.non_blank_text("path")?,
            content: fields.text("content")?,
        })
    }
}

impl FromFields for EditRequest {
    fn from_fields(fields: &Fields<'_>) -> Result<Self, ToolError> {
        let path = fields.non_blank_text("path")?;
        let old_text = fields.text("oldText")?;
        if old_text.is_empty() {
            return Err(ToolError::InvalidField("oldText"));
        }
        Ok(Self {
            path,
            old_text,
            new_text: fields.text("newText")?,
        })
    }
}

impl FromFields for LsRequest {
    fn from_fields(fields: &Fields<'_>) -> Result<Self, ToolError> {
        Ok(Self {
            path: fields.optional_text("path")?,
            limit: fields.count("limit")?,
        })
    }
}

impl FromFields for FindRequest {
    fn from_fields(fields: &Fields<'_>) -> Result<Self, ToolError> {
        Ok(Self {
            pattern: fields.non_blank_text("pattern")?,
            path: fields.optional_text("path")?,
            limit: fields.count("limit")?,
        })
    }
}

impl FromFields for GrepRequest {
    fn from_fields(fields: &Fields<'_>) -> Result<Self, ToolError> {
        Ok(Self {
            pattern: fields.non_blank_text("pattern")?,
            path: fields.optional_text("path")?,
            glob: fields.optional_text("glob")?,
            ignore_case: fields.flag("ignoreCase")?,
            literal: fields.flag("literal")?,
            context: fields.count("context")?,
            limit: fields.count("limit")?,
        })
    }
}
