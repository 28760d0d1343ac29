//! What a request for a sandbox means, by the settings in force.

use std::path::Path;

use config::Settings;
use policy::registration::{AuthMode, Repo, RepoName};
use sandbox::contract::{Limits, Ports, SandboxError, System};
use sandbox::git::home::Home;
use sandbox::manager::Wanted;

use super::body::CreateBody;
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
}

impl Wish {
    pub(super) fn read(body: CreateBody, settings: &Settings) -> Result<Self, ControlError> {
        let configured = settings.sandbox.backend.as_str();
        let backend = body.backend.as_deref().unwrap_or(configured);
        if backend != "namespace" {
            return Err(ControlError::Sandbox(
                SandboxError::Unavailable {
                    backend: "other",
                    reason: format!("'{backend}' does not exist yet; use namespace"),
                }
                .into(),
            ));
        }
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
            None => body
                .repository
                .as_deref()
                .and_then(|path| origin(path, settings))
                .into_iter()
                .collect(),
        };
        let limits = &settings.sandbox.limits;
        Ok(Self {
            wanted: Wanted {
                name: body.name,
                repository: body.repository,
                depth: body.depth,
                dirty: body.dirty,
                environment: Vec::new(),
                ports: ports(settings),
                limits: Limits {
                    memory: limits.memory,
                    pids: limits.pids,
                    disk: limits.disk,
                },
                system: System {
                    rootfs: settings.sandbox.rootfs.clone(),
                    host_paths: settings.sandbox.host_paths.clone(),
                    root: body.root,
                    nested: body.nested,
                },
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
            },
        })
    }
}

/// The repository that `origin` points to, where that is on a git host.
fn origin(path: &Path, settings: &Settings) -> Option<RepoName> {
    let home = Home::discover(path).ok()?;
    let (host, name) = home.origin()?;
    let known = settings
        .git
        .hosts
        .iter()
        .any(|known| known.to_string().eq_ignore_ascii_case(&host));
    known.then(|| RepoName::parse(&name).ok()).flatten()
}

/// The proxy and DNS, and what is served for programs that know of neither.
fn ports(settings: &Settings) -> Ports {
    let mut tcp = settings.egress.transparent_ports.clone();
    for own in [8080, 53] {
        if !tcp.contains(&own) {
            tcp.push(own);
        }
    }
    Ports { tcp, udp: vec![53] }
}
