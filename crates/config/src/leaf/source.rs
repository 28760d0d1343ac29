//! Sources of secrets, and environment entries.

use std::path::PathBuf;

use serde::{Serialize, Serializer};

use super::{Format, Leaf, require, without_detail};
use crate::expansion::is_variable;
use crate::secret::Secret;

/// Where a credential is read from, each time it is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SecretSource {
    /// An environment variable.
    Env(String),
    /// The content of a file.
    File(PathBuf),
    /// The output of a command.
    Command(String),
}

impl Format for SecretSource {
    const NAME: &'static str = "credential-source";
    const DESCRIPTION: &'static str = "env:NAME, file:PATH or command:LINE";
    // An operator may paste the token itself here, which must not appear in a log.
    const SENSITIVE: bool = true;

    fn check(text: &str) -> Result<(), String> {
        Self::read(text).map(drop)
    }
}

impl Leaf for SecretSource {
    fn read(text: &str) -> Result<Self, String> {
        let (kind, rest) = without_detail(text.split_once(':'))?;
        match kind {
            "env" => without_detail(is_variable(rest).then(|| Self::Env(rest.to_owned()))),
            "file" => PathBuf::read(rest).map(Self::File),
            "command" => {
                let clean = !rest.trim().is_empty() && !rest.contains(char::is_control);
                without_detail(clean.then(|| Self::Command(rest.trim().to_owned())))
            }
            _ => Err(String::new()),
        }
    }

    fn write(&self) -> String {
        match self {
            Self::Env(name) => format!("env:{name}"),
            Self::File(path) => format!("file:{}", path.display()),
            Self::Command(line) => format!("command:{line}"),
        }
    }
}

/// The name of an environment variable.
pub(crate) struct EnvName;

impl Format for EnvName {
    const NAME: &'static str = "env-name";
    const DESCRIPTION: &'static str = "the name of an environment variable";

    fn check(text: &str) -> Result<(), String> {
        require(is_variable(text))
    }
}

/// `NAME=value` for a tool's environment. The value may be a key, so it is treated as a secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnvEntry {
    /// The name of the variable.
    pub name: String,
    /// The value of the variable.
    pub value: Secret,
}

impl Format for EnvEntry {
    const NAME: &'static str = "env-entry";
    const DESCRIPTION: &'static str = "NAME=value";
    const SENSITIVE: bool = true;

    fn check(text: &str) -> Result<(), String> {
        Self::read(text).map(drop)
    }
}

impl Leaf for EnvEntry {
    fn read(text: &str) -> Result<Self, String> {
        let (name, value) = without_detail(text.split_once('='))?;
        without_detail((is_variable(name) && !value.contains('\0')).then(|| Self {
            name: name.to_owned(),
            value: Secret::new(value),
        }))
    }

    fn write(&self) -> String {
        format!("{}={}", self.name, self.value.display_text())
    }
}

impl Serialize for EnvEntry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.write())
    }
}
