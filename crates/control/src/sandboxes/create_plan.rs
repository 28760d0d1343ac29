//! What a request for a sandbox means, by the settings in force.

use std::sync::Arc;
use std::time::Duration;

use config::leaf::PortMapping;
use config::section::egress::DomainRule;
use config::section::sandbox::SetupCommand;
use config::{GATE_PORTS, MAX_CAPTURED_PORTS, Settings};
use policy::registration::{AuthMode, Repo};
use sandbox::contract::{GatePorts, SandboxError, SandboxLimits, SystemConfig};
use sandbox::manager::NewSandbox;
use serde_json::json;

use super::repository::RepositoryInfo;
use super::repository_file::Applied;
use super::{git_redirects, ports};
use crate::body::{CreateBody, PortBody};
use crate::registration_request::read_repos;
use crate::remote_backend;
use crate::reply::ControlError;

/// What a request for a sandbox means.
pub(super) struct CreatePlan {
    pub(super) wanted: NewSandbox,
    pub(super) who: CreateGrants,
    pub(super) setup: Option<Setup>,
}

/// What is known about the set-up command, beside the command itself.
#[derive(Clone, Copy)]
pub(super) struct Setup {
    /// The option or key that it was given by.
    pub(super) origin: &'static str,
    /// How long it may take.
    pub(super) timeout: Duration,
}

/// What a sandbox is to the world.
pub(super) struct CreateGrants {
    pub(super) repos: Vec<Repo>,
    pub(super) auth_mode: AuthMode,
    /// Ports of the host that shall lead inside.
    pub(super) publish: Vec<PortBody>,
    /// Ports that the repository's trusted file wants published.
    pub(super) file_ports: Vec<PortMapping>,
}

impl CreatePlan {
    /// Reads a request. `host` is what was found at `body.repository`.
    pub(super) fn read(
        body: CreateBody,
        host: &RepositoryInfo,
        settings: &Settings,
    ) -> Result<Self, ControlError> {
        let configured = settings.sandbox.backend.as_str();
        check_backend(body.backend.as_deref().unwrap_or(configured))?;
        remote_backend::refuse_its_name(&body.name, settings)?;
        if body
            .repository
            .as_ref()
            .is_some_and(|path| !path.is_absolute())
        {
            return Err(ControlError::Bad(
                "repository must be absolute: the gate has its own directory".to_owned(),
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
        let repos = match body.repos {
            Some(repos) => read_repos(&repos)?,
            None => {
                let origin = host.origin(&settings.git.hosts).into_iter();
                let named = origin.map(|name| Repo {
                    name,
                    max_receive_pack_bytes: None,
                });
                named.collect()
            }
        };
        for one in &body.publish {
            ports::check_host(one.host)?;
            if one.port == 0 {
                return Err(ControlError::Bad(format!(
                    "{} must lead to a port inside, and 0 is none",
                    one.host
                )));
            }
        }
        let Applied {
            setup_command,
            ports: mut file_ports,
            additions,
        } = host.file.apply(settings);
        file_ports.retain(|port| body.publish.iter().all(|one| one.port != port.inside));
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
            return Err(ControlError::Bad("setup_command is empty".to_owned()));
        }
        let added = additions.as_ref().map(|all| all.egress.as_slice());
        let limits = &settings.sandbox.limits;
        Ok(Self {
            setup,
            wanted: NewSandbox {
                name: body.name,
                repository: body.repository,
                depth: body.depth,
                dirty: body.dirty,
                environment: git_redirects::environment(&settings.git, &host.remotes),
                ports: listened_on(settings, added.unwrap_or_default())?,
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
                setup_command,
                progress: Arc::default(),
            },
            who: CreateGrants {
                repos,
                auth_mode,
                publish: body.publish,
                file_ports,
            },
        })
    }
}

/// Thousandths of a processor, one at least.
fn millicpus(cpus: f64) -> u32 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "from a float the cast saturates"
    )]
    let thousandths = (cpus * 1000.0).ceil() as u32;
    thousandths.max(1)
}

/// Whether there is such a backend; if not, which there is and what to do.
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
                "Unknown backend '{}': this gate has 'namespace'; leave --backend out, or set \
                 sandbox.backend to it",
                wanted.escape_default()
            )));
        }
    };
    let reason = "this version of palisade has 'namespace' only; leave --backend out, or set \
                  sandbox.backend to namespace"
        .to_owned();
    let unavailable = SandboxError::Unavailable { backend, reason };
    Err(ControlError::Sandbox(unavailable.into()))
}

/// The proxy, git and DNS, and what is served for programs that know of none of them.
fn listened_on(settings: &Settings, added: &[DomainRule]) -> Result<GatePorts, ControlError> {
    let captured = settings.captured_ports(added);
    if captured.len() > MAX_CAPTURED_PORTS {
        return Err(ControlError::Bad(format!(
            "the operator's settings and .palisade.yaml name {} ports to capture, and a sandbox \
             captures at most {MAX_CAPTURED_PORTS}; name fewer",
            captured.len()
        )));
    }
    Ok(GatePorts {
        tcp: captured.into_iter().chain(GATE_PORTS).collect(),
        udp: vec![53],
    })
}
