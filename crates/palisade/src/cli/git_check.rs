//! `palisade git check`: the decision about a push, without pushing.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::{Args, Subcommand, ValueEnum};
use config::Settings;
use config::section::scan::GitAction;
use egress::git_protocol::size;
use policy::push::{Findings, ObjectFormat, PushContext, SecretDecision};
use policy::reason::Reason;
use policy::refs::{ObjectId, RefFacts, RefName, RefUpdate};
use policy::registration::AuthMode;
use policy::verdict::{Denial, UNATTENDED};
use sandbox::git::bundle::BundleHeader;
use sandbox::git::error::GitError;
use sandbox::git::host_repository::HostRepository;
use sandbox::pack_reader::{PackFile, PackReaderError, PackReaderPool};
use serde_json::{Value, json};

use crate::cli::{Global, block_on};
use crate::exit::{CliError, CliExit};
use crate::gate::{PACK_READER_ARGUMENT, read_environment_variable};
use crate::output;

#[derive(Debug, Subcommand)]
pub enum GitCommand {
    /// Report what the rules would decide about a push
    #[command(after_help = "\
Examples:
  palisade git check --range origin/main..HEAD
      check this branch; OLD is what upstream has
  palisade git check --range origin/main..fix --ref palisade/fix --auth-mode bot
      check a push to another name, as a bot
  palisade git check --bundle work.bundle
      check a push that you received as a file (git bundle create work.bundle main..fix)

The rules are those of the configuration's git section. Every object is read as the gate
reads it: in a process without keys, files or network. Nothing is sent, nothing is changed.
What upstream has is taken from this repository's remote-tracking branches of origin.
Exits 0 when the push would be allowed, 7 when it would be refused.")]
    Check(GitCheckArgs),
}

#[derive(Debug, Args)]
pub struct GitCheckArgs {
    /// Check the commits of a range: what NEW adds to OLD
    #[arg(
        long,
        value_name = "OLD..NEW",
        conflicts_with = "bundle",
        required_unless_present = "bundle"
    )]
    range: Option<String>,
    /// Check the refs and objects of a git bundle
    #[arg(long, value_name = "FILE")]
    bundle: Option<PathBuf>,
    /// The ref to push to [default: the branch that NEW names; a bundle's own refs]
    #[arg(long = "ref", value_name = "REF")]
    reference: Option<String>,
    /// Identity for the push
    #[arg(long, value_enum, default_value_t = Mode::User)]
    auth_mode: Mode,
    /// Repository that has the range, or the bundle's prerequisites
    #[arg(long, value_name = "DIR", default_value = ".")]
    repo: PathBuf,
    /// Check as if the sandbox had created the branch
    #[arg(long)]
    own: bool,
    /// A push option
    #[arg(long, short = 'o', value_name = "OPTION")]
    push_option: Vec<String>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Mode {
    /// With the operator's own account
    User,
    /// As a bot, which may push only to sandbox/* and palisade/*
    Bot,
}

/// A push to check.
struct CheckedPush {
    format: ObjectFormat,
    updates: Vec<RefUpdate>,
    facts: Vec<RefFacts>,
    pack: PackFile,
    default_tip: Option<ObjectId>,
    bases: Vec<PackFile>,
}

/// Runs `palisade git …`.
pub fn run(command: GitCommand, global: &Global) -> Result<CliExit> {
    let GitCommand::Check(args) = command;
    let paths = global.paths()?;
    let settings = config::load(paths.config.current(), &read_environment_variable)
        .map_err(|problems| CliError::new(CliExit::Usage, problems.to_string()))?;
    let push = match (&args.range, &args.bundle) {
        (Some(range), _) => push_from_range(range, &args)?,
        (None, Some(file)) => push_from_bundle(file, &args)?,
        (None, None) => {
            return Err(
                CliError::new(CliExit::Usage, "missing --range OLD..NEW or --bundle FILE").into(),
            );
        }
    };
    let waiting = output::Spinner::start("reading the push");
    let report = check_push(push, &settings, &args);
    waiting.end();
    let report = report?;
    if global.json {
        output::print_json(&report.as_json())?;
    } else {
        output::print_line(&report.as_text())?;
    }
    Ok(if report.is_refused() {
        CliExit::Denied
    } else {
        CliExit::Ok
    })
}

