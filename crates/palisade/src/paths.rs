//! Where things are on this machine.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use listen::MAX_SOCKET_PATH;

use crate::exit::{Exit, Failure};

/// The log of a gate in the background, in the state directory.
pub const LOG: &str = "gate.log";

/// The lock of the process that restarts a gate in the background.
pub const WATCHDOG_LOCK: &str = "watchdog.lock";

/// Why a gate that kept dying is not restarted any more.
pub const FAILURE: &str = "gate.failed";

/// The first file of that name in the directories of PATH.
pub fn find_program(name: &OsStr) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|directory| directory.join(name))
        .find(|file| file.is_file())
}

/// The places one gate lives in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths {
    /// Database, lock, log; 0700.
    pub state_dir: PathBuf,
    /// The control socket.
    pub control: PathBuf,
    /// The operator's file.
    pub config: ConfigPath,
}

/// Where the operator's file is, or would be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConfigPath {
    /// Named by the operator: it must be there.
    Named(PathBuf),
    /// The usual place: it counts from the moment it is there.
    Usual(PathBuf),
    /// There is no usual place.
    Nowhere,
}

impl ConfigPath {
    /// The file to read now; without one, everything has its default.
    pub fn current(&self) -> Option<&Path> {
        match self {
            ConfigPath::Named(path) => Some(path),
            ConfigPath::Usual(path) => path.symlink_metadata().is_ok().then_some(path),
            ConfigPath::Nowhere => None,
        }
    }

    /// The file, whether or not it is there.
    pub fn path(&self) -> Option<&Path> {
        match self {
            ConfigPath::Named(path) | ConfigPath::Usual(path) => Some(path),
            ConfigPath::Nowhere => None,
        }
    }
}

/// What the command line and the environment said about places.
#[derive(Clone, Debug, Default)]
pub struct PathOptions {
    /// `--config`.
    pub config: Option<PathBuf>,
    /// `--state-dir`.
    pub state_dir: Option<PathBuf>,
    /// `--control`.
    pub control: Option<PathBuf>,
}

impl Paths {
    /// Decides where things are. `env` reads the environment.
    pub fn resolve(wishes: &PathOptions, env: impl Fn(&str) -> Option<OsString>) -> Result<Self> {
        // The XDG specification tells programs to ignore relative values.
        let absolute = |name: &str| {
            env(name)
                .map(PathBuf::from)
                .filter(|path| path.is_absolute())
        };
        let home = |under: &str, flag: &str| {
            absolute("HOME")
                .map(|home| home.join(under))
                .ok_or_else(|| {
                    Failure::new(
                        Exit::Usage,
                        format!("HOME is not set; say where with {flag}"),
                    )
                })
        };
        let state_dir = match &wishes.state_dir {
            Some(given) => std::path::absolute(given)?,
            None => match absolute("XDG_STATE_HOME") {
                Some(base) => base.join("palisade"),
                None => home(".local/state/palisade", "--state-dir")?,
            },
        };
        let control = match (
            &wishes.control,
            &wishes.state_dir,
            absolute("XDG_RUNTIME_DIR"),
        ) {
            (Some(given), _, _) => std::path::absolute(given)?,
            (None, None, Some(runtime)) => runtime.join("palisade/control.sock"),
            (None, Some(_), _) | (None, None, None) => state_dir.join("control.sock"),
        };
        if control.as_os_str().len() > MAX_SOCKET_PATH {
            return Err(Failure::new(
                Exit::Usage,
                format!(
                    "the control socket's path is {} bytes long, and {MAX_SOCKET_PATH} is the \
                     most the system takes: {}; choose a shorter one with --control",
                    control.as_os_str().len(),
                    control.display()
                ),
            )
            .into());
        }
        let config = match (&wishes.config, absolute("XDG_CONFIG_HOME")) {
            (Some(given), _) => ConfigPath::Named(std::path::absolute(given)?),
            (None, Some(base)) => ConfigPath::Usual(base.join("palisade/palisade.yaml")),
            (None, None) => match home(".config/palisade/palisade.yaml", "--config") {
                Ok(path) => ConfigPath::Usual(path),
                Err(_) => ConfigPath::Nowhere,
            },
        };
        Ok(Self {
            state_dir,
            control,
            config,
        })
    }

    /// Makes the state directory and the socket's, or checks that they are the
    /// operator's alone.
    pub fn prepare(&self) -> Result<()> {
        make_private(&self.state_dir)?;
        match self.control.parent() {
            Some(parent) if parent != self.state_dir => make_safe_for_socket(parent),
            _ => Ok(()),
        }
    }

    /// The lock that makes a gate the only one in its state directory.
    pub fn lock(&self) -> PathBuf {
        self.state_dir.join("lock")
    }

    /// Where a gate in the background writes.
    pub fn log(&self) -> PathBuf {
        self.state_dir.join(LOG)
    }

    /// The lock of the process that restarts the gate.
    pub fn watchdog_lock(&self) -> PathBuf {
        self.state_dir.join(WATCHDOG_LOCK)
    }

