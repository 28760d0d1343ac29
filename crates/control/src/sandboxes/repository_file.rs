//! A repository's own `.palisade.yaml` when a sandbox is created: whether it is trusted, what
//! it adds, and the notes about it.

use std::path::{Path, PathBuf};

use config::leaf::PortMapping;
use config::section::egress::DomainRule;
use config::section::sandbox::SetupCommand;
use config::{FILE_NAME, RepoFile, RepoSettings, Settings, TrustStore, TrustedRepoFile};
use sandbox::manager::row::SandboxRow;
use serde::{Deserialize, Serialize};

/// Maximum number of hosts that a note names.
const MAX_HOSTS_NAMED: usize = 5;

/// The state of the file in the operator's worktree. The file is never read from a workspace,
/// where an agent can write.
#[derive(Debug, Default)]
pub(super) enum FileState {
    /// The file does not exist.
    #[default]
    Absent,
    /// The operator trusts exactly this content.
    Trusted {
        keys: Box<TrustedRepoFile>,
        sha256: String,
    },
    /// The operator does not trust this content; `changed` if another content was trusted.
    Untrusted { directory: PathBuf, changed: bool },
    /// The file is invalid, or the list of trusted files cannot be read.
    Unusable(String),
}

/// What the file adds to a sandbox. Stored in the sandbox's row: the content that was trusted
/// at creation applies as long as the sandbox exists.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct FileAdditions {
    /// Hash of the trusted content.
    sha256: String,
    /// Whether a set-up command ran.
    setup: bool,
    /// How many ports were published.
    ports: usize,
    /// Names of variables that are passed on, because `sandbox.env` lists them, too.
    env: Vec<String>,
    /// Names of variables that are not passed on, because `sandbox.env` does not list them.
    env_missing: Vec<String>,
    /// The image that the file names; it has no effect in this version.
    image: Option<String>,
    /// Hosts that the sandbox may reach in addition to those of the operator's settings.
    pub(super) egress: Vec<DomainRule>,
}

/// The keys of the file that apply at creation, and the additions for the sandbox's row.
#[derive(Debug, Default)]
pub(super) struct AppliedFile {
    pub(super) setup_command: Option<SetupCommand>,
    pub(super) ports: Vec<PortMapping>,
    pub(super) additions: Option<FileAdditions>,
}

impl FileState {
    /// Reads the file in `directory`, and the list of trusted files at `trusted`. Blocks.
    pub(super) fn read(directory: &Path, trusted: &Path) -> Self {
        let file = match RepoFile::load(directory) {
            Ok(Some(file)) => file,
            Ok(None) => return FileState::Absent,
            Err(problems) => {
                let first = problems.iter().next().map(ToString::to_string);
                return FileState::Unusable(first.unwrap_or_default());
            }
        };
        let store = match TrustStore::load(trusted) {
            Ok(store) => store,
            Err(error) => return FileState::Unusable(error.to_string()),
        };
        match file.trusted_content(&store) {
            Some(keys) => FileState::Trusted {
                keys: Box::new(keys),
                sha256: file.sha256(),
            },
            None => FileState::Untrusted {
                directory: file.directory().to_owned(),
                changed: store.is_other_content_trusted(&file),
            },
        }
    }

    /// The parts of the file that apply under the operator's settings; none unless it is
    /// trusted.
    pub(super) fn apply(&self, settings: &Settings) -> AppliedFile {
        let FileState::Trusted { keys, sha256 } = self else {
            return AppliedFile::default();
        };
        let RepoSettings {
            image,
            setup_command,
            ports,
            env,
            added_domains,
            dropped,
        } = keys.effective_settings(settings);
        AppliedFile {
            additions: Some(FileAdditions {
                sha256: sha256.clone(),
                setup: setup_command.is_some(),
                ports: ports.len(),
                env,
                env_missing: dropped,
                image,
                egress: added_domains,
            }),
            setup_command,
            ports,
        }
    }