fn push_from_range(range: &str, args: &GitCheckArgs) -> Result<CheckedPush> {
    let repository = HostRepository::discover(&args.repo)?;
    let (old, new) = match range.split_once("..") {
        Some((old, new)) => (Some(or_head(old)), or_head(new.trim_start_matches('.'))),
        None => (None, range),
    };
    let (new, branch) = repository.find(new).map_err(not_found)?;
    let old = old
        .map(|old| repository.find(old).map_err(not_found))
        .transpose()?;
    let old = old.map(|(id, _)| id);
    let name = match (&args.reference, branch) {
        (Some(name), _) => ref_name(name)?,
        (None, Some(name)) if name.starts_with("refs/heads/") || name.starts_with("refs/tags/") => {
            ref_name(&name)?
        }
        (None, _) => {
            let message =
                "the end of the range is not a branch; name the branch to push to with --ref";
            return Err(CliError::new(CliExit::Usage, message).into());
        }
    };
    let default = repository.look_up("refs/remotes/origin/HEAD").or(old);
    let excluded: Vec<_> = old.into_iter().collect();
    let (file, boundary) = repository.pack(&new, &excluded)?;
    let upstream = tracking(&repository, &name);
    let mut tips: Vec<_> = boundary
        .into_iter()
        .chain(old)
        .chain(default)
        .chain(upstream)
        .collect();
    tips.sort_unstable();
    tips.dedup();
    let bases = repository.pack_tips(&tips, false)?;
    let update = RefUpdate {
        name,
        old: upstream.unwrap_or(ObjectId::Sha1([0; 20])),
        new,
    };
    let facts = RefFacts {
        exists_upstream: Some(upstream.is_some()),
        made_by_this_sandbox: args.own,
        is_fast_forward: upstream.and_then(|old| repository.descends(&new, &old)),
    };
    Ok(CheckedPush {
        format: ObjectFormat::Sha1,
        updates: vec![update],
        facts: vec![facts],
        pack: PackFile { file, offset: 0 },
        default_tip: default,
        bases: vec![PackFile {
            file: bases,
            offset: 0,
        }],
    })
}

fn push_from_bundle(path: &Path, args: &GitCheckArgs) -> Result<CheckedPush> {
    let shown = output::safe(&path.display().to_string());
    let file = File::open(path).map_err(|error| {
        let message = format!("cannot open {shown}: {error}");
        CliError::new(CliExit::NotFound, message)
    })?;
    let bundle = BundleHeader::read(&mut BufReader::new(&file)).map_err(|error| match error {
        GitError::BadBundle(why) => CliError::new(
            CliExit::Usage,
            format!("{shown} is not a valid git bundle: {why}"),
        )
        .into(),
        error => anyhow::Error::from(error),
    })?;
    let mut refs = bundle.refs;
    if let Some(name) = &args.reference {
        let name = ref_name(name)?;
        match refs.as_mut_slice() {
            [(own, _)] => *own = name,
            _ => refs.retain(|(own, _)| *own == name),
        }
    }
    if refs.is_empty() {
        let message = format!("{shown} does not contain that ref; a push updates refs below refs/");
        return Err(CliError::new(CliExit::NotFound, message).into());
    }
    // A bundle with its full history needs no repository.
    let repository = HostRepository::discover(&args.repo).ok();
    let mut bases = Vec::new();
    if !bundle.prerequisites.is_empty() {
        let missing_commits = || {
            let message = format!(
                "{shown} needs commits that '{}' does not have; name a repository that has them \
                 with --repo, or create the bundle with its full history",
                output::safe(&args.repo.display().to_string())
            );
            CliError::new(CliExit::NotFound, message)
        };
        let repository = repository.as_ref().ok_or_else(missing_commits)?;
        let tips = bundle.prerequisites.iter();
        let tips = tips.map(|id| repository.find(&id.to_string()).map(|(id, _)| id));
        let tips = tips
            .collect::<Result<Vec<_>, _>>()
            .map_err(|_| missing_commits())?;
        let file = repository
            .pack_tips(&tips, true)
            .map_err(|_| missing_commits())?;
        bases.push(PackFile { file, offset: 0 });
    }
    let default = repository
        .as_ref()
        .and_then(|repository| repository.look_up("refs/remotes/origin/HEAD"));
    let default = default.filter(|_| bundle.format == ObjectFormat::Sha1);
    if let (Some(repository), Some(tip)) = (&repository, default) {
        let file = repository.pack_tips(&[tip], false)?;
        bases.push(PackFile { file, offset: 0 });
    }
    let zero = match bundle.format {
        ObjectFormat::Sha1 => ObjectId::Sha1([0; 20]),
        ObjectFormat::Sha256 => ObjectId::Sha256([0; 32]),
    };
    let (mut updates, mut facts) = (Vec::new(), Vec::new());
    for (name, new) in refs {
        let upstream = repository
            .as_ref()
            .and_then(|repository| tracking(repository, &name));
        let upstream = upstream.filter(|_| bundle.format == ObjectFormat::Sha1);
        facts.push(RefFacts {
            exists_upstream: repository.as_ref().map(|_| upstream.is_some()),
            made_by_this_sandbox: args.own,
            is_fast_forward: None,
        });
        let old = upstream.unwrap_or(zero);
        updates.push(RefUpdate { name, old, new });
    }
    Ok(CheckedPush {
        format: bundle.format,
        updates,
        facts,
        default_tip: default,
        pack: PackFile {
            file,
            offset: bundle.pack,
        },
        bases,
    })
}

