//! The command line. Every flag is defined once: in this file, or in the file of its command.

mod agents;
mod audit;
mod bridge;
mod ca;
mod checkpoints;
mod config_command;
mod credentials;
mod docs;
mod doctor;
mod enter;
mod files;
mod gate_command;
mod git_check;
mod grant_command;
mod groups;
mod import_command;
mod mcp_command;
mod merge_commands;
mod outcome;
mod policy_command;
mod ports;
mod preset_command;
mod registry;
mod remote;
mod repo_limit;
mod reuse;
mod sandbox_lookup;
mod sandboxes;
mod summary;
mod tool;
mod trust;
mod why;
mod workbench;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use config::grants::GrantAction;

use crate::exit::{CliError, CliExit};
use crate::paths::{PathOptions, Paths};
use bridge::standalone::{POLIS_BRIDGE, PolisBridge};

/// Run a coding agent in a sandbox whose only way out is a gate you control.
///
/// The gate is the one process that holds your keys, your policy and the audit log. It
/// starts by itself when a command needs it, and lives in one state directory.
#[derive(Debug, Parser)]
#[command(name = "palisade", version, arg_required_else_help = true, after_help = EXAMPLES)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

const EXAMPLES: &str = "\
Getting started:
  palisade run -- <agent>       run an agent on this repository in its own sandbox
  palisade diff|merge NAME      review its work, and merge it
  palisade list                 list sandboxes and their state
  palisade doctor               check this machine, and show how to fix what is missing
  palisade config init          write a starter palisade.yaml that explains every key
  palisade audit tail           watch decisions live

Exit codes: 0 success, 1 failure, 2 wrong usage or configuration, 3 not found, 4 already
exists or wrong state (active, paused, unmerged), 5 gate not running, 6 backend
unavailable, 7 denied, 124 timeout; run, exec and shell: the exit code of the command.";

