//! `palisade workbench`: serves the coding tools over a socket, beside the agent's files.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::Args;
use config::Settings;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use workbench::http_service::{BearerAuth, WorkbenchService};
use workbench::root::{PathScope, WorkspaceRoot};
use workbench::serve::{self, WorkbenchListener};
use workbench::tools::WorkspaceTools;
use workbench::tools::bash::GuardProgram;

use crate::cli::Global;
use crate::exit::{CliError, CliExit};
use crate::process_guard::GUARD_ARGUMENT;
use crate::telemetry::{LogSink, Telemetry};
use crate::{child_reaper, output};

/// The socket path that clients use by default.
const DEFAULT_SOCKET: &str = "/var/run/sidecar/sidecar.sock";

const EXAMPLES: &str = "\
Serves GET /health, and POST /bash /read /write /edit /ls /find /grep with JSON. Every
path is resolved below the workspace. Commands run in the workspace and end with their
client, their timeout or this process. Every client of the socket can run commands: restrict
access with its mode or a token. See docs/workbench.md.

Examples:
  palisade workbench --workspace-root . --socket-path /tmp/w.sock
  curl --unix-socket /tmp/w.sock -H 'content-type: application/json' \\
       -d '{\"command\":\"make test\"}' http://localhost/bash
  TCP_HOST=127.0.0.1 TCP_PORT=8731 SIDECAR_AUTH_TOKEN=… SIDECAR_REQUIRE_AUTH=1 palisade workbench";

/// Serve the coding tools (bash, read, write, edit, ls, find, grep) over a socket.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct WorkbenchArgs {
    /// The Unix socket to listen on; a stale one is replaced
    /// [default: /var/run/sidecar/sidecar.sock, unless only TCP is configured]
    #[arg(long, value_name = "SOCK", env = "SOCKET_PATH")]
    socket_path: Option<PathBuf>,
    /// Access mode of the Unix socket, in octal
    #[arg(long, value_name = "MODE", default_value = "600", value_parser = parse_mode)]
    socket_mode: u32,
    /// The directory that the tools work in
    #[arg(
        long,
        value_name = "DIR",
        env = "WORKSPACE_ROOT",
        default_value = "/workspace"
    )]
    workspace_root: PathBuf,
    /// The address to listen on; needs --tcp-port
    #[arg(long, value_name = "IP", env = "TCP_HOST")]
    tcp_host: Option<String>,
    /// The port to listen on; needs --tcp-host
    #[arg(long, value_name = "PORT", env = "TCP_PORT")]
    tcp_port: Option<String>,
    /// Bearer token of clients. Every user of the machine can read a flag; prefer the variable
    #[arg(
        long,
        value_name = "TOKEN",
        env = "SIDECAR_AUTH_TOKEN",
        hide_env_values = true
    )]
    auth_token: Option<String>,
    /// Require a token
    #[arg(long, value_name = "BOOL", env = "SIDECAR_REQUIRE_AUTH", num_args = 0..=1,
        require_equals = true, default_value = "false", default_missing_value = "true",
        value_parser = parse_bool)]
    require_auth: bool,
    /// Serve the listening socket on stdin; a sandbox's init starts the workbench with this option
    #[arg(long, hide = true)]
    inherited: bool,
    /// Allow paths outside the workspace, where the container is the only boundary
    #[arg(long, value_name = "BOOL", env = "SIDECAR_ALLOW_OUTSIDE_WORKSPACE_ROOT",
        num_args = 0..=1, require_equals = true, default_value = "false",
        default_missing_value = "true", value_parser = parse_bool)]
    allow_outside_workspace_root: bool,
}

fn parse_mode(text: &str) -> Result<u32, String> {
    u32::from_str_radix(text, 8)
        .ok()
        .filter(|mode| *mode <= 0o777)
        .ok_or_else(|| "not an octal mode like 600 or 660".to_owned())
}

