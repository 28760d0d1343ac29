//! `palisade mcp`: serves sandboxes and their tools over stdio to an MCP client of the operator.

mod failure;
mod gate_sandbox_service;
mod install;
mod remote_container;
mod tools;

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use config::section::logging::LogLevel;
use mcp::agents::AgentServer;

use crate::cli::Global;
use crate::exit::{CliError, CliExit};
use crate::telemetry::{LogSink, Telemetry};
use gate_sandbox_service::GateSandboxService;

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(after_help = "\
Your client starts this command itself and uses MCP over its stdin and stdout; the command ends
when the client disconnects. Logs go to stderr. The gate is started when it is first needed.

Examples:
  palisade mcp install claude                 add it to Claude Code
  claude mcp add palisade -- palisade mcp     the same by hand

An agent can make sandboxes of this repository, work in them with read, write, edit, patch, bash,
ls, glob and grep, and see the diff. Each change is a commit on the sandbox's branch; your own
files and branches stay unchanged until you run palisade merge. An agent cannot choose what a
sandbox may reach, nor its push identity: palisade.yaml sets these.")]
pub struct McpArgs {
    /// Directory in the repository to work on [default: the client's working directory]
    #[arg(long, short = 'C', value_name = "DIR")]
    pub directory: Option<PathBuf>,
    #[command(subcommand)]
    pub command: Option<McpCommand>,
}

#[derive(Debug, Subcommand)]
pub enum McpCommand {
    /// Add this server to an MCP client's configuration
    Install(install::InstallArgs),
}

pub fn run(args: &McpArgs, global: &Global) -> Result<CliExit> {
    match &args.command {
        Some(McpCommand::Install(args)) => install::run(args, global),
        None => serve(args, global).context("mcp failed"),
    }
}

fn serve(args: &McpArgs, global: &Global) -> Result<CliExit> {
    let paths = global.paths()?;
    // The paths are relative to the current directory, which changes below.
    let mut absolute = global.clone();
    for path in [
        &mut absolute.config,
        &mut absolute.state_dir,
        &mut absolute.control,
    ] {
        *path = path.as_ref().map(std::path::absolute).transpose()?;
    }
    if let Some(directory) = &args.directory {
        std::env::set_current_dir(directory).map_err(|error| {
            let message = format!("cannot enter '{}': {error}", directory.display());
            CliError::new(CliExit::Usage, message)
        })?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let served = runtime.block_on(async {
        let mut settings = config::Settings::default();
        // Clients show stderr output as errors.
        settings.logging.level = LogLevel::Warn;
        let telemetry = Telemetry::start(&settings, global.verbose, LogSink::Stderr)?;
        let service = GateSandboxService::new(absolute, paths);
        let served = AgentServer::new(Arc::new(service)).serve_stdio().await;
        telemetry.finish();
        served.map(|()| CliExit::Ok).map_err(anyhow::Error::from)
    });
    // Without this, a pending read of stdin keeps the process alive.
    runtime.shutdown_background();
    served
}
