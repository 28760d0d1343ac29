//! What a request for a sandbox means, by the settings in force.

use std::sync::Arc;

use config::{GATE_PORTS, Settings};
use policy::registration::{AuthMode, Repo, RepoName};
use sandbox::contract::{Limits, Ports, SandboxError, System};
use sandbox::manager::Wanted;

use super::body::{CreateBody, PortBody};
use super::repository::HostRepository;
use super::{mirrored, ports};
use crate::elsewhere;
use crate::reply::ControlError;

/// What a request for a sandbox means.
pub(super) struct Wish {
    pub(super) wanted: Wanted,
    pub(super) who: Standing,
}

/// What a sandbox is to the world.
pub(super) struct Standing {
    pub(super) repos: Vec<Repo>,
    pub(super) auth_mode: AuthMode,
    /// Ports of the host that shall lead inside.
    pub(super) publish: Vec<PortBody>,
}

impl Wish {
    /// Reads a request. `host` is what was found at `body.repository`.
    pub(super) fn read(
        body: CreateBody,
        host: &HostRepository,
        settings: &Settings,
    ) -> Result<Self, ControlError> {
        let configured = settings.sandbox.backend.as_str();
        check_backend(body.backend.as_deref().unwrap_or(configured))?;
        elsewhere::refuse_its_name(&body.name, settings)?;
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
            Some(names) => names
                .iter()
                .map(|name| {
                    RepoName::parse(name).map_err(|error| {
                        ControlError::Bad(format!(
                            "Invalid repository '{}': {error}",
                            name.escape_default()
                        ))
                    })
                })
                .collect::<Result<Vec<_>, _>>()?,
            None => host.origin(&settings.git.hosts).into_iter().collect(),
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
        let limits = &settings.sandbox.limits;
        Ok(Self {
            wanted: Wanted {
                name: body.name,
                repository: body.repository,
                depth: body.depth,
                dirty: body.dirty,
                environment: mirrored::environment(&settings.git, &host.remotes),
                ports: listened_on(settings),
                limits: Limits {
                    memory: limits.memory,
                    pids: limits.pids,
                    millicpus: limits.cpus.map(millicpus),
                    disk: limits.disk,
                },
                system: System {
                    rootfs: settings.sandbox.rootfs.clone(),
                    host_paths: settings.sandbox.host_paths.clone(),
                    root: body.root,
                    nested: body.nested,
                },
                trust: None,
                progress: Arc::default(),
            },
            who: Standing {
                repos: repos
                    .into_iter()
                    .map(|name| Repo {
                        name,
                        max_receive_pack_bytes: None,
                    })
                    .collect(),
                auth_mode,
                publish: body.publish,
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
                SandboxError::Elsewhere("made").into(),
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
fn listened_on(settings: &Settings) -> Ports {
    let captured = settings.captured_ports(&[]).into_iter();
    Ports {
        tcp: captured.chain(GATE_PORTS).collect(),
        udp: vec![53],
    }
}