/// Parses a boolean, in the spellings that environment variables use; empty means false.
fn parse_bool(text: &str) -> Result<bool, String> {
    match text.trim().to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "on" => Ok(true),
        "" | "0" | "false" | "no" | "off" => Ok(false),
        _ => Err("expected true or false".to_owned()),
    }
}

pub fn run(args: &WorkbenchArgs, global: &Global) -> Result<CliExit> {
    let options = WorkbenchOptions::read(args)?;
    // The commands that the workbench runs have the same uid and must not read its memory.
    nix::sys::prctl::set_dumpable(false).context("cannot forbid core dumps")?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("workbench")
        .build()
        .context("cannot start the runtime")?;
    let telemetry = {
        let _runtime_guard = runtime.enter();
        Telemetry::start(&Settings::default(), global.verbose, LogSink::Stderr)?
    };
    let served = runtime.block_on(serve_tools(options, global));
    telemetry.finish();
    // Blocking reads for clients that disconnected need not finish.
    runtime.shutdown_background();
    served
}

/// Validated options.
struct WorkbenchOptions {
    inherited: bool,
    socket: Option<(PathBuf, u32)>,
    tcp: Option<(IpAddr, u16)>,
    root: PathBuf,
    auth: BearerAuth,
    scope: PathScope,
}

impl WorkbenchOptions {
    fn read(args: &WorkbenchArgs) -> Result<Self> {
        if args.inherited {
            // The agent controls the environment in a sandbox, so variables are ignored.
            return Ok(Self {
                inherited: true,
                socket: None,
                tcp: None,
                root: args.workspace_root.clone(),
                auth: BearerAuth::default(),
                scope: PathScope::Workspace,
            });
        }
        let usage = |why: &str| CliError::new(CliExit::Usage, why.to_owned());
        let non_empty = |text: &Option<String>| text.clone().filter(|text| !text.trim().is_empty());
        let tcp = match (non_empty(&args.tcp_host), non_empty(&args.tcp_port)) {
            (None, None) => None,
            (Some(host), Some(port)) => {
                let port = port.trim().parse();
                let port = port.map_err(|_| usage("TCP_PORT is not a port number"))?;
                Some((
                    address(&host).ok_or_else(|| usage("TCP_HOST is not an IP address"))?,
                    port,
                ))
            }
            _ => {
                let why = "TCP_HOST and TCP_PORT belong together: set both or neither";
                return Err(usage(why).into());
            }
        };
        let socket = args
            .socket_path
            .clone()
            .filter(|path| !path.as_os_str().is_empty())
            .or_else(|| tcp.is_none().then(|| DEFAULT_SOCKET.into()))
            .map(|path| (path, args.socket_mode));
        let token = non_empty(&args.auth_token);
        if args.require_auth && token.is_none() {
            let why = "SIDECAR_REQUIRE_AUTH is set but there is no token; set SIDECAR_AUTH_TOKEN";
            return Err(usage(why).into());
        }
        let scope = if args.allow_outside_workspace_root {
            PathScope::Everywhere
        } else {
            PathScope::Workspace
        };
        Ok(Self {
            inherited: false,
            socket,
            tcp,
            root: args.workspace_root.clone(),
            auth: BearerAuth {
                token,
                required: args.require_auth,
            },
            scope,
        })
    }
}

/// Parses an IP address or `localhost`; the static binary has no resolver.
fn address(host: &str) -> Option<IpAddr> {
    match host.trim() {
        "localhost" => Some(IpAddr::from([127, 0, 0, 1])),
        host => host.trim_matches(['[', ']']).parse().ok(),
    }
}

