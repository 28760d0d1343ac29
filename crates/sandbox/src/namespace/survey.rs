//! Survey of what this machine allows, found by trying it in temporary processes and a temporary
//! directory.

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
    /// The verdict.
    pub verdict: SurveyVerdict,
    /// The result.
    pub text: String,
    /// The remedy.
    pub fix: Option<String>,
}

/// The verdict about a feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SurveyVerdict {
    /// The feature works.
    Well,
    /// Sandboxes work with a missing protection or feature.
    Weaker,
    /// No sandbox works without the feature.
    Missing,
}

/// The results of the trials; `None` was not tried.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Trials {
    namespaces: Option<Outcome>,
    mounts: Option<Outcome>,
    overlay: Option<Outcome>,
    proc: Option<Outcome>,
    time: Option<Outcome>,
    landlock: u32,
}

/// The launcher's reply to a survey.
#[derive(Deserialize)]
#[serde(untagged)]
enum Reply {
    Trials(Trials),
    LaunchMessage(LaunchMessage),
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Outcome(std::result::Result<(), String>);

impl Outcome {
    fn of<E: Into<Error>>(result: std::result::Result<(), E>) -> Option<Self> {
        Some(Self(result.map_err(|error| error.into().to_string())))
    }
}

impl Namespace {
    /// Surveys this machine. Takes a few milliseconds.
    pub fn survey(&self) -> std::result::Result<Vec<SurveyFinding>, SandboxError> {
        let system = || SandboxError::system("checking what this machine allows");
        fs::DirBuilder::new()
            .recursive(true)
            .create(&self.directory)
            .map_err(system())?;
        let (line, its) = packet::socket_pair().map_err(system())?;
        let mut launcher = std::process::Command::new(&self.program)
            .args(&self.arguments)
            .env_clear()
            .stdin(Stdio::from(its))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(system())?;
        let directory = self.directory.clone();
        let received = packet::send(line.as_fd(), &LauncherRequest::Survey { directory }, &[])
            .and_then(|()| packet::receive::<Reply>(line.as_fd()));
        drop(line);
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
            // The path does not exist: the trial is entering the subid map.
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
        user_namespaces(trials, &Causes::read(), program),
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
        verdict: SurveyVerdict::Well,
        text: text.into(),
        fix: None,
    }
}

fn finding(
    what: &'static str,
    verdict: SurveyVerdict,
    text: impl Into<String>,
    fix: impl Into<String>,
) -> SurveyFinding {
    SurveyFinding {
        what,
        verdict,
        text: text.into(),
        fix: Some(fix.into()),
    }
}

/// Settings that forbid user namespaces.
#[derive(Default)]
struct Causes {
    /// Ubuntu 24.04: they can be created, but give no capabilities.
    apparmor: bool,
    /// Debian's old setting.
    switched_off: bool,
    none_allowed: bool,
}

impl Causes {
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
            switched_off: is(&format!("{kernel}/unprivileged_userns_clone"), "0"),
            none_allowed: is("/proc/sys/user/max_user_namespaces", "0"),
        }
    }

    fn fix(&self, program: &Path) -> String {
        if self.none_allowed {
            "as root: sysctl user.max_user_namespaces=15000".to_owned()
        } else if self.switched_off {
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

fn user_namespaces(trials: &Trials, causes: &Causes, program: &Path) -> SurveyFinding {
    const NAME: &str = "user namespaces";
    let refused = |text: String| finding(NAME, SurveyVerdict::Missing, text, causes.fix(program));
    match (&trials.namespaces, &trials.mounts) {
        (Some(Outcome(Ok(()))), Some(Outcome(Ok(())))) => ok_finding(NAME, "allowed"),
        (Some(Outcome(Err(why))), _) => refused(format!("refused: {why}")),
        (_, Some(Outcome(Err(why)))) => {
            refused(format!("allowed, but without capabilities: {why}"))
        }
        (_, None) | (None, _) => refused("not tried".to_owned()),
    }
}

fn overlay(trials: &Trials) -> SurveyFinding {
    const NAME: &str = "overlay in a user namespace";
    match &trials.overlay {
        Some(Outcome(Ok(()))) => ok_finding(NAME, "works"),
        Some(Outcome(Err(why))) => finding(
            NAME,
            SurveyVerdict::Weaker,
            format!(
                "refused: {why}; system directories are read-only inside, and neither host paths nor a rootfs work"
            ),
            "use Linux 5.11 or newer, as root: modprobe overlay, and keep the state directory on ext4, xfs or btrfs",
        ),
        None => finding(
            NAME,
            SurveyVerdict::Weaker,
            "not tried",
            "see user namespaces",
        ),
    }
}

fn proc(trials: &Trials) -> SurveyFinding {
    const NAME: &str = "a new /proc";
    match &trials.proc {
        Some(Outcome(Ok(()))) => ok_finding(NAME, "works"),
        Some(Outcome(Err(why))) => finding(
            NAME,
            SurveyVerdict::Missing,
            format!("refused: {why}"),
            "inside a container: start it with --security-opt systempaths=unconfined, or use the docker backend",
        ),
        None => finding(
            NAME,
            SurveyVerdict::Missing,
            "not tried",
            "see user namespaces",
        ),
    }
}

fn cgroups() -> SurveyFinding {
    const NAME: &str = "cgroups";
    let planned = cgroup::plan(&format!("palisade-survey-{}", std::process::id()));
    let (made, counted) = cgroup::make(&planned, SandboxLimits::default());
    let freezes = cgroup::is_frozen(&made).is_some();
    let _ = cgroup::remove(&made);
    let missing: Vec<_> = [
        (counted.memory, "memory"),
        (counted.pids, "processes"),
        (counted.cpu, "processor time"),
        (freezes, "freezing"),
    ]
    .into_iter()
    .filter(|(there, _)| !there)
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
        SurveyVerdict::Weaker,
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
            SurveyVerdict::Weaker,
            "not active; sandboxes have no second layer of isolation",
            "boot with landlock in the lsm= list (Linux 5.13 or newer)",
        ),
        1 => finding(
            NAME,
            SurveyVerdict::Weaker,
            "version 1, which forbids renames between directories; not used",
            "use Linux 5.19 or newer",
        ),
        2..6 => finding(
            NAME,
            SurveyVerdict::Weaker,
            format!("version {version}: files only"),
            "use Linux 6.12 or newer for signals and abstract sockets",
        ),
        _ => ok_finding(NAME, format!("version {version}")),
    }
}