fn or_head(name: &str) -> &str {
    if name.is_empty() { "HEAD" } else { name }
}

fn not_found(error: GitError) -> CliError {
    CliError::new(CliExit::NotFound, error.to_string())
}

/// Parses a full ref name or a branch name.
fn ref_name(name: &str) -> Result<RefName> {
    let full = if name.starts_with("refs/") {
        name.to_owned()
    } else {
        format!("refs/heads/{name}")
    };
    RefName::parse(full.as_bytes())
        .map_err(|error| CliError::new(CliExit::Usage, format!("--ref: {error}")).into())
}

/// The tip of origin's branch of that name, from the remote-tracking branch.
fn tracking(repository: &HostRepository, name: &RefName) -> Option<ObjectId> {
    let name = str::from_utf8(name.as_bytes()).ok()?;
    let branch = name.strip_prefix("refs/heads/")?;
    repository.look_up(&format!("refs/remotes/origin/{branch}"))
}

/// The refusal of a finding that needs an approval.
fn unattended(found: Denial) -> Denial {
    Denial {
        reason: Reason::AskUnattended,
        message: format!("{} {UNATTENDED}", found.message),
        ..found
    }
}

/// The decision about a push.
struct PushReport {
    /// Each ref, with its refusal if any.
    refs: Vec<(RefName, Option<Denial>)>,
    /// Refusals of the whole push.
    whole: Vec<Denial>,
    /// Findings that would only be recorded.
    notes: Vec<String>,
    findings: Findings,
    bytes: u64,
}