async fn serve_tools(options: WorkbenchOptions, global: &Global) -> Result<CliExit> {
    let stop = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for SIGINT")?;
    let root = open_root(&options.root, options.scope)?;
    let guard_program = GuardProgram {
        argv: vec!["/proc/self/exe".into(), GUARD_ARGUMENT.into()],
        stop: stop.clone(),
    };
    let is_open = options.auth.token.is_none();
    let service = Arc::new(WorkbenchService::new(
        WorkspaceTools::new(root, guard_program),
        options.auth,
    ));
    let mut listeners = Vec::new();
    if options.inherited {
        listeners.push(WorkbenchListener::from_stdin().context("stdin is not a listening socket")?);
    }
    if let Some((path, mode)) = &options.socket {
        listeners.push(WorkbenchListener::unix(path, *mode).await?);
    }
    if let Some((host, port)) = options.tcp {
        listeners.push(WorkbenchListener::tcp(&host.to_string(), port).await?);
        if is_open && !host.is_loopback() {
            output::print_message(
                "palisade: every client that reaches this port can run commands; set a token",
            );
        }
    }
    let addresses: Vec<String> = listeners.iter().map(WorkbenchListener::address).collect();
    if global.json {
        output::print_json(&json!({ "status": "listening", "addresses": addresses }))?;
    } else {
        output::print_message(&format!("workbench listening on {}", addresses.join(", ")));
    }
    let serving = serve_all(listeners, service, stop.clone());
    tokio::pin!(serving);
    tokio::select! {
        () = &mut serving => {}
        () = child_reaper::reap_orphans() => {}
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    stop.cancel();
    serving.await;
    Ok(CliExit::Ok)
}

fn open_root(path: &Path, scope: PathScope) -> Result<WorkspaceRoot> {
    WorkspaceRoot::open(path, scope)
        .with_context(|| format!("cannot open the workspace {}", path.display()))
}

async fn serve_all(
    listeners: Vec<WorkbenchListener>,
    service: Arc<WorkbenchService>,
    stop: CancellationToken,
) {
    let all = TaskTracker::new();
    for listener in listeners {
        all.spawn(serve::serve(listener, Arc::clone(&service), stop.clone()));
    }
    all.close();
    all.wait().await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: WorkbenchArgs,
    }

    fn options(words: &[&str]) -> Result<WorkbenchOptions, String> {
        let words = [&["workbench"], words].concat();
        let line = Line::try_parse_from(words).map_err(|error| error.to_string())?;
        WorkbenchOptions::read(&line.args).map_err(|error| error.to_string())
    }

    #[test]
    fn default_without_tcp_is_the_unix_socket() {
        let usual = options(&[]).unwrap();
        assert_eq!(usual.socket, Some((DEFAULT_SOCKET.into(), 0o600)));
        assert_eq!(usual.tcp, None);
        assert_eq!(usual.root, Path::new("/workspace"));
        assert_eq!(usual.scope, PathScope::Workspace);
        let tcp = ["--tcp-host", "localhost", "--tcp-port", "80"];
        let only = options(&tcp).unwrap();
        assert_eq!(only.socket, None);
        assert_eq!(only.tcp, Some((IpAddr::from([127, 0, 0, 1]), 80)));
        let both = options(&[&tcp[..], &["--socket-path", "/s", "--socket-mode", "660"]].concat());
        assert_eq!(both.unwrap().socket, Some(("/s".into(), 0o660)));
    }

    #[test]
    fn conflicting_options_are_refused() {
        for words in [
            &["--tcp-host", "127.0.0.1"][..],
            &["--tcp-port", "80"],
            &["--tcp-host", "", "--tcp-port", "80"],
            &["--tcp-host", "example.com", "--tcp-port", "80"],
            &["--tcp-host", "::1", "--tcp-port", "80000"],
            &["--require-auth"],
            &["--require-auth=true", "--auth-token", " "],
            &["--require-auth=perhaps"],
            &["--socket-mode", "999"],
        ] {
            assert!(options(words).is_err(), "{words:?}");
        }
        assert!(options(&["--require-auth", "--auth-token", "x"]).is_ok());
        assert!(options(&["--require-auth=0"]).is_ok());
    }
}
