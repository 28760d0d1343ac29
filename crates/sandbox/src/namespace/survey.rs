//! Survey of the features that this machine allows. Each feature is tried in temporary processes
//! and a temporary directory.

use std::fs;
use std::io::{Error, Result};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use nix::mount::{MsFlags, mount};
use nix::sys::wait::waitpid;
use nix::unistd::{Gid, Uid, chdir, getgroups, setresgid, setresuid};
use serde::{Deserialize, Serialize};

use super::file_op::FileOp;
use super::protocol::{Identity, LaunchMessage, LauncherRequest};
use super::subids::{SubidGrant, SubidsUnavailable};
use super::{Namespace, cgroup, identity, landlock_domain, launch, packet, removal};
use crate::contract::{SandboxError, SandboxLimits};

/// One result of the survey.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SurveyFinding {
    /// The examined feature.
    pub what: &'static str,
    /// Whether the feature works.
    #[serde(rename = "verdict")]
    pub status: SurveyStatus,
    /// The result.
    pub text: String,
    /// The remedy.
    pub fix: Option<String>,
}

/// Whether a feature works.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SurveyStatus {
    /// The feature works.
    #[serde(rename = "well")]
    Ok,
    /// Sandboxes work with a missing protection or feature.
    Weaker,
    /// No sandbox works without the feature.
    Missing,
}

/// The results of the trials; `None` for a feature that was not tried.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Trials {
    namespaces: Option<TrialOutcome>,
    mounts: Option<TrialOutcome>,
    overlay: Option<TrialOutcome>,
    proc: Option<TrialOutcome>,
    time: Option<TrialOutcome>,
    landlock: u32,
}

/// The launcher's reply to a survey.
#[derive(Deserialize)]
#[serde(untagged)]
enum Reply {
    Trials(Trials),
    LaunchMessage(LaunchMessage),
}

/// The result of a trial; an error is the kernel's reason.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct TrialOutcome(std::result::Result<(), String>);

impl TrialOutcome {
    /// Converts the result of a trial that was made.
    fn tried<E: Into<Error>>(result: std::result::Result<(), E>) -> Option<Self> {
        Some(Self(result.map_err(|error| error.into().to_string())))
    }
}

impl Namespace {
    /// Surveys this machine. Takes a few milliseconds.
    pub fn survey(&self) -> std::result::Result<Vec<SurveyFinding>, SandboxError> {
        let system = || SandboxError::system("checking the features of this machine");
        fs::DirBuilder::new()
            .recursive(true)
            .create(&self.directory)
            .map_err(system())?;
        let (channel, child_end) = packet::socket_pair().map_err(system())?;
        let mut launcher = std::process::Command::new(&self.program)
            .args(&self.arguments)
            .env_clear()
            .stdin(Stdio::from(child_end))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(system())?;
        let directory = self.directory.clone();
        let received = packet::send(channel.as_fd(), &LauncherRequest::Survey { directory }, &[])
            .and_then(|()| packet::receive::<Reply>(channel.as_fd()));
        drop(channel);
        let _ = launcher.wait();
        let (reply, _) = received
            .map_err(system())?
            .ok_or_else(|| system()(Error::other("the launcher exited early")))?;
        let trials = match reply {
            Reply::Trials(trials) => trials,
            Reply::LaunchMessage(LaunchMessage::Failed { step, reason }) => {
                return Err(system()(Error::other(format!("{step}: {reason}"))));
            }
            Reply::LaunchMessage(_) => {
                return Err(system()(Error::other("the launcher has no reply")));
            }
        };
        let ids = subordinate_ids(|grant| {
            // The path does not exist: the operation only tries to enter the subid map.
            let path = self.directory.join(".survey-ids");
            let subid_map = grant.map_for_all();
            self.run_file_op_in_child(subid_map, None, FileOp::Remove { path })
                .map(drop)
        });
        Ok(findings(&trials, &self.program, ids))
    }
}