fn time(trials: &Trials) -> SurveyFinding {
    const NAME: &str = "time namespaces";
    match &trials.time {
        Some(Outcome(Ok(()))) => ok_finding(NAME, "allowed"),
        Some(Outcome(Err(why))) => finding(
            NAME,
            SurveyVerdict::Weaker,
            format!("refused: {why}; the time since boot is visible inside either way"),
            "use Linux 5.6 or newer with CONFIG_TIME_NS",
        ),
        None => finding(
            NAME,
            SurveyVerdict::Weaker,
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
        finding(NAME, SurveyVerdict::Weaker, text, fix)
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
        Err(why) => weaker(
            why.to_string(),
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
        SurveyVerdict::Weaker,
        format!(
            "only root can drop them, so agents have the read permissions of these groups: {}",
            kept.join(", ")
        ),
        "start the gate as root, or as a user without them",
    )
}

/// The launcher's part of the survey; it needs a single thread.
pub(crate) fn run_trials(line: BorrowedFd<'_>, directory: &Path) -> Result<()> {
    let mut trials = Trials {
        landlock: landlock_domain::version(),
        ..Trials::default()
    };
    trials.time = Outcome::of(
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
    packet::send(line, &trials, &[])
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
    // Not by path, because the new id may have no permission for the parents.
    chdir(place)?;
    let (ours, its) = packet::socket_pair()?;
    let flags = libc::CLONE_NEWUSER
        | libc::CLONE_NEWNS
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWNET
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUTS;
    let child = match launch::clone_into(flags, None) {
        Ok(None) => {
            drop(ours);
            let code = i32::from(try_inside(its.as_fd(), identity, trials.clone()).is_err());
            std::process::exit(code)
        }
        Ok(Some(child)) => child,
        Err(error) => {
            trials.namespaces = Outcome::of(Err(error));
            return Ok(());
        }
    };
    drop(its);
    let mapped = identity::write_maps(child.as_raw(), identity).map_err(|error| error.source);
    trials.namespaces = Outcome::of(mapped);
    if packet::send(ours.as_fd(), &LaunchMessage::Go, &[]).is_ok()
        && let Ok(Some((found, _))) = packet::receive::<Trials>(ours.as_fd())
    {
        let namespaces = trials.namespaces.take();
        *trials = found;
        trials.namespaces = namespaces;
    }
    drop(ours);
    let _ = waitpid(child, None);
    Ok(())
}

fn try_inside(line: BorrowedFd<'_>, identity: Identity, mut trials: Trials) -> Result<()> {
    packet::receive::<LaunchMessage>(line)?;
    if let Identity::Range { .. } = identity {
        let (uid, gid) = (Uid::from_raw(0), Gid::from_raw(0));
        setresgid(gid, gid, gid)?;
        setresuid(uid, uid, uid)?;
    }
    let none = None::<&str>;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    trials.mounts = Outcome::of(mount(none, "/", none, private, none));
    let quiet = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    let options = Some("lowerdir=lower,upperdir=upper,workdir=work,userxattr");
    let overlay = mount(Some("overlay"), "merged", Some("overlay"), quiet, options);
    trials.overlay = Outcome::of(overlay.map_err(Error::from).and_then(|()| {
        // A successful mount does not imply that writing works.
        fs::write("merged/file", "")
    }));
    let fresh = mount(Some("proc"), "proc", Some("proc"), quiet, Some("hidepid=2"));
    trials.proc = Outcome::of(fresh);
    packet::send(line, &trials, &[])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tried(namespaces: &str, mounts: &str) -> Trials {
        let outcome = |word: &str| match word {
            "" => Some(Outcome(Ok(()))),
            word => Some(Outcome(Err(word.to_owned()))),
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
        let text = |trials: &Trials, causes: &Causes| user_namespaces(trials, causes, program);
        let none = Causes::default();
        assert_eq!(text(&tried("", ""), &none).verdict, SurveyVerdict::Well);
        let apparmor = Causes {
            apparmor: true,
            ..Causes::default()
        };
        let found = text(&tried("", "EACCES"), &apparmor);
        assert_eq!(found.verdict, SurveyVerdict::Missing);
        let fix = found.fix.unwrap();
        assert!(fix.contains("profile palisade /usr/bin/palisade"), "{fix}");
        let off = Causes {
            switched_off: true,
            ..Causes::default()
        };
        let fix = text(&tried("EPERM", ""), &off).fix.unwrap();
        assert!(fix.contains("unprivileged_userns_clone=1"), "{fix}");
        let fix = text(&tried("EPERM", ""), &none).fix.unwrap();
        assert!(fix.contains("container"), "{fix}");
        let never = text(&Trials::default(), &none);
        assert_eq!(never.verdict, SurveyVerdict::Missing);
    }

    #[test]
    fn every_problem_has_a_remedy() {
        for trials in [Trials::default(), tried("EPERM", "EPERM"), tried("", "")] {
            let ids = subordinate_ids(|_| Err(Error::other("no")));
            for finding in findings(&trials, Path::new("/usr/bin/palisade"), ids) {
                let fixable = finding.verdict != SurveyVerdict::Well;
                assert_eq!(fixable, finding.fix.is_some(), "{finding:?}");
            }
        }
    }
}