    /// What the operator has trusted.
    pub fn trust(&self) -> PathBuf {
        self.state_dir.join("trust.json")
    }
}

fn make_dir(path: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
}

/// Whoever may write to the socket's directory could put a socket of their own in its
/// place. A sticky directory (`/tmp`) prevents that.
fn make_safe_for_socket(path: &Path) -> Result<()> {
    make_dir(path).with_context(|| format!("cannot create {}", path.display()))?;
    let found = std::fs::metadata(path)?;
    let mode = found.mode();
    let shared = mode & 0o022 != 0 && mode & 0o1000 == 0;
    let own = [0, nix::unistd::geteuid().as_raw()].contains(&found.uid());
    if shared || !own {
        let message = format!(
            "others may write to the control socket's directory {} (mode {:o}, uid {}); choose \
             another with --control",
            path.display(),
            mode & 0o7777,
            found.uid()
        );
        return Err(Failure::new(Exit::Usage, message).into());
    }
    Ok(())
}

/// A state directory that others can enter would give them the database and the CA.
/// It is refused rather than changed: `--state-dir /tmp` must not close /tmp.
fn make_private(path: &Path) -> Result<()> {
    make_dir(path).with_context(|| format!("cannot create {}", path.display()))?;
    let found = std::fs::metadata(path)?;
    let own = nix::unistd::geteuid().as_raw();
    let complaint = if found.uid() != own {
        format!("belongs to uid {}, not to you", found.uid())
    } else if found.mode() & 0o077 != 0 {
        format!(
            "is open to others (mode {:o}); run: chmod 700 {}",
            found.mode() & 0o777,
            path.display()
        )
    } else {
        return Ok(());
    };
    Err(Failure::new(
        Exit::Usage,
        format!("the state directory {} {complaint}", path.display()),
    )
    .into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(wishes: &PathOptions, env: &[(&str, &str)]) -> Result<Paths> {
        let find = |name: &str| {
            env.iter()
                .find(|(known, _)| *known == name)
                .map(|(_, value)| OsString::from(value))
        };
        Paths::resolve(wishes, find)
    }

    #[test]
    fn the_socket_follows_an_explicit_state_directory() {
        let env = [("HOME", "/home/o"), ("XDG_RUNTIME_DIR", "/run/user/1000")];
        let usual = resolve(&PathOptions::default(), &env).unwrap();
        assert_eq!(usual.state_dir, Path::new("/home/o/.local/state/palisade"));
        assert_eq!(
            usual.control,
            Path::new("/run/user/1000/palisade/control.sock")
        );

        let explicit = PathOptions {
            state_dir: Some("/s".into()),
            ..PathOptions::default()
        };
        assert_eq!(
            resolve(&explicit, &env).unwrap().control,
            Path::new("/s/control.sock")
        );

        let both = PathOptions {
            control: Some("/c.sock".into()),
            ..explicit
        };
        assert_eq!(resolve(&both, &env).unwrap().control, Path::new("/c.sock"));
    }

    #[test]
    fn relative_xdg_values_are_ignored_and_a_missing_home_is_explained() {
        let env = [
            ("HOME", "/home/o"),
            ("XDG_STATE_HOME", "state"),
            ("XDG_RUNTIME_DIR", "run"),
        ];
        let paths = resolve(&PathOptions::default(), &env).unwrap();
        assert_eq!(paths.state_dir, Path::new("/home/o/.local/state/palisade"));
        assert_eq!(
            paths.control,
            Path::new("/home/o/.local/state/palisade/control.sock")
        );

        let error = resolve(&PathOptions::default(), &[]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "HOME is not set; say where with --state-dir"
        );
    }

    #[test]
    fn a_socket_path_of_107_bytes_fits_and_one_of_108_does_not() {
        let of_length = |length: usize| {
            let control = PathBuf::from(format!("/{}", "x".repeat(length - 1)));
            let wishes = PathOptions {
                control: Some(control),
                state_dir: Some("/s".into()),
                config: None,
            };
            resolve(&wishes, &[])
        };
        assert!(of_length(107).is_ok());
        let error = of_length(108).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("108 bytes long, and 107 is the most"),
            "{error}"
        );
    }

    #[test]
    fn a_state_directory_open_to_others_is_refused_and_left_alone() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let error = make_private(dir.path()).unwrap_err();
        assert!(
            error.to_string().contains("open to others (mode 755)"),
            "{error}"
        );
        assert_eq!(std::fs::metadata(dir.path()).unwrap().mode() & 0o777, 0o755);
        let own = dir.path().join("socket");
        make_safe_for_socket(&own).unwrap();
        std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(make_safe_for_socket(&own).is_err());
        std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o1777)).unwrap();
        assert!(make_safe_for_socket(&own).is_ok());
        let inner = dir.path().join("a/b");
        make_private(&inner).unwrap();
        assert_eq!(std::fs::metadata(inner).unwrap().mode() & 0o777, 0o700);
    }
}
