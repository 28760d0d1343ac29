//! What is asked of the tools, and what they give back: the same shapes on the wire, for the
//! client, and for whoever calls the tools directly.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::ToolError;
use crate::truncation::Truncation;

/// How long a command may run when nobody says, in seconds.
pub const DEFAULT_TIMEOUT: f64 = 300.0;

/// Runs a command in the workspace's root.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BashRequest {
    /// For a shell.
    pub command: String,
    /// After how many seconds it is killed, with everything it started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<f64>,
}

/// Reads a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ReadFileRequest {
    /// Which.
    pub path: String,
    /// The first line, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offset: Option<i64>,
    /// How many lines.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
}

/// Writes a file whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WriteRequest {
    /// Which.
    pub path: String,
    /// Its new content.
    pub content: String,
}

/// Replaces a text that is in a file exactly once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EditRequest {
    /// Which file.
    pub path: String,
    /// What is there.
    pub old_text: String,
    /// What is to be there.
    pub new_text: String,
}

/// Lists a directory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LsRequest {
    /// Which; the root if not said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// The most names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
}

/// Finds files by name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FindRequest {
    /// A glob: of the name, or of the path if it has a slash.
    pub pattern: String,
    /// Below which directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// The most files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
}

/// Finds lines in files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GrepRequest {
    /// A regular expression.
    pub pattern: String,
    /// A file, or the directory to look below.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Only in files that match it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub glob: Option<String>,
    /// Upper case is lower case.
    pub ignore_case: bool,
    /// The pattern is a plain text.
    pub literal: bool,
    /// Lines before and after a match.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<u64>,
    /// The most matches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
}

/// What is in a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum ReadResult {
    /// Text.
    #[serde(rename_all = "camelCase")]
    Text {
        /// The lines asked for, or as many as fit.
        content: String,
        /// The lines of the file.
        total_lines: u64,
        /// Whether there are more after these.
        has_more: bool,
        /// What was cut.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        truncation: Option<Truncation>,
    },
    /// A picture.
    #[serde(rename_all = "camelCase")]
    Image {
        /// Its bytes in base64.
        data: String,
        /// What it is.
        mime_type: String,
    },
}

/// A file was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteResult {
    /// Always.
    pub ok: bool,
    /// From the root.
    pub path: String,
    /// Its size.
    pub bytes: u64,
}

/// A file was changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EditResult {
    /// Always.
    pub ok: bool,
    /// As it was asked for.
    pub path: String,
    /// The lines that went and came, with their numbers.
    pub diff: String,
}

/// A directory's names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LsResult {
    /// A line each, directories with a slash.
    pub output: String,
    /// What was cut.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub truncation: Option<Truncation>,
}

/// Files that were found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FindResult {
    /// Their paths below the directory.
    pub files: Vec<String>,
    /// Whether there are more.
    pub truncated: bool,
    /// The most that were asked for.
    pub limit: u64,
    /// What was cut.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub truncation: Option<Truncation>,
}

/// Lines that were found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrepResult {
    /// The lines with file and number, or that there are none.
    pub content: String,
    /// What was cut.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub details: Option<GrepDetails>,
}

/// What was cut of lines that were found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GrepDetails {
    /// Of the whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub truncation: Option<Truncation>,
    /// The limit, if there may be more matches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub match_limit_reached: Option<u64>,
    /// Whether lines were cut.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lines_truncated: bool,
}

/// The fields of a request's body. What is null is not there.
#[derive(Debug)]
pub(crate) struct Fields<'a>(pub(crate) &'a Map<String, Value>);

impl Fields<'_> {
    fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    /// A text that must be there, of any length.
    fn text(&self, name: &'static str) -> Result<String, ToolError> {
        let value = self.get(name).and_then(Value::as_str);
        value.map(str::to_owned).ok_or(ToolError::Field(name))
    }

    /// A text that must be there and say something.
    fn non_blank_text(&self, name: &'static str) -> Result<String, ToolError> {
        self.text(name)
            .ok()
            .filter(|text| !text.trim().is_empty())
            .ok_or(ToolError::Field(name))
    }

    /// A text that may be there; one that says nothing is not.
    fn optional_text(&self, name: &'static str) -> Result<Option<String>, ToolError> {
        match self.get(name) {
            None => Ok(None),
            Some(_) => Ok(Some(self.text(name)?).filter(|text| !text.trim().is_empty())),
        }
    }

    fn flag(&self, name: &'static str) -> Result<bool, ToolError> {
        match self.get(name) {
            None => Ok(false),
            Some(value) => value.as_bool().ok_or(ToolError::Field(name)),
        }
    }

    fn number(&self, name: &'static str) -> Result<Option<f64>, ToolError> {
        match self.get(name) {
            None => Ok(None),
            Some(value) => value.as_f64().map(Some).ok_or(ToolError::Field(name)),
        }
    }

    /// How many; clients say zero, or less, for 'as many as usual'.
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

/// A request that can be read from a body.
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
            reason = "whole numbers are what is meant, and the cast saturates"
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
            return Err(ToolError::Field("oldText"));
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