/// Flags of every command.
#[derive(Clone, Debug, Args)]
pub struct Global {
    /// The operator's configuration file [default: ~/.config/palisade/palisade.yaml]
    #[arg(long, global = true, value_name = "FILE", env = "PALISADE_CONFIG")]
    pub config: Option<PathBuf>,
    /// Where the gate keeps its database, lock and log [default: ~/.local/state/palisade]
    #[arg(long, global = true, value_name = "DIR", env = "PALISADE_STATE_DIR")]
    pub state_dir: Option<PathBuf>,
    /// The gate's control socket [default: control.sock in a given --state-dir, else in
    /// $XDG_RUNTIME_DIR/palisade]
    #[arg(long, global = true, value_name = "SOCK", env = "PALISADE_CONTROL")]
    pub control: Option<PathBuf>,
    /// Print JSON for scripts
    #[arg(long, global = true)]
    pub json: bool,
    /// Log more to stderr; repeat for trace level
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

impl Global {
    /// The paths that these options and the environment select.
    pub fn paths(&self) -> Result<Paths> {
        let options = PathOptions {
            config: self.config.clone(),
            state_dir: self.state_dir.clone(),
            control: self.control.clone(),
        };
        Paths::resolve(&options, |name| std::env::var_os(name))
    }
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a command in a sandbox and report the result
    Run(enter::RunArgs),
    /// Create a sandbox with its own branch and workspace
    #[command(
        after_help = "Example:\n  palisade create fix --dirty   on branch palisade/fix, with your uncommitted changes"
    )]
    Create(sandboxes::CreateArgs),
    /// List sandboxes
    #[command(visible_alias = "ls")]
    #[command(
        after_help = "Example:\n  palisade list --here   sandboxes of the current repository"
    )]
    List(sandboxes::ListArgs),
    /// Open a shell in a sandbox
    #[command(after_help = "Example:\n  palisade shell fix   a shell in its workspace")]
    Shell(enter::ShellArgs),
    /// Run a command in an existing sandbox
    #[command(
        after_help = "Example:\n  palisade exec fix -- git status   prints its output and exits with its exit code"
    )]
    Exec(enter::ExecArgs),
    /// Suspend all processes of a sandbox
    #[command(
        after_help = "Example:\n  palisade pause fix   its processes stay suspended until it is resumed"
    )]
    Pause(sandboxes::NameArgs),
    /// Resume a paused or stopped sandbox
    #[command(
        after_help = "Example:\n  palisade resume fix   restarts it if its processes have ended"
    )]
    Resume(sandboxes::NameArgs),
    /// Delete a sandbox, its branch and its files
    #[command(visible_alias = "rm")]
    #[command(
        after_help = "Example:\n  palisade delete fix   refused while a command runs or work is unmerged"
    )]
    Delete(sandboxes::DeleteArgs),
    /// Copy a file or directory into a sandbox
    #[command(
        after_help = "Example:\n  palisade upload fix README.md notes   to /workspace/notes/README.md"
    )]
    Upload(files::UploadArgs),
    /// Copy a file or directory out of a sandbox
    #[command(
        after_help = "Example:\n  palisade download fix README.md from-fix   to from-fix/README.md"
    )]
    Download(files::DownloadArgs),
    /// Show what a sandbox changed
    #[command(after_help = "Example:\n  palisade diff --stat fix   changed files with line counts")]
    Diff(merge_commands::DiffArgs),
    /// Show the commits of a sandbox
    #[command(after_help = "Example:\n  palisade log fix   commits that are not on your branch")]
    Log(merge_commands::LogArgs),
    /// Merge a sandbox's branch into yours
    #[command(
        after_help = "Example:\n  palisade merge --squash fix   squash its work into one commit"
    )]
    Merge(merge_commands::MergeArgs),
    /// Apply a sandbox's changes to your worktree, uncommitted
    #[command(after_help = "Example:\n  palisade apply fix   leaves the changes uncommitted")]
    Apply(merge_commands::ApplyArgs),
    /// Switch your worktree to a sandbox's branch
    #[command(after_help = "Example:\n  palisade checkout fix   check out branch palisade/fix")]
    Checkout(merge_commands::ApplyArgs),
    /// Commit the current state of a workspace to its branch
    #[command(
        after_help = "Example:\n  palisade snapshot fix -m halfway   commits to palisade/fix"
    )]
    Snapshot(sandboxes::SnapshotArgs),
    /// Save a checkpoint of a sandbox's files, or list checkpoints
    #[command(
        after_help = "Example:\n  palisade checkpoint fix before   undo with palisade restore"
    )]
    Checkpoint(checkpoints::CheckpointArgs),
    /// Restore a sandbox's files from a checkpoint
    #[command(
        after_help = "Example:\n  palisade restore --yes fix before   replaces the workspace's files"
    )]
    Restore(checkpoints::RestoreArgs),
    /// Create a sandbox from the files and branch of another
    #[command(
        after_help = "Example:\n  palisade fork fix other   'other' starts from fix's files and branch"
    )]
    Fork(checkpoints::ForkArgs),
    /// List a sandbox's ports, or publish them on the host's loopback
    #[command(
        after_help = "Example:\n  palisade ports fix --publish 0:3000   publishes port 3000 on a free host port"
    )]
    Ports(ports::PortsArgs),
    /// Start, stop and inspect the gate
    #[command(subcommand)]
    Gate(gate_command::GateCommand),
    /// Check, show and write the configuration
    #[command(subcommand)]
    Config(config_command::ConfigCommand),
    /// Read and verify the audit log
    #[command(subcommand)]
    Audit(audit::AuditCommand),
    /// Explain why a request was refused
    Why(why::WhyArgs),
    /// Try requests against the rules; check, test and explain policy bundles
    #[command(subcommand)]
    Policy(policy_command::PolicyCommand),
    /// Allow a host, for every sandbox or for one
    #[command(after_help = "\
Examples:
  palisade allow registry.example --for fix   for the sandbox fix
  palisade allow api.example.com:8443 --yes   for every sandbox, without confirmation
Adds the host to grants.yaml, beside palisade.yaml, after showing the change; a running gate
reads it at once. A deny rule of another file wins.")]
    Allow(grant_command::GrantArgs),
    /// Deny a host, for every sandbox or for one
    #[command(after_help = "\
Examples:
  palisade deny '*.tracker.example'           for every sandbox
  palisade deny api.example.com --for fix     for the sandbox fix
Adds a deny rule to grants.yaml, beside palisade.yaml, after showing the change. It wins over
every other rule and over presets; palisade allow removes it.")]
    Deny(grant_command::GrantArgs),
    /// Convert another tool's network policy into palisade.yaml
    Import(import_command::ImportArgs),
    /// List and show the presets for egress.presets and --preset
    #[command(subcommand)]
    Preset(preset_command::PresetCommand),
    /// Check a push against the rules without pushing
    #[command(subcommand)]
    Git(git_check::GitCommand),
    /// List, test and grant the credentials that the gate adds to requests
    #[command(subcommand)]
    Credentials(credentials::CredentialsCommand),
    /// Show, export and renew the certificate authority
    #[command(subcommand)]
    Ca(ca::CaCommand),
    /// Register containers; back up and restore the registry
    #[command(subcommand)]
    Registry(registry::RegistryCommand),
    /// Manage the MCP servers behind the bridge
    #[command(subcommand)]
    Bridge(bridge::BridgeCommand),
    /// Trust the current content of a repository's .palisade.yaml
    Trust(trust::TrustArgs),
    /// Call a workbench tool in a sandbox
    Tool(tool::ToolArgs),
    Workbench(workbench::WorkbenchArgs),
    /// Serve sandboxes and their tools to an MCP client, over stdio
    Mcp(mcp_command::McpArgs),
    /// Check the gate's health; exits 1 if it is degraded
    Health,
    /// Check what this machine supports, and show how to fix what is missing
    Doctor(doctor::DoctorArgs),
    /// Print a completion script for your shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write the manual pages into a directory
    Man {
        /// The directory; created if missing
        dir: PathBuf,
    },
}