fn check_push(push: CheckedPush, settings: &Settings, args: &GitCheckArgs) -> Result<PushReport> {
    let git = &settings.git;
    let rules = settings.push_rules(match args.auth_mode {
        Mode::User => AuthMode::User,
        Mode::Bot => AuthMode::Bot,
    });
    let length = push.pack.file.metadata()?.len();
    let bytes = length.saturating_sub(push.pack.offset);
    let case = PushContext {
        format: push.format,
        updates: push.updates,
        options: args
            .push_option
            .iter()
            .map(|option| option.clone().into_bytes())
            .collect(),
        default_tip: push.default_tip,
        restricted: git.restricted_paths.clone(),
        scan: git.scan != GitAction::Off,
    };
    let mut whole = Vec::new();
    let mut notes = Vec::new();
    let limits = &settings.policy.git.push_limits;
    if bytes > limits.hard_limit_bytes {
        whole.push(size::denial(bytes, limits.hard_limit_bytes));
    } else if bytes > limits.warning_bytes {
        notes.push(size::warning(bytes, limits.hard_limit_bytes));
    }
    let program = PathBuf::from("/proc/self/exe");
    let child = PackReaderPool::new(program, vec![PACK_READER_ARGUMENT.into()], 1);
    let read = block_on(async { Ok(child.read(&case, Some(push.pack), push.bases).await) })?;
    let findings = match read {
        Ok(findings) => findings,
        Err(error @ PackReaderError::Child(_)) => return Err(error.into()),
        Err(error) => {
            whole.push(error.denial());
            Findings::default()
        }
    };
    whole.extend(findings.path_denial());
    match rules.judge_secrets(&findings) {
        SecretDecision::Pass => {
            let noted = findings.secret_denials();
            notes.extend(noted.iter().map(|denial| note("would be noted", denial)));
        }
        SecretDecision::Ask(found) => whole.extend(found.into_iter().map(unattended)),
        SecretDecision::Deny(found) => whole.extend(found),
    }
    let facts = push.facts.into_iter().enumerate().map(|(index, facts)| {
        let found = findings.fast_forward.get(index).copied().flatten();
        RefFacts {
            is_fast_forward: facts.is_fast_forward.or(found),
            ..facts
        }
    });
    let updates: Vec<_> = case.updates.into_iter().zip(facts).collect();
    let denied = rules.refs.judge_push(&updates).err();
    let refs = updates.into_iter().map(|(update, _)| {
        let mut denials = denied.iter().flat_map(Denial::refs);
        let denial = denials.find(|denial| denial.name == update.name.as_bytes());
        (update.name, denial.map(|denial| denial.denial.clone()))
    });
    Ok(PushReport {
        refs: refs.collect(),
        whole,
        notes,
        findings,
        bytes,
    })
}

fn note(how: &str, denial: &Denial) -> String {
    let location = denial.evidence.as_deref().unwrap_or("the push");
    format!("{how}: {} in {location}", denial.rule)
}

impl PushReport {
    fn is_refused(&self) -> bool {
        !self.whole.is_empty() || self.refs.iter().any(|(_, denial)| denial.is_some())
    }

    fn as_text(&self) -> String {
        let verdict = if self.is_refused() {
            "refused"
        } else {
            "allowed"
        };
        let (objects, bytes) = (self.findings.objects, self.bytes);
        let mut lines = vec![format!("{verdict}: {objects} objects, {bytes} bytes")];
        let mut add = |denial: &Denial| {
            lines.push(format!("  {}", output::safe(&denial.message)));
            lines.push(format!(
                "    {}, rule {}",
                denial.reason,
                output::safe(denial.rule.as_str())
            ));
            if let Some(evidence) = &denial.evidence {
                lines.push(format!("    in {}", output::safe(evidence)));
            }
        };
        self.whole.iter().for_each(&mut add);
        self.refs
            .iter()
            .filter_map(|(_, denial)| denial.as_ref())
            .for_each(&mut add);
        for (name, denial) in &self.refs {
            let name = output::safe(&name.to_string());
            match denial {
                Some(_) => lines.push(format!("  ✗ {name}")),
                None if self.is_refused() => lines.push(format!(
                    "  ✗ {name} (not pushed, because the push is refused)"
                )),
                None => lines.push(format!("  ✓ {name}")),
            }
        }
        lines.extend(
            self.notes
                .iter()
                .map(|note| format!("  note: {}", output::safe(note))),
        );
        if self.findings.more_secrets {
            lines.push("  note: there are more secrets than are shown".to_owned());
        }
        lines.join("\n")
    }

    fn as_json(&self) -> Value {
        let shown = |denial: &Denial| {
            json!({
                "reason": denial.reason,
                "rule": denial.rule,
                "told": denial.message,
                "evidence": denial.evidence,
            })
        };
        let refs = self.refs.iter().map(|(name, denial)| {
            json!({ "ref": name.to_string(), "denial": denial.as_ref().map(shown) })
        });
        json!({
            "verdict": if self.is_refused() { "deny" } else { "allow" },
            "refs": refs.collect::<Vec<_>>(),
            "denials": self.whole.iter().map(shown).collect::<Vec<_>>(),
            "notes": self.notes,
            "objects": self.findings.objects,
            "bytes": self.bytes,
            "secrets": self.findings.secrets,
            "more_secrets": self.findings.more_secrets,
        })
    }
}
