//! The command line: every flag is defined once, here or beside the command it belongs to.

mod agents;
mod audit;
mod bridge;
mod ca;
mod checkpoints;
mod config_command;
mod docs;
mod doctor;
mod enter;
mod files;
mod gate_command;
mod git_check;
mod home;
mod mcp_command;
mod outcome;
mod place;
mod policy_command;
mod ports;
mod registry;
mod remote;
mod repo_limit;
mod reuse;
mod sandboxes;
mod summary;
mod tool;
mod trust;
mod why;
mod workbench;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::{Args, CommandFactory, Parser, Subcommand};

use crate::exit::{Exit, Failure};
use crate::paths::{Paths, Wishes};
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
  palisade run -- <agent>       an agent on this repository, in a sandbox of its own
  palisade diff|merge NAME      see what it did, and bring it home
  palisade list                 every sandbox, and how it is
  palisade doctor               what this machine allows, and how to fix what is missing
  palisade config init          write a starter palisade.yaml with every choice explained
  palisade audit tail           watch what happens, as it happens

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 not found, 4 exists
already, or its state forbids it (active, paused, unmerged), 5 no gate answers, 6 backend
unavailable, 7 denied, 124 timed out; run, exec and shell: the command's own.";

/// Flags every command takes.
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
    /// Say more on stderr; twice for everything
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

impl Global {
    /// Where things are.
    pub fn paths(&self) -> Result<Paths> {
        let wishes = Wishes {
            config: self.config.clone(),
            state_dir: self.state_dir.clone(),
            control: self.control.clone(),
        };
        Paths::resolve(&wishes, |name| std::env::var_os(name))
    }
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a command in a sandbox on this repository, and say what came of it
    Run(enter::RunArgs),
    /// Make a sandbox: a branch, a workspace, a place to run
    #[command(
        after_help = "Example:\n  palisade create fix --dirty   the branch palisade/fix, and your uncommitted changes"
    )]
    Create(sandboxes::CreateArgs),
    /// List the sandboxes
    #[command(visible_alias = "ls")]
    #[command(
        after_help = "Example:\n  palisade list --here   those of the repository you stand in"
    )]
    List(sandboxes::ListArgs),
    /// Open a shell in a sandbox
    #[command(after_help = "Example:\n  palisade shell fix   a shell in its workspace")]
    Shell(enter::ShellArgs),
    /// Run a command in a sandbox that is there
    #[command(
        after_help = "Example:\n  palisade exec fix -- git status   its output and its exit code are yours"
    )]
    Exec(enter::ExecArgs),
    /// Stop every process of a sandbox where it is
    #[command(
        after_help = "Example:\n  palisade pause fix   nothing in it runs until it is resumed"
    )]
    Pause(sandboxes::NameArgs),
    /// Let every process of a sandbox go on
    #[command(after_help = "Example:\n  palisade resume fix   also one whose processes are gone")]
    Resume(sandboxes::NameArgs),
    /// Remove a sandbox with its branch and everything in it
    #[command(visible_alias = "rm")]
    #[command(
        after_help = "Example:\n  palisade delete fix   refused while a command runs in it or its work is not merged"
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
    #[command(after_help = "Example:\n  palisade diff --stat fix   the files and how many lines")]
    Diff(home::DiffArgs),
    /// Show the commits of a sandbox
    #[command(after_help = "Example:\n  palisade log fix   its commits that you do not have")]
    Log(home::LogArgs),
    /// Merge a sandbox's branch into yours
    #[command(
        after_help = "Example:\n  palisade merge --squash fix   everything it did, as one commit"
    )]
    Merge(home::MergeArgs),
    /// Apply a sandbox's changes to your worktree, uncommitted
    #[command(after_help = "Example:\n  palisade apply fix   everything it did, for you to commit")]
    Apply(home::ApplyArgs),
    /// Switch your worktree to a sandbox's branch
    #[command(after_help = "Example:\n  palisade checkout fix   its branch, in your worktree")]
    Checkout(home::ApplyArgs),
    /// Commit a sandbox's workspace to its branch, as it is now
    #[command(
        after_help = "Example:\n  palisade snapshot fix -m halfway   a commit on palisade/fix"
    )]
    Snapshot(sandboxes::SnapshotArgs),
    /// Keep the files of a sandbox as they are now, or list what was kept
    #[command(
        after_help = "Example:\n  palisade checkpoint fix before   to come back to, with palisade restore"
    )]
    Checkpoint(checkpoints::CheckpointArgs),
    /// Put the files of a checkpoint back
    #[command(
        after_help = "Example:\n  palisade restore --yes fix before   as it was at that checkpoint"
    )]
    Restore(checkpoints::RestoreArgs),
    /// Make a sandbox with the files and the branch of another
    #[command(
        after_help = "Example:\n  palisade fork fix other   two that go their own ways from here"
    )]
    Fork(checkpoints::ForkArgs),
    /// Show a sandbox's ports, and publish them on this machine
    #[command(
        after_help = "Example:\n  palisade ports fix --publish 0:3000   port 3000 inside, at a free one here"
    )]
    Ports(ports::PortsArgs),
    /// Start, stop and look at the gate
    #[command(subcommand)]
    Gate(gate_command::GateCommand),
    /// Check, show and write the configuration
    #[command(subcommand)]
    Config(config_command::ConfigCommand),
    /// Read and verify the audit log
    #[command(subcommand)]
    Audit(audit::AuditCommand),
    /// Say why a request was refused, or what became of it
    Why(why::WhyArgs),
    /// Ask the rules, and check, test and explain policy bundles
    #[command(subcommand)]
    Policy(policy_command::PolicyCommand),
    /// Judge a push without making it
    #[command(subcommand)]
    Git(git_check::GitCommand),
    /// The certificate authority that sandboxes trust
    #[command(subcommand)]
    Ca(ca::CaCommand),
    /// Registered containers, and the database they live in
    #[command(subcommand)]
    Registry(registry::RegistryCommand),
    /// MCP servers behind the bridge, and their tool definitions
    #[command(subcommand)]
    Bridge(bridge::BridgeCommand),
    /// Trust a repository's own .palisade.yaml, exactly as it is now
    Trust(trust::TrustArgs),
    /// Call a coding tool inside a sandbox
    Tool(tool::ToolArgs),
    Workbench(workbench::WorkbenchArgs),
    /// Serve sandboxes and their tools to an MCP client, over stdio
    Mcp(mcp_command::McpArgs),
    /// Ask the gate how it is; exits 1 when it is degraded
    Health,
    /// Say what this machine allows, and how to fix what is missing
    Doctor(doctor::DoctorArgs),
    /// Print a completion script for your shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write the manual pages into a directory
    Man {
        /// The directory; made if missing
        dir: PathBuf,
    },
}

