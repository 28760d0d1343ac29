//! A repository's own `.palisade.yaml`, which has no effect until the operator trusts it.
//!
//! The file comes with a clone, so the author of the repository wrote it. It is read without
//! following links, variables in it are not expanded, and its content is only available through a
//! [`TrustStore`] that trusts this exact content.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::file::{self, FileReadError, Links, REPOSITORY_LIMIT};
use crate::layer::Layer;
use crate::leaf::{self, EnvName, Image, PortMapping, Text};
use crate::problem::{Problem, Problems};
use crate::schema::FileSchema;
use crate::section::egress::DomainRule;
use crate::section::sandbox::SetupCommand;
use crate::settings::Settings;
use crate::trust::{TrustError, TrustStore};
use crate::unavailable;
use crate::version::Version;

/// The name of the file.
pub const FILE_NAME: &str = ".palisade.yaml";

/// The schema of the file.
pub(crate) static REPOSITORY: LazyLock<FileSchema> =
    LazyLock::new(|| FileSchema::for_type::<RepoKeys>(unavailable::REPOSITORY, &[]));

/// The keys a repository may set.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[schemars(title = ".palisade.yaml")]
#[serde(default, deny_unknown_fields)]
pub(crate) struct RepoKeys {
    /// Version of the file format.
    version: Version,
    /// Image of Docker sandboxes for this repository. Not available in this version: it is reported
    /// and has no effect.
    #[schemars(with = "Option<Text<Image>>")]
    image: Option<String>,
    /// A command that runs once in a new sandbox, instead of `sandbox.setup_command`: a shell
    /// command line, or a list of a program and its arguments.
    setup_command: Option<SetupCommand>,
    /// Ports to publish on the host's loopback: a port, or HOST:INSIDE. If the host's port is in
    /// use, another one is chosen.
    #[serde(with = "leaf::list")]
    #[schemars(with = "Vec<Text<PortMapping>>", inner(range(min = 1)))]
    ports: Vec<PortMapping>,
    /// Names of environment variables to pass into the sandbox. The operator's `sandbox.env` must
    /// list them too; others are reported.
    #[schemars(with = "Vec<Text<EnvName>>")]
    env: Vec<String>,
    /// Hosts that sandboxes of this repository may also reach.
    egress: RepoEgress,
}

/// Hosts that sandboxes of a repository may also reach.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct RepoEgress {
    /// Hosts, as in `egress.domains`. Sandboxes of this repository may reach them in addition to
    /// the hosts that the operator allows; an operator's `deny` still applies.
    domains: Vec<DomainRule>,
}

/// A `.palisade.yaml` that was read and is valid, but is not trusted yet.
#[derive(Clone)]
pub struct RepoFile {
    directory: PathBuf,
    text: String,
    digest: [u8; 32],
    keys: RepoKeys,
}

/// Shows the path, not the content, which is untrusted.
impl std::fmt::Debug for RepoFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut parts = f.debug_struct("RepoFile");
        parts.field("directory", &self.directory);
        parts.field("bytes", &self.text.len());
        parts.finish_non_exhaustive()
    }
}

impl RepoFile {
    /// Reads the file of the repository in `directory`; None if there is no file.
    pub fn load(directory: &Path) -> Result<Option<Self>, Problems> {
        let path = directory.join(FILE_NAME);
        let failed = |why: String| Problems::from(Problem::with_file(&path, why));
        let bytes = match file::read(&path, REPOSITORY_LIMIT, Links::Refuse) {
            Ok(bytes) => bytes,
            Err(FileReadError::Missing) => return Ok(None),
            Err(why) => return Err(failed(format!("cannot be read: {why}"))),
        };
        let canonical = std::fs::canonicalize(directory).map_err(|error| {
            failed(format!(
                "its directory cannot be resolved: {}",
                error.kind()
            ))
        })?;
        let mut problems = Vec::new();
        let layer = Layer::<RepoKeys>::read(&REPOSITORY, &path, &bytes, None, &mut problems);
        let digest = Sha256::digest(&bytes).into();
        match (layer, String::from_utf8(bytes)) {
            (Some(layer), Ok(text)) if problems.is_empty() => Ok(Some(Self {
                directory: canonical,
                text,
                digest,
                keys: layer.value,
            })),
            _ => Err(problems.into()),
        }
    }

    /// The repository's directory, canonical.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The text, to be shown before it is trusted. It is untrusted: remove terminal control
    /// characters first.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// SHA-256 of the exact content.
    pub fn digest(&self) -> [u8; 32] {
        self.digest
    }

    /// The SHA-256 in hexadecimal.
    pub fn sha256(&self) -> String {
        self.digest
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }

    /// The content, if the operator trusts exactly this content.
    pub fn trusted_content(&self, store: &TrustStore) -> Option<TrustedRepoFile> {
        store.is_trusted(self).then(|| TrustedRepoFile {
            keys: self.keys.clone(),
        })
    }
}

impl TrustStore {
    /// Whether exactly this content, in exactly this directory, is trusted.
    pub fn is_trusted(&self, file: &RepoFile) -> bool {
        self.has(&file.directory, file.digest)
    }

    /// Whether another content of this file was trusted.
    pub fn is_other_content_trusted(&self, file: &RepoFile) -> bool {
        self.has_other(&file.directory, file.digest)
    }

    /// Trusts this content instead of the one that was trusted in that directory, and writes the
    /// list.
    pub fn trust(&mut self, file: &RepoFile) -> Result<(), TrustError> {
        self.add(&file.directory, file.digest)
    }
}

/// A `.palisade.yaml` whose exact content the operator trusts.
#[derive(Clone, Debug)]
pub struct TrustedRepoFile {
    keys: RepoKeys,
}

/// The settings of a trusted file that take effect.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RepoSettings {
    /// The image, instead of `sandbox.image`. Without effect in this version.
    pub image: Option<String>,
    /// The set-up command, instead of `sandbox.setup_command`.
    pub setup_command: Option<SetupCommand>,
    /// Ports to publish.
    pub ports: Vec<PortMapping>,
    /// Names of environment variables to pass into the sandbox. Each is in the operator's
    /// `sandbox.env` too.
    pub env: Vec<String>,
    /// Hosts that the sandbox may reach in addition to the hosts that the operator allows.
    pub added_domains: Vec<DomainRule>,
    /// Names of environment variables that the file lists and that are not passed.
    pub dropped: Vec<String>,
}

impl TrustedRepoFile {
    /// The settings that take effect under the operator's settings.
    pub fn effective_settings(&self, settings: &Settings) -> RepoSettings {
        let allowed = |name: &String| settings.sandbox.env.contains(name);
        let (env, dropped) = self.keys.env.iter().cloned().partition(allowed);
        RepoSettings {
            image: self.keys.image.clone(),
            setup_command: self.keys.setup_command.clone(),
            ports: self.keys.ports.clone(),
            env,
            added_domains: self.keys.egress.domains.clone(),
            dropped,
        }
    }
}

/// See [`crate::fuzz_check`].
pub(crate) fn fuzz_check(bytes: &[u8]) {
    let path = Path::new(FILE_NAME);
    Layer::<RepoKeys>::read(&REPOSITORY, path, bytes, None, &mut Vec::new());
}