fn findings(trials: &Trials, program: &Path, ids: SurveyFinding) -> Vec<SurveyFinding> {
    vec![
        user_namespaces(trials, &UserNamespaceSettings::read(), program),
        overlay(trials),
        proc(trials),
        cgroups(),
        landlock(trials.landlock),
        time(trials),
        ids,
        groups(),
    ]
}

fn ok_finding(what: &'static str, text: impl Into<String>) -> SurveyFinding {
    SurveyFinding {
        what,
        status: SurveyStatus::Ok,
        text: text.into(),
        fix: None,
    }
}

fn finding(
    what: &'static str,
    status: SurveyStatus,
    text: impl Into<String>,
    fix: impl Into<String>,
) -> SurveyFinding {
    SurveyFinding {
        what,
        status,
        text: text.into(),
        fix: Some(fix.into()),
    }
}

/// Settings that forbid user namespaces.
#[derive(Default)]
struct UserNamespaceSettings {
    /// Ubuntu 24.04: user namespaces can be created, but give no capabilities.
    apparmor: bool,
    /// Debian's old setting disables user namespaces.
    disabled: bool,
    /// The maximum number of user namespaces is 0.
    max_is_zero: bool,
}

impl UserNamespaceSettings {
    fn read() -> Self {
        let is = |path: &str, value: &str| {
            fs::read_to_string(path).is_ok_and(|text| text.trim() == value)
        };
        let kernel = "/proc/sys/kernel";
        Self {
            apparmor: is(
                &format!("{kernel}/apparmor_restrict_unprivileged_userns"),
                "1",
            ),
            disabled: is(&format!("{kernel}/unprivileged_userns_clone"), "0"),
            max_is_zero: is("/proc/sys/user/max_user_namespaces", "0"),
        }
    }

    fn fix(&self, program: &Path) -> String {
        if self.max_is_zero {
            "as root: sysctl user.max_user_namespaces=15000".to_owned()
        } else if self.disabled {
            "as root: sysctl kernel.unprivileged_userns_clone=1".to_owned()
        } else if self.apparmor {
            format!(
                "as root, once: printf 'abi <abi/4.0>,\\nprofile palisade {} \
                 flags=(unconfined) {{\\n  userns,\\n}}\\n' > /etc/apparmor.d/palisade && \
                 apparmor_parser -r /etc/apparmor.d/palisade",
                program.display()
            )
        } else {
            "inside a container: start it with --security-opt seccomp=unconfined --security-opt \
             apparmor=unconfined --security-opt systempaths=unconfined, or use the docker backend"
                .to_owned()
        }
    }
}

fn user_namespaces(
    trials: &Trials,
    settings: &UserNamespaceSettings,
    program: &Path,
) -> SurveyFinding {
    const NAME: &str = "user namespaces";
    let refused = |text: String| finding(NAME, SurveyStatus::Missing, text, settings.fix(program));
    match (&trials.namespaces, &trials.mounts) {
        (Some(TrialOutcome(Ok(()))), Some(TrialOutcome(Ok(())))) => ok_finding(NAME, "allowed"),
        (Some(TrialOutcome(Err(reason))), _) => refused(format!("refused: {reason}")),
        (_, Some(TrialOutcome(Err(reason)))) => {
            refused(format!("allowed, but without capabilities: {reason}"))
        }
        (_, None) | (None, _) => refused("not tried".to_owned()),
    }
}

fn overlay(trials: &Trials) -> SurveyFinding {
    const NAME: &str = "overlay in a user namespace";
    match &trials.overlay {
        Some(TrialOutcome(Ok(()))) => ok_finding(NAME, "works"),
        Some(TrialOutcome(Err(reason))) => finding(
            NAME,
            SurveyStatus::Weaker,
            format!(
                "refused: {reason}; system directories are read-only inside, and neither host paths nor a rootfs work"
            ),
            "use Linux 5.11 or newer, as root: modprobe overlay, and keep the state directory on ext4, xfs or btrfs",
        ),
        None => finding(
            NAME,
            SurveyStatus::Weaker,
            "not tried",
            "see user namespaces",
        ),
    }
}

