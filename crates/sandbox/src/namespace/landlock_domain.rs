//! Landlock domain of the whole sandbox, init included: a second layer of isolation.
//!
//! The domain protects the host even if a namespace, a capability or a seccomp filter has a flaw:
//!
//! - **files**: everything beneath the sandbox's `/` is allowed, including renames between
//!   directories (REFER). A directory that has no path beneath `/`, such as a leaked descriptor of
//!   a host directory, cannot be listed, and no file in it can be opened. Mounts cannot be changed;
//! - **signals and abstract sockets**, from version 6 of Landlock: the sandbox's processes cannot
//!   signal processes outside, or connect to abstract sockets outside, even if the process and
//!   network namespaces fail. Tracing processes outside is forbidden in every version.
//!
//! There is one domain for all commands, because a command may have to signal or debug a process of
//! another command, which two sibling domains would forbid. The domain does not protect init from
//! an agent with init's own id. Init is protected nevertheless: it is PID 1, it cannot be dumped,
//! and it has a capability that the agent lacks.
//!
//! Init may also access three directories that have no path in the sandbox: `/proc`, the measured
//! tree, and the trusted certificates. The executable of this program, which has no path in the
//! sandbox either and contains no secret, may be executed as the workbench.
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
struct LandlockPlan {
    files: bool,
    scope: bool,
    warning: Option<&'static str>,
}

impl LandlockPlan {
    fn for_version(version: u32, nested: bool) -> Self {
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

/// Restricts this process and its descendants. Returns a warning if a protection is missing. With
/// `lowers_session_weights`, init may also write to files in its `/proc`.
pub(crate) fn enter(
    nested: bool,
    lowers_session_weights: bool,
    init_directories: &InitDirectories<'_>,
) -> Result<Option<&'static str>> {
    let plan = LandlockPlan::for_version(version(), nested);
    if plan.files || plan.scope {
        restrict(&plan, lowers_session_weights, init_directories).map_err(Error::other)?;
    }
    Ok(plan.warning)
}

/// Directories that only init may access.
pub(crate) struct InitDirectories<'a> {
    /// A `/proc` that shows all processes.
    pub(crate) processes: BorrowedFd<'a>,
    /// The directory whose disk usage init measures.
    pub(crate) measured: BorrowedFd<'a>,
    /// The staged files with trusted certificates.
    pub(crate) trusted: Option<BorrowedFd<'a>>,
}

fn restrict(
    plan: &LandlockPlan,
    lowers_session_weights: bool,
    init_directories: &InitDirectories<'_>,
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
        let mut proc_access = AccessFs::ReadDir | AccessFs::ReadFile;
        if lowers_session_weights {
            proc_access |= AccessFs::WriteFile;
        }
        rules = rules
            .add_rule(PathBeneath::new(PathFd::new("/")?, everything))?
            .add_rule(PathBeneath::new(init_directories.processes, proc_access))?
            .add_rule(PathBeneath::new(
                init_directories.measured,
                AccessFs::ReadDir,
            ))?
            .add_rule(PathBeneath::new(
                PathFd::new("/proc/self/exe")?,
                AccessFs::Execute | AccessFs::ReadFile,
            ))?;
        if let Some(trusted) = init_directories.trusted {
            let trust_access = AccessFs::ReadFile
                | AccessFs::WriteFile
                | AccessFs::Truncate
                | AccessFs::MakeReg
                | AccessFs::MakeSym
                | AccessFs::RemoveFile;
            rules = rules.add_rule(PathBeneath::new(trusted, trust_access))?;
        }
    }
    // The rules match the kernel's version, so partial enforcement is an error.
    match rules.restrict_self()?.ruleset {
        RulesetStatus::FullyEnforced | RulesetStatus::PartiallyEnforced => Ok(()),
        RulesetStatus::NotEnforced => Err("the Landlock rules were not enforced".into()),
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
                let init_directories = InitDirectories {
                    processes: std::os::fd::AsFd::as_fd(&proc),
                    measured: std::os::fd::AsFd::as_fd(&proc),
                    trusted: None,
                };
                enter(false, false, &init_directories).unwrap();
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
            let plan = LandlockPlan::for_version(version, nested);
            assert_eq!(
                (plan.files, plan.scope),
                (files, scope),
                "{version} {nested}"
            );
            assert_eq!(plan.warning.is_some(), warns, "{version} {nested}");
        }
    }
}
