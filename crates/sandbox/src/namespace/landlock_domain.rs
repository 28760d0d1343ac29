//! Landlock: a second wall around the whole sandbox, init included.
//!
//! It holds where a namespace, a capability or a filter turned out to have a hole:
//!
//! - **files**: everything beneath the sandbox's `/` is as it was, renames between directories
//!   too (REFER); whatever has no path there, such as a directory of the host's that leaked in
//!   as a descriptor, can be neither opened nor walked, and no mount can be made or taken off;
//! - **signals and abstract sockets**, from version 6: none leave the sandbox, whatever its
//!   process and network namespaces say. Tracing never does.
//!
//! One domain for all, and not one per command: what one command started another one may have
//! to signal or debug, and two domains side by side would forbid that. What keeps an agent
//! with init's own id away from init is that init is PID 1, cannot be dumped, and has a
//! capability more.
//!
//! Init itself needs three directories that have no path inside: the processes, the names in
//! what it measures, and the files with what is trusted. And this program may be run again, as the workbench: it has no path
//! inside either, and no secret.
//!
//! With `--nested`, files are left out: in such a domain nobody may mount, also not in a user
//! namespace of its own.

use std::io::{Error, Result};
use std::os::fd::BorrowedFd;

use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus, Scope,
};

/// What a kernel of some version is asked for.
#[derive(Debug, PartialEq, Eq)]
struct Plan {
    files: bool,
    scope: bool,
    warning: Option<&'static str>,
}

impl Plan {
    fn of(version: u32, nested: bool) -> Self {
        // Version 1 knows no REFER, and forbids what it does not know.
        let (files, scope) = (version >= 2 && !nested, version >= 6);
        let warning = match version {
            0 => Some("landlock: not active in this kernel, so the sandbox has no second wall"),
            1 => Some("landlock: this kernel's is too old (Linux 5.19 or newer is needed)"),
            2..6 => Some("landlock: this kernel's does not scope signals (Linux 6.12 does)"),
            _ => None,
        };
        Self {
            files,
            scope,
            warning,
        }
    }
}

/// The kernel's version of Landlock; none is 0.
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

/// Puts this process, and all it will start, into the domain. Returns what is weaker than it
/// could be. Where init weighs sessions, it writes to files of its processes.
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

/// Directories that only init has.
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
    // Asked for because the kernel has it: not to get it is no smaller thing than a failure.
    match rules.restrict_self()?.ruleset {
        RulesetStatus::FullyEnforced | RulesetStatus::PartiallyEnforced => Ok(()),
        RulesetStatus::NotEnforced => Err("it was not enforced".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_signal_leaves_the_domain_and_files_are_as_they_were() {
        if version() < 6 {
            return;
        }
        // A domain is a thread's; nobody else in this process notices.
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
    fn every_version_gets_what_it_can_do_and_says_what_it_cannot() {
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