fn proc(trials: &Trials) -> SurveyFinding {
    const NAME: &str = "a new /proc";
    match &trials.proc {
        Some(TrialOutcome(Ok(()))) => ok_finding(NAME, "works"),
        Some(TrialOutcome(Err(reason))) => finding(
            NAME,
            SurveyStatus::Missing,
            format!("refused: {reason}"),
            "inside a container: start it with --security-opt systempaths=unconfined, or use the docker backend",
        ),
        None => finding(
            NAME,
            SurveyStatus::Missing,
            "not tried",
            "see user namespaces",
        ),
    }
}

fn cgroups() -> SurveyFinding {
    const NAME: &str = "cgroups";
    let planned = cgroup::plan(&format!("palisade-survey-{}", std::process::id()));
    let (made, cgroup_limits) = cgroup::create_planned(&planned, SandboxLimits::default());
    let freezes = cgroup::is_frozen(&made).is_some();
    let _ = cgroup::remove(&made);
    let missing: Vec<_> = [
        (cgroup_limits.memory, "memory"),
        (cgroup_limits.pids, "processes"),
        (cgroup_limits.cpu, "processor time"),
        (freezes, "freezing"),
    ]
    .into_iter()
    .filter(|(has_it, _)| !has_it)
    .map(|(_, what)| what)
    .collect();
    if missing.is_empty() {
        return ok_finding(NAME, "memory, processes, processor time and freezing");
    }
    let fix = if Uid::effective().is_root() {
        "boot with systemd.unified_cgroup_hierarchy=1; in a container, give it a writable cgroup"
    } else {
        "start the gate in its own scope: systemd-run --user --scope -p Delegate=yes palisade …"
    };
    finding(
        NAME,
        SurveyStatus::Weaker,
        format!(
            "not for {}: limits hold per process and user only, agents run at idle priority, \
             sandbox.limits.cpus cannot be set, and a pause is done by signals",
            missing.join(", ")
        ),
        fix,
    )
}

fn landlock(version: u32) -> SurveyFinding {
    const NAME: &str = "landlock";
    match version {
        0 => finding(
            NAME,
            SurveyStatus::Weaker,
            "not active; sandboxes have no second layer of isolation",
            "boot with landlock in the lsm= list (Linux 5.13 or newer)",
        ),
        1 => finding(
            NAME,
            SurveyStatus::Weaker,
            "version 1, which forbids renames between directories; not used",
            "use Linux 5.19 or newer",
        ),
        2..6 => finding(
            NAME,
            SurveyStatus::Weaker,
            format!("version {version}: files only"),
            "use Linux 6.12 or newer for signals and abstract sockets",
        ),
        _ => ok_finding(NAME, format!("version {version}")),
    }
}

fn time(trials: &Trials) -> SurveyFinding {
    const NAME: &str = "time namespaces";
    match &trials.time {
        Some(TrialOutcome(Ok(()))) => ok_finding(NAME, "allowed"),
        Some(TrialOutcome(Err(reason))) => finding(
            NAME,
            SurveyStatus::Weaker,
            format!("refused: {reason}; the time since boot is visible inside either way"),
            "use Linux 5.6 or newer with CONFIG_TIME_NS",
        ),
        None => finding(
            NAME,
            SurveyStatus::Weaker,
            "not tried",
            "see user namespaces",
        ),
    }
}