/// Parses the command line and runs the command; as `polis-bridge`, runs the standalone bridge.
pub fn parse_and_run() -> Result<CliExit> {
    let invoked_as = std::env::args_os().next().map(PathBuf::from);
    let name = invoked_as.as_deref().and_then(Path::file_name);
    if name == Some(OsStr::new(POLIS_BRIDGE)) {
        let PolisBridge { global, args } = PolisBridge::parse();
        return bridge::standalone::run(&args, &global);
    }
    let matches = groups::command().get_matches();
    // `get_matches` has already reported parse errors.
    run(Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit()))
}

/// Runs one command.
fn run(cli: Cli) -> Result<CliExit> {
    let Cli { global, command } = cli;
    match command {
        Command::Run(args) => enter::run(&args, &global),
        Command::Create(args) => sandboxes::create(&args, &global),
        Command::List(args) => sandboxes::list(&args, &global),
        Command::Shell(args) => enter::shell(&args, &global),
        Command::Exec(args) => enter::exec(&args, &global),
        Command::Pause(args) => sandboxes::pause(&args, &global),
        Command::Resume(args) => sandboxes::resume(&args, &global),
        Command::Delete(args) => sandboxes::delete(&args, &global),
        Command::Upload(args) => files::upload(&args, &global),
        Command::Download(args) => files::download(&args, &global),
        Command::Checkpoint(args) => checkpoints::checkpoint(&args, &global),
        Command::Restore(args) => checkpoints::restore(&args, &global),
        Command::Fork(args) => checkpoints::fork(&args, &global),
        Command::Checkout(args) => merge_commands::checkout(&args, &global),
        Command::Ports(args) => ports::run(&args, &global),
        Command::Diff(args) => merge_commands::diff(&args, &global),
        Command::Log(args) => merge_commands::log(&args, &global),
        Command::Merge(args) => merge_commands::merge(&args, &global),
        Command::Apply(args) => merge_commands::apply(&args, &global),
        Command::Snapshot(args) => sandboxes::snapshot(&args, &global),
        Command::Gate(command) => gate_command::run(command, &global),
        Command::Config(command) => config_command::run(command, &global),
        Command::Audit(command) => audit::run(command, &global),
        Command::Why(args) => why::why(&args, &global),
        Command::Policy(command) => policy_command::run(command, &global),
        Command::Allow(args) => grant_command::run(GrantAction::Allow, &args, &global),
        Command::Deny(args) => grant_command::run(GrantAction::Deny, &args, &global),
        Command::Import(args) => import_command::run(&args, &global),
        Command::Preset(command) => preset_command::run(&command, &global),
        Command::Git(command) => git_check::run(command, &global),
        Command::Credentials(command) => credentials::run(command, &global),
        Command::Ca(command) => ca::run(command, &global),
        Command::Registry(command) => registry::run(command, &global),
        Command::Bridge(command) => bridge::run(command, &global),
        Command::Trust(args) => trust::run(args, &global),
        Command::Tool(args) => tool::run(&args, &global),
        Command::Workbench(args) => workbench::run(&args, &global),
        Command::Mcp(args) => mcp_command::run(&args, &global),
        Command::Health => gate_command::health(&global),
        Command::Doctor(args) => doctor::run(&args, &global),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "palisade", &mut script);
            crate::output::write_out(&script)?;
            Ok(CliExit::Ok)
        }
        Command::Man { dir } => docs::write_man(&dir, &global),
    }
}

/// Runs a future on a new single-threaded runtime.
pub fn block_on<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?
        .block_on(work)
}

/// Asks for confirmation on the terminal. Without a terminal, `--yes` is required.
pub fn confirm(question: &str, yes: bool) -> Result<()> {
    use std::io::{IsTerminal, Write};
    if yes {
        return Ok(());
    }
    if !std::io::stdin().is_terminal() {
        return Err(
            CliError::new(CliExit::Usage, format!("{question} Use --yes to confirm.")).into(),
        );
    }
    let mut stderr = std::io::stderr();
    write!(stderr, "{question} [y/N] ")?;
    stderr.flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    if matches!(answer.trim(), "y" | "Y" | "yes") {
        Ok(())
    } else {
        Err(CliError::new(CliExit::Failed, "nothing was changed").into())
    }
}
