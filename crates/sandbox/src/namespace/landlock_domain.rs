//! Landlock domain of the whole sandbox, init included: a second layer of isolation.
//!
//! It protects if a namespace, a capability or a filter has a flaw:
//!
//! - **files**: everything beneath the sandbox's `/` is allowed, including renames between
//!   directories (REFER); a directory without a path there, such as a leaked descriptor of a host
//!   directory, cannot be opened or walked, and mounts cannot be changed;
//! - **signals and abstract sockets**, from version 6: none leave the sandbox, independent of its
//!   process and network namespaces. Tracing never does.
//!
//! There is one domain for all commands: a command may have to signal or debug another's process,
//! which two sibling domains would forbid. An agent with init's own id cannot attack init, because
//! init is PID 1, cannot be dumped, and has an additional capability.
//!
//! Init needs three directories that have no path in the sandbox: the processes, the measured tree,
//! and the trusted certificates. This program may also be executed, as the workbench: it has no
//! path in the sandbox either, and no secret.
//!
//! With `--nested`, files are not restricted, because a domain with file rules forbids mounts even
//! in a nested user namespace.

use std::io::{Error, Result};
use std::os::fd::BorrowedFd;

use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus, Scope,
};

/// The rules for a Landlock version.
#[derive(Debug, PartialEq, Eq)]
struct Plan {
    files: bool,
    scope: bool,
    warning: Option<&'static str>,
}

impl Plan {
    fn of(version: u32, nested: bool) -> Self {
        // Version 1 does not support REFER and forbids it.
        let (files, scope) = (version >= 2 && !nested, version >= 6);
        let warning = match version {
            0 => Some(
                "landlock: not active in this kernel; the second layer of isolation is missing",
            ),
            1 => Some("landlock: this kernel's version is too old (Linux 5.19 or newer is needed)"),
            2..6 => {
                Some("landlock: this kernel's version does not restrict signals (Linux 6.12 does)")
            }
            _ => None,
        };
        Self {
            files,
            scope,
            warning,
        }
    }
}

/// The kernel's Landlock version; 0 without Landlock.
pub(crate) fn version() -> u32 {
    const LANDLOCK_CREATE_RULESET_VERSION: u32 = 1;
    // SAFETY: with this flag the call reads no memory.
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<libc::c_void>(),
            0,
            LANDLOCK_CREATE_RULESET_VERSION,
        )
    };
    u32::try_from(version).unwrap_or(0)
}

/// Restricts this process and its descendants. Returns a warning if a protection is missing. If
/// init sets the weight of sessions, it may write to files of its processes.
pub(crate) fn enter(
    nested: bool,
    weighs_sessions: bool,
    own: &InitDirectories<'_>,
) -> Result<Option<&'static str>> {
    let plan = Plan::of(version(), nested);
    if plan.files || plan.scope {
        restrict(&plan, weighs_sessions, own).map_err(Error::other)?;
    }
    Ok(plan.warning)
}

/// Directories that only init may access.
pub(crate) struct InitDirectories<'a> {
    pub(crate) processes: BorrowedFd<'a>,
    pub(crate) measured: BorrowedFd<'a>,
    pub(crate) trusted: Option<BorrowedFd<'a>>,
}

fn restrict(
    plan: &Plan,
    weighs_sessions: bool,
    own: &InitDirectories<'_>,
) -> std::result::Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let mut rules = Ruleset::default().set_compatibility(CompatLevel::BestEffort);
    if plan.files {
        rules = rules.handle_access(AccessFs::from_all(ABI::V6))?;
    }
    if plan.scope {
        rules = rules.scope(Scope::from_all(ABI::V6))?;
    }
    let mut rules = rules.create()?;
    if plan.files {
        let everything = AccessFs::from_all(ABI::V6);
        let mut looking = AccessFs::ReadDir | AccessFs::ReadFile;
        if weighs_sessions {
            looking |= AccessFs::WriteFile;
        }
        rules = rules
            .add_rule(PathBeneath::new(PathFd::new("/")?, everything))?
            .add_rule(PathBeneath::new(own.processes, looking))?
            .add_rule(PathBeneath::new(own.measured, AccessFs::ReadDir))?
            .add_rule(PathBeneath::new(
                PathFd::new("/proc/self/exe")?,
                AccessFs::Execute | AccessFs::ReadFile,
            ))?;
        if let Some(trusted) = own.trusted {
            let adding = AccessFs::ReadFile
                | AccessFs::WriteFile
                | AccessFs::Truncate
                | AccessFs::MakeReg
                | AccessFs::MakeSym
                | AccessFs::RemoveFile;
            rules = rules.add_rule(PathBeneath::new(trusted, adding))?;
        }
    }
    // The rules match the kernel's version, so partial enforcement is an error.
    match rules.restrict_self()?.ruleset {
        RulesetStatus::FullyEnforced | RulesetStatus::PartiallyEnforced => Ok(()),
        RulesetStatus::NotEnforced => Err("it was not enforced".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn domain_blocks_signals_and_keeps_file_access() {
        if version() < 6 {
            return;
        }
        // A domain applies to one thread, so other tests are not affected.
        std::thread::scope(|scope| {
            let tried = scope.spawn(|| {
                let place = tempfile::tempdir().unwrap();
                let proc = std::fs::File::open("/proc").unwrap();
                let own = InitDirectories {
                    processes: std::os::fd::AsFd::as_fd(&proc),
                    measured: std::os::fd::AsFd::as_fd(&proc),
                    trusted: None,
                };
                enter(false, false, &own).unwrap();
                let at = |name: &str| place.path().join(name);
                for name in ["a", "b"] {
                    std::fs::create_dir(at(name)).unwrap();
                }
                std::fs::write(at("a/file"), "x").unwrap();
                std::fs::rename(at("a/file"), at("b/file")).unwrap();
                nix::sys::signal::kill(nix::unistd::getppid(), None)
            });
            assert_eq!(tried.join().unwrap(), Err(nix::errno::Errno::EPERM));
        });
    }

    #[test]
    fn each_landlock_version_has_its_rules_and_warning() {
        for (version, nested, files, scope, warns) in [
            (0, false, false, false, true),
            (1, false, false, false, true),
            (2, false, true, false, true),
            (5, false, true, false, true),
            (6, false, true, true, false),
            (7, false, true, true, false),
            (0, true, false, false, true),
            (5, true, false, false, true),
            (6, true, false, true, false),
        ] {
            let plan = Plan::of(version, nested);
            assert_eq!(
                (plan.files, plan.scope),
                (files, scope),
                "{version} {nested}"
            );
            assert_eq!(plan.warning.is_some(), warns, "{version} {nested}");
        }
    }
}