/// Checks the subordinate ids, and whether they can be mapped.
fn subordinate_ids(take: impl FnOnce(&SubidGrant) -> Result<()>) -> SurveyFinding {
    const NAME: &str = "subordinate ids";
    if Uid::effective().is_root() {
        let text = "not needed by root, which allocates an id range for each sandbox";
        return ok_finding(NAME, text);
    }
    let weaker = |found: String, fix| {
        let text = format!("{found}; --root does not work without them");
        finding(NAME, SurveyStatus::Weaker, text, fix)
    };
    let grant = match SubidGrant::read() {
        Ok(grant) => grant,
        Err(SubidsUnavailable { found, fix }) => return weaker(found, fix),
    };
    match take(&grant) {
        Ok(()) => ok_finding(
            NAME,
            format!("sufficient for {} sandboxes with --root", grant.capacity()),
        ),
        Err(reason) => weaker(
            reason.to_string(),
            "start the gate where programs may be setuid (no NoNewPrivileges, no nosuid mount), \
             and as the user and group of /etc/passwd"
                .to_owned(),
        ),
    }
}

fn groups() -> SurveyFinding {
    const NAME: &str = "supplementary groups";
    if Uid::effective().is_root() {
        return ok_finding(NAME, "dropped");
    }
    let own = Gid::effective();
    let kept: Vec<_> = getgroups()
        .unwrap_or_default()
        .into_iter()
        .filter(|group| *group != own)
        .map(|group| {
            nix::unistd::Group::from_gid(group)
                .ok()
                .flatten()
                .map_or_else(|| group.to_string(), |group| group.name)
        })
        .collect();
    if kept.is_empty() {
        return ok_finding(NAME, "none");
    }
    finding(
        NAME,
        SurveyStatus::Weaker,
        format!(
            "only root can drop them, so agents have the read permissions of these groups: {}",
            kept.join(", ")
        ),
        "start the gate as root, or as a user without them",
    )
}

/// The launcher's part of the survey; it needs a single thread.
pub(crate) fn run_trials(channel: BorrowedFd<'_>, directory: &Path) -> Result<()> {
    let mut trials = Trials {
        landlock: landlock_domain::version(),
        ..Trials::default()
    };
    trials.time = TrialOutcome::tried(
        launch::clone_into(libc::CLONE_NEWUSER | libc::CLONE_NEWTIME, None).map(
            |child| match child {
                None => std::process::exit(0),
                Some(child) => drop(waitpid(child, None)),
            },
        ),
    );
    let place = directory.join(format!(".survey-{}", std::process::id()));
    let tried = try_namespaces(&mut trials, &place);
    let _ = removal::remove_tree(&place);
    tried?;
    packet::send(channel, &trials, &[])
}

fn try_namespaces(trials: &mut Trials, place: &Path) -> Result<()> {
    let root = Uid::effective().is_root();
    let identity = identity::choose(root, &place.to_string_lossy(), &[], None)
        .ok_or_else(|| Error::other("no ids"))?;
    fs::create_dir(place)?;
    let mut places: Vec<PathBuf> = ["lower", "upper", "work", "merged", "proc"]
        .map(|name| place.join(name))
        .to_vec();
    for one in &places {
        fs::create_dir(one)?;
    }
    places.push(place.to_owned());
    if let Identity::Range { first, .. } = identity {
        for one in &places {
            chown(one, Some(first), Some(first))?;
        }
    }
    // The mounts use relative paths, because the new id may have no permission for the parent
    // directories.
    chdir(place)?;
    let (parent_end, child_end) = packet::socket_pair()?;
    let flags = libc::CLONE_NEWUSER
        | libc::CLONE_NEWNS
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNET
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUTS;
    let child = match launch::clone_into(flags, None) {
        Ok(None) => {
            drop(parent_end);
            let code = i32::from(try_mounts(child_end.as_fd(), identity, trials.clone()).is_err());
            std::process::exit(code)
        }
        Ok(Some(child)) => child,
        Err(error) => {
            trials.namespaces = TrialOutcome::tried(Err(error));
            return Ok(());
        }
    };
    drop(child_end);
    let mapped = identity::write_maps(child.as_raw(), identity).map_err(|error| error.source);
    trials.namespaces = TrialOutcome::tried(mapped);
    if packet::send(parent_end.as_fd(), &LaunchMessage::Go, &[]).is_ok()
        && let Ok(Some((found, _))) = packet::receive::<Trials>(parent_end.as_fd())
    {
        let namespaces = trials.namespaces.take();
        *trials = found;
        trials.namespaces = namespaces;
    }
    drop(parent_end);
    let _ = waitpid(child, None);
    Ok(())
}

