//! Presets: named sets of domain rules that are part of the program, for the hosts of agents,
//! package registries and tools.
//!
//! A preset is a YAML file in `crates/config/presets`, with rules of the same shape as
//! `egress.domains`. It is parsed when it is used.

use std::path::Path;
use std::sync::LazyLock;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::layer::Layer;
use crate::leaf::{Name, Slug, Text};
use crate::problem::{Problem, closest};
use crate::schema::FileSchema;
use crate::section::egress::DomainRule;

/// The name and the text of every preset, in the order in which they are listed.
const FILES: [(&str, &str); 24] = [
    ("claude", include_str!("../presets/claude.yaml")),
    ("codex", include_str!("../presets/codex.yaml")),
    ("gemini", include_str!("../presets/gemini.yaml")),
    ("opencode", include_str!("../presets/opencode.yaml")),
    ("copilot", include_str!("../presets/copilot.yaml")),
    ("cursor", include_str!("../presets/cursor.yaml")),
    ("amp", include_str!("../presets/amp.yaml")),
    ("qwen", include_str!("../presets/qwen.yaml")),
    ("aider", include_str!("../presets/aider.yaml")),
    ("npm", include_str!("../presets/npm.yaml")),
    ("pypi", include_str!("../presets/pypi.yaml")),
    ("crates", include_str!("../presets/crates.yaml")),
    ("go", include_str!("../presets/go.yaml")),
    ("maven", include_str!("../presets/maven.yaml")),
    ("rubygems", include_str!("../presets/rubygems.yaml")),
    ("nuget", include_str!("../presets/nuget.yaml")),
    ("packagist", include_str!("../presets/packagist.yaml")),
    ("debian", include_str!("../presets/debian.yaml")),
    ("alpine", include_str!("../presets/alpine.yaml")),
    ("github-read", include_str!("../presets/github-read.yaml")),
    (
        "huggingface-read",
        include_str!("../presets/huggingface-read.yaml"),
    ),
    ("playwright", include_str!("../presets/playwright.yaml")),
    ("docker-pull", include_str!("../presets/docker-pull.yaml")),
    ("homebrew", include_str!("../presets/homebrew.yaml")),
];

static SCHEMA: LazyLock<FileSchema> = LazyLock::new(|| FileSchema::for_type::<Preset>(&[], &[]));

/// A named set of domain rules.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Preset {
    /// The name, as `egress.presets` and `--preset` use it.
    #[schemars(with = "Text<Slug>")]
    pub name: String,
    /// The version, which changes with the rules.
    #[schemars(range(min = 1))]
    pub version: u32,
    /// What the preset is for.
    pub kind: PresetKind,
    /// The description, in one line.
    #[schemars(with = "Text<Name>")]
    pub description: String,
    /// The rules.
    pub domains: Vec<DomainRule>,
}

/// What a preset is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PresetKind {
    /// The hosts that a coding agent needs.
    Agent,
    /// Reads of a package registry.
    Registry,
    /// Downloads of a tool.
    Tool,
}

impl PresetKind {
    /// The kind as text.
    pub const fn as_str(self) -> &'static str {
        match self {
            PresetKind::Agent => "agent",
            PresetKind::Registry => "registry",
            PresetKind::Tool => "tool",
        }
    }
}

/// A name that no preset has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no preset is called '{}'; {}", name.escape_default(), self.hint())]
pub struct UnknownPreset {
    name: String,
    near: Option<&'static str>,
}

impl UnknownPreset {
    /// The name of a preset that is similar.
    pub fn near(&self) -> Option<&'static str> {
        self.near
    }

    fn hint(&self) -> String {
        match self.near {
            Some(near) => format!("did you mean '{near}'?"),
            None => "palisade preset list shows their names".to_owned(),
        }
    }
}

impl Preset {
    /// The names of all presets.
    pub fn names() -> impl Iterator<Item = &'static str> {
        FILES.iter().map(|(name, _)| *name)
    }

    /// Every preset.
    pub fn all() -> Vec<Self> {
        Self::names()
            .filter_map(|name| Self::find(name).ok())
            .collect()
    }

    /// Checks that a preset has the name `name`.
    pub fn check_name(name: &str) -> Result<(), UnknownPreset> {
        if Self::names().any(|known| known == name) {
            return Ok(());
        }
        Err(UnknownPreset {
            name: name.chars().take(64).collect(),
            near: closest(name, Self::names())
                .and_then(|near| Self::names().find(|known| *known == near)),
        })
    }

    /// The preset called `name`. Its rules are named `preset:NAME`.
    pub fn find(name: &str) -> Result<Self, UnknownPreset> {
        Self::check_name(name)?;
        let text = FILES.iter().find(|(known, _)| *known == name);
        let (mut preset, _) = text
            .and_then(|(name, text)| parse(name, text))
            .ok_or_else(|| UnknownPreset {
                name: name.to_owned(),
                near: None,
            })?;
        let rule_name = format!("preset:{name}");
        for rule in &mut preset.domains {
            rule.rule_name = Some(rule_name.clone());
        }
        Ok(preset)
    }

    /// The name of the preset for the agent that `program` starts: a name or a path.
    pub fn for_program(program: &Path) -> Option<&'static str> {
        let name = program.file_name()?.to_str()?;
        let known = Self::names().find(|known| *known == name)?;
        let preset = Self::find(known).ok()?;
        (preset.kind == PresetKind::Agent).then_some(known)
    }
}

/// Parses the text of a preset, and returns the problems in it.
fn parse(name: &str, text: &str) -> Option<(Preset, Vec<Problem>)> {
    let mut problems = Vec::new();
    let file = format!("{name}.yaml");
    let layer = Layer::<Preset>::read(
        &SCHEMA,
        Path::new(&file),
        text.as_bytes(),
        None,
        &mut problems,
    )?;
    Some((layer.value, problems))
}

#[cfg(test)]
mod tests;
