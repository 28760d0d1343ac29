//! Plan for a new sandbox: the create request combined with the settings in force.

use std::sync::Arc;
use std::time::Duration;

use config::leaf::PortMapping;
use config::section::egress::DomainRule;
use config::section::sandbox::SetupCommand;
use config::{GATE_PORTS, MAX_CAPTURED_PORTS, Settings};
use credentials::service::CredentialService;
use policy::registration::{AuthMode, Repo};
use sandbox::contract::{GatePorts, SandboxError, SandboxLimits, SystemConfig};
use sandbox::manager::NewSandbox;
use serde_json::json;

use super::egress_additions::EgressAdditions;
use super::repository::RepositoryInfo;
use super::repository_file::AppliedFile;
use super::{git_redirects, ports};
use crate::body::{CreateBody, PortBody};
use crate::credential_grants::initial_grants;
use crate::registration_request::read_repos;
use crate::remote_backend;
use crate::reply::ControlError;

/// A validated create request, with defaults from the settings.
pub(super) struct CreatePlan {
    pub(super) new_sandbox: NewSandbox,
    pub(super) grants: CreateGrants,
    pub(super) setup: Option<Setup>,
}

/// Origin and timeout of the set-up command.
#[derive(Clone, Copy)]
pub(super) struct Setup {
    /// The option or key that names the command.
    pub(super) origin: &'static str,
    /// Timeout of the command.
    pub(super) timeout: Duration,
}

/// Repositories, push identity, credentials and published ports of a new sandbox.
pub(super) struct CreateGrants {
    pub(super) repos: Vec<Repo>,
    pub(super) auth_mode: AuthMode,
    /// Names of the credentials.
    pub(super) credentials: Vec<String>,
    /// Ports to publish on the host.
    pub(super) publish: Vec<PortBody>,
    /// Ports that the repository's trusted file publishes.
    pub(super) file_ports: Vec<PortMapping>,
}

impl CreatePlan {
    /// Validates a request. `repository` describes the repository at `body.repository`.
    pub(super) fn read(
        body: CreateBody,
        repository: &RepositoryInfo,
        settings: &Settings,
        service: &CredentialService,
    ) -> Result<Self, ControlError> {
        let configured = settings.sandbox.backend.as_str();
        check_backend(body.backend.as_deref().unwrap_or(configured))?;
        remote_backend::refuse_remote_name(&body.name, settings)?;
        if body
            .repository
            .as_ref()
            .is_some_and(|path| !path.is_absolute())
        {
            return Err(ControlError::Bad(
                "repository must be an absolute path: the gate has its own working directory"
                    .to_owned(),
            ));
        }
        let auth_mode = match body.auth_mode.as_deref() {
            None | Some("user") => AuthMode::User,
            Some("bot") => AuthMode::Bot,
            Some(_) => {
                return Err(ControlError::Bad(
                    "auth_mode must be 'user' or 'bot'".to_owned(),
                ));
            }
        };
        let repos = match &body.repos {
            Some(repos) => read_repos(repos)?,
            None => {
                let origin = repository.origin(&settings.git.hosts).into_iter();
                let named = origin.map(|name| Repo {
                    name,
                    max_receive_pack_bytes: None,
                });
                named.collect()
            }
        };
        for published in &body.publish {
            ports::check_host(published.host)?;
            if published.port == 0 {
                return Err(ControlError::Bad(format!(
                    "cannot publish {}: the port in the sandbox must not be 0",
                    published.host
                )));
            }
        }
        let egress = EgressAdditions::plan(&body, repository, &repos, settings)?;
        let AppliedFile {
            setup_command,
            ports: mut file_ports,
            additions,
        } = repository.file.apply(settings);
        file_ports.retain(|port| {
            let mut published = body.publish.iter();
            published.all(|published| published.port != port.inside)
        });
        let configured = settings.sandbox.setup_command.as_ref();
        let setup = [
            ("--setup-command", body.setup_command),
            (
                "setup_command of .palisade.yaml",
                setup_command.map(|command| command.argv()),
            ),
            ("sandbox.setup_command", configured.map(SetupCommand::argv)),
        ];
        let setup = setup.into_iter().find_map(|(origin, argv)| {
            let timeout = settings.sandbox.setup_timeout;
            Some((Setup { origin, timeout }, argv?))
        });
        let (setup, setup_command) = setup.unzip();
        if setup_command.as_ref().is_some_and(Vec::is_empty) {
            return Err(ControlError::Bad(
                "setup_command must not be empty".to_owned(),
            ));
        }
        let added = additions.as_ref().map(|all| all.egress.as_slice());
        let limits = &settings.sandbox.limits;
        Ok(Self {
            setup,
            new_sandbox: NewSandbox {
                name: body.name,
                repository: body.repository,
                depth: body.depth,
                dirty: body.dirty,
                environment: git_redirects::environment(&settings.git, &repository.remotes),
                ports: gate_ports(settings, added.unwrap_or_default())?,
                limits: SandboxLimits {
                    memory: limits.memory,
                    pids: limits.pids,
                    millicpus: limits.cpus.map(millicpus),
                    disk: limits.disk,
                },
                system: SystemConfig {
                    rootfs: settings.sandbox.rootfs.clone(),
                    host_paths: settings.sandbox.host_paths.clone(),
                    root: body.root,
                    nested: body.nested,
                },
                trust: None,
                repository_file: additions.map(|all| json!(all)),
                egress: Some(json!(egress)),
                setup_command,
                progress: Arc::default(),
            },
            grants: CreateGrants {
                repos,
                auth_mode,
                credentials: initial_grants(settings, service, body.credentials)?,
                publish: body.publish,
                file_ports,
            },
        })
    }
}

/// Converts a number of CPUs to thousandths of a CPU; the result is at least 1.
fn millicpus(cpus: f64) -> u32 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a cast from a float saturates"
    )]
    let thousandths = (cpus * 1000.0).ceil() as u32;
    thousandths.max(1)
}

/// Refuses an unknown or unavailable backend.
fn check_backend(wanted: &str) -> Result<(), ControlError> {
    let backend = match wanted {
        "namespace" => return Ok(()),
        "docker" => "docker",
        "remote" => {
            return Err(ControlError::Sandbox(
                SandboxError::ManagedExternally("made").into(),
            ));
        }
        _ => {
            return Err(ControlError::Bad(format!(
                "Unknown backend '{}': this gate has 'namespace' only; omit --backend, or set \
                 sandbox.backend to namespace",
                wanted.escape_default()
            )));
        }
    };
    let reason = "this version of palisade has 'namespace' only; omit --backend, or set \
                  sandbox.backend to namespace"
        .to_owned();
    let unavailable = SandboxError::Unavailable { backend, reason };
    Err(ControlError::Sandbox(unavailable.into()))
}

/// The ports on which the gate listens in a sandbox: proxy, git and DNS, and captured ports.
fn gate_ports(settings: &Settings, added: &[DomainRule]) -> Result<GatePorts, ControlError> {
    let captured = settings.captured_ports(added);
    if captured.len() > MAX_CAPTURED_PORTS {
        return Err(ControlError::Bad(format!(
            "too many ports in egress.domains and .palisade.yaml: {}, and a sandbox captures at \
             most {MAX_CAPTURED_PORTS}; remove some",
            captured.len()
        )));
    }
    Ok(GatePorts {
        tcp: captured.into_iter().chain(GATE_PORTS).collect(),
        udp: vec![53],
    })
}