fn try_mounts(channel: BorrowedFd<'_>, identity: Identity, mut trials: Trials) -> Result<()> {
    packet::receive::<LaunchMessage>(channel)?;
    if let Identity::Range { .. } = identity {
        let (uid, gid) = (Uid::from_raw(0), Gid::from_raw(0));
        setresgid(gid, gid, gid)?;
        setresuid(uid, uid, uid)?;
    }
    let none = None::<&str>;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    trials.mounts = TrialOutcome::tried(mount(none, "/", none, private, none));
    let restricted = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    let options = Some("lowerdir=lower,upperdir=upper,workdir=work,userxattr");
    let overlay = mount(
        Some("overlay"),
        "merged",
        Some("overlay"),
        restricted,
        options,
    );
    trials.overlay = TrialOutcome::tried(overlay.map_err(Error::from).and_then(|()| {
        // Writing may fail even if the mount succeeded.
        fs::write("merged/file", "")
    }));
    let fresh = mount(
        Some("proc"),
        "proc",
        Some("proc"),
        restricted,
        Some("hidepid=2"),
    );
    trials.proc = TrialOutcome::tried(fresh);
    packet::send(channel, &trials, &[])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tried(namespaces: &str, mounts: &str) -> Trials {
        let outcome = |word: &str| match word {
            "" => Some(TrialOutcome(Ok(()))),
            word => Some(TrialOutcome(Err(word.to_owned()))),
        };
        Trials {
            namespaces: outcome(namespaces),
            mounts: outcome(mounts),
            ..Trials::default()
        }
    }

    #[test]
    fn refused_feature_has_the_remedy_of_its_cause() {
        let program = Path::new("/usr/bin/palisade");
        let text = |trials: &Trials, settings: &UserNamespaceSettings| {
            user_namespaces(trials, settings, program)
        };
        let none = UserNamespaceSettings::default();
        assert_eq!(text(&tried("", ""), &none).status, SurveyStatus::Ok);
        let apparmor = UserNamespaceSettings {
            apparmor: true,
            ..UserNamespaceSettings::default()
        };
        let found = text(&tried("", "EACCES"), &apparmor);
        assert_eq!(found.status, SurveyStatus::Missing);
        let fix = found.fix.unwrap();
        assert!(fix.contains("profile palisade /usr/bin/palisade"), "{fix}");
        let off = UserNamespaceSettings {
            disabled: true,
            ..UserNamespaceSettings::default()
        };
        let fix = text(&tried("EPERM", ""), &off).fix.unwrap();
        assert!(fix.contains("unprivileged_userns_clone=1"), "{fix}");
        let fix = text(&tried("EPERM", ""), &none).fix.unwrap();
        assert!(fix.contains("container"), "{fix}");
        let never = text(&Trials::default(), &none);
        assert_eq!(never.status, SurveyStatus::Missing);
    }

    #[test]
    fn every_problem_has_a_remedy() {
        for trials in [Trials::default(), tried("EPERM", "EPERM"), tried("", "")] {
            let ids = subordinate_ids(|_| Err(Error::other("no")));
            for finding in findings(&trials, Path::new("/usr/bin/palisade"), ids) {
                let fixable = finding.status != SurveyStatus::Ok;
                assert_eq!(fixable, finding.fix.is_some(), "{finding:?}");
            }
        }
    }
}