    /// Notes for the operator about the file and about what a sandbox uses of it.
    pub(super) fn notes(&self, sandbox: Option<&FileAdditions>) -> Vec<String> {
        let kept = sandbox.map(FileAdditions::summary);
        let now = match (self, sandbox) {
            (FileState::Absent, _) => None,
            (FileState::Trusted { sha256, .. }, Some(applied)) if applied.sha256 == *sha256 => None,
            (FileState::Trusted { .. }, _) => Some(format!(
                "{FILE_NAME} was trusted after this sandbox was created; it applies to new sandboxes"
            )),
            (FileState::Untrusted { directory, changed }, _) => {
                let (why, again) = if *changed {
                    ("has changed since it was trusted", " again")
                } else {
                    ("is not trusted", "")
                };
                Some(format!(
                    "{FILE_NAME} {why} and has no effect; to read and trust it{again}: palisade \
                     trust {}",
                    directory.display()
                ))
            }
            (FileState::Unusable(why), _) => Some(format!("{FILE_NAME} has no effect: {why}")),
        };
        let kept = match (kept, &now) {
            (Some(line), Some(_)) => Some(format!("{line} (when the sandbox was created)")),
            (kept, _) => kept,
        };
        kept.into_iter().chain(now).collect()
    }
}

impl FileAdditions {
    /// The additions in a sandbox's row; none if they cannot be parsed.
    pub(super) fn from_row(row: &SandboxRow) -> Option<Self> {
        let kept = row.repository_file.clone()?;
        serde_json::from_value(kept)
            .inspect_err(|error| {
                tracing::warn!(sandbox = %row.id, %error, "sandbox row has invalid additions from the repository's .palisade.yaml");
            })
            .ok()
    }

    /// The additions in one line.
    fn summary(&self) -> String {
        let mut parts = Vec::new();
        if self.setup {
            parts.push("setup".to_owned());
        }
        match self.ports {
            0 => {}
            1 => parts.push("1 port".to_owned()),
            ports => parts.push(format!("{ports} ports")),
        }
        if !self.env.is_empty() {
            parts.push(format!("env {}", self.env.join(" ")));
        }
        if !self.egress.is_empty() {
            let hosts = self.egress.iter().map(|rule| rule.host.to_string());
            let named: Vec<String> = hosts.take(MAX_HOSTS_NAMED).collect();
            let more = match self.egress.len().saturating_sub(MAX_HOSTS_NAMED) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            parts.push(format!("egress {}{more}", named.join(" ")));
        }
        let mut line = match parts.as_slice() {
            [] => format!("{FILE_NAME}: nothing"),
            parts => format!("{FILE_NAME}: {}", parts.join(", ")),
        };
        if !self.env_missing.is_empty() {
            let names = self.env_missing.join(" ");
            line.push_str(&format!("; not in sandbox.env and not passed on: {names}"));
        }
        if let Some(image) = &self.image {
            line.push_str(&format!("; image {image} is not available in this version"));
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use policy::host::HostPattern;

    use super::*;

    #[test]
    fn additions_are_reported_in_one_line() {
        let rule = |host: &str| DomainRule::allow_all(HostPattern::parse(host).unwrap());
        let all = FileAdditions {
            setup: true,
            ports: 2,
            env: vec!["FOO".to_owned()],
            env_missing: vec!["BAR".to_owned()],
            image: Some("tools.example/a:1".to_owned()),
            egress: vec![rule("a.example")],
            ..FileAdditions::default()
        };
        assert_eq!(
            all.summary(),
            ".palisade.yaml: setup, 2 ports, env FOO, egress a.example; not in sandbox.env and \
             not passed on: BAR; image tools.example/a:1 is not available in this version"
        );
        assert_eq!(
            FileAdditions::default().summary(),
            ".palisade.yaml: nothing"
        );
        let many = FileAdditions {
            egress: (0..7).map(|n| rule(&format!("h{n}.example"))).collect(),
            ..FileAdditions::default()
        };
        assert!(many.summary().ends_with("h4.example and 2 more"));
        let kept = serde_json::to_value(&all).unwrap();
        assert_eq!(serde_json::from_value::<FileAdditions>(kept).unwrap(), all);
    }
}