/// Parses the command line, under whichever name the program was called, and runs it.
pub fn parse_and_run() -> Result<Exit> {
    let called = std::env::args_os().next().map(PathBuf::from);
    let name = called.as_deref().and_then(Path::file_name);
    if name == Some(OsStr::new(POLIS_BRIDGE)) {
        let PolisBridge { global, args } = PolisBridge::parse();
        return bridge::standalone::run(&args, &global);
    }
    run(Cli::parse())
}

/// Runs one command.
fn run(cli: Cli) -> Result<Exit> {
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
        Command::Checkout(args) => home::checkout(&args, &global),
        Command::Ports(args) => ports::run(&args, &global),
        Command::Diff(args) => home::diff(&args, &global),
        Command::Log(args) => home::log(&args, &global),
        Command::Merge(args) => home::merge(&args, &global),
        Command::Apply(args) => home::apply(&args, &global),
        Command::Snapshot(args) => sandboxes::snapshot(&args, &global),
        Command::Gate(command) => gate_command::run(command, &global),
        Command::Config(command) => config_command::run(command, &global),
        Command::Audit(command) => audit::run(command, &global),
        Command::Why(args) => why::why(&args, &global),
        Command::Policy(command) => policy_command::run(command, &global),
        Command::Git(command) => git_check::run(command, &global),
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
            Ok(Exit::Ok)
        }
        Command::Man { dir } => docs::write_man(&dir, &global),
    }
}

/// Runs a short conversation with the gate.
pub fn block_on<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?
        .block_on(work)
}

/// Asks before doing what cannot be undone. Without a terminal the answer must have been
/// given with `--yes`.
pub fn confirm(question: &str, yes: bool) -> Result<()> {
    use std::io::{IsTerminal, Write};
    if yes {
        return Ok(());
    }
    if !std::io::stdin().is_terminal() {
        return Err(Failure::new(Exit::Usage, format!("{question} Say --yes to go on.")).into());
    }
    let mut stderr = std::io::stderr();
    write!(stderr, "{question} [y/N] ")?;
    stderr.flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    if matches!(answer.trim(), "y" | "Y" | "yes") {
        Ok(())
    } else {
        Err(Failure::new(Exit::Failed, "nothing was changed").into())
    }
}
