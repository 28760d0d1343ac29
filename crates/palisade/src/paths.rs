//! Paths of the gate's files: state directory, control socket, configuration.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use listen::MAX_SOCKET_PATH;

use crate::exit::{CliError, CliExit};

/// The log of a gate in the background, in the state directory.
pub const LOG: &str = "gate.log";

/// The lock of the process that restarts a gate in the background.
pub const WATCHDOG_LOCK: &str = "watchdog.lock";

/// The file with the reason why a gate is no longer restarted.
pub const FAILURE: &str = "gate.failed";

/// The first file of that name in the directories of PATH.
pub fn find_program(name: &OsStr) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|directory| directory.join(name))
        .find(|file| file.is_file())
}

/// The paths of one gate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths {
    /// State directory with database, lock and log; mode 0700.
    pub state_dir: PathBuf,
    /// The control socket.
    pub control: PathBuf,
    /// The operator's configuration file.
    pub config: ConfigPath,
}

/// The path of the operator's configuration file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConfigPath {
    /// Named by the operator: the file must exist.
    Named(PathBuf),
    /// The default path: the file is used as soon as it exists.
    Default(PathBuf),
    /// There is no default path: HOME is not set.
    None,
}

impl ConfigPath {
    /// The file to read now; without one, all settings have their defaults.
    pub fn current(&self) -> Option<&Path> {
        match self {
            ConfigPath::Named(path) => Some(path),
            ConfigPath::Default(path) => path.symlink_metadata().is_ok().then_some(path),
            ConfigPath::None => None,
        }
    }

    /// The path, whether or not the file exists.
    pub fn path(&self) -> Option<&Path> {
        match self {
            ConfigPath::Named(path) | ConfigPath::Default(path) => Some(path),
            ConfigPath::None => None,
        }
    }
}

/// Paths given on the command line or in the environment.
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
    /// Resolves the paths. `env` reads the environment.
    pub fn resolve(options: &PathOptions, env: impl Fn(&str) -> Option<OsString>) -> Result<Self> {
        // The XDG specification requires programs to ignore relative values.
        let absolute = |name: &str| {
            env(name)
                .map(PathBuf::from)
                .filter(|path| path.is_absolute())
        };
        let home = |under: &str, flag: &str| {
            absolute("HOME")
                .map(|home| home.join(under))
                .ok_or_else(|| {
                    CliError::new(
                        CliExit::Usage,
                        format!("HOME is not set; set it, or use {flag}"),
                    )
                })
        };
        let state_dir = match &options.state_dir {
            Some(path) => std::path::absolute(path)?,
            None => match absolute("XDG_STATE_HOME") {
                Some(base) => base.join("palisade"),
                None => home(".local/state/palisade", "--state-dir")?,
            },
        };
        let control = match (
            &options.control,
            &options.state_dir,
            absolute("XDG_RUNTIME_DIR"),
        ) {
            (Some(path), _, _) => std::path::absolute(path)?,
            (None, None, Some(runtime)) => runtime.join("palisade/control.sock"),
            (None, Some(_), _) | (None, None, None) => state_dir.join("control.sock"),
        };
        if control.as_os_str().len() > MAX_SOCKET_PATH {
            return Err(CliError::new(
                CliExit::Usage,
                format!(
                    "the path of the control socket is {} bytes long, and the limit is \
                     {MAX_SOCKET_PATH}: {}; choose a shorter one with --control",
                    control.as_os_str().len(),
                    control.display()
                ),
            )
            .into());
        }
        let config = match (&options.config, absolute("XDG_CONFIG_HOME")) {
            (Some(path), _) => ConfigPath::Named(std::path::absolute(path)?),
            (None, Some(base)) => ConfigPath::Default(base.join("palisade/palisade.yaml")),
            (None, None) => match home(".config/palisade/palisade.yaml", "--config") {
                Ok(path) => ConfigPath::Default(path),
                Err(_) => ConfigPath::None,
            },
        };
        Ok(Self {
            state_dir,
            control,
            config,
        })
    }

    /// Creates the state directory and the socket's directory, or checks that only the operator
    /// can write to them.
    pub fn prepare(&self) -> Result<()> {
        make_private(&self.state_dir)?;
        match self.control.parent() {
            Some(parent) if parent != self.state_dir => make_safe_for_socket(parent),
            _ => Ok(()),
        }
    }

    /// The lock file of the gate.
    pub fn lock(&self) -> PathBuf {
        self.state_dir.join("lock")
    }

    /// The log of a gate in the background.
    pub fn log(&self) -> PathBuf {
        self.state_dir.join(LOG)
    }

    /// The lock file of the watchdog.
    pub fn watchdog_lock(&self) -> PathBuf {
        self.state_dir.join(WATCHDOG_LOCK)
    }

    /// The list of trusted repository files.
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

/// Creates the directory of the socket, or refuses a directory that other users can write to: they
/// could replace the socket. A sticky directory (`/tmp`) prevents that.
fn make_safe_for_socket(path: &Path) -> Result<()> {
    make_dir(path).with_context(|| format!("cannot create {}", path.display()))?;
    let found = std::fs::metadata(path)?;
    let mode = found.mode();
    let shared = mode & 0o022 != 0 && mode & 0o1000 == 0;
    let own = [0, nix::unistd::geteuid().as_raw()].contains(&found.uid());
    if shared || !own {
        let message = format!(
            "other users can write to the directory of the control socket, {} (mode {:o}, uid {}); \
             choose another socket with --control",
            path.display(),
            mode & 0o7777,
            found.uid()
        );
        return Err(CliError::new(CliExit::Usage, message).into());
    }
    Ok(())
}

/// Creates the state directory, or refuses a directory that other users can enter: it would expose
/// the database and the CA key. The mode is not changed: `--state-dir /tmp` must not close /tmp.
fn make_private(path: &Path) -> Result<()> {
    make_dir(path).with_context(|| format!("cannot create {}", path.display()))?;
    let found = std::fs::metadata(path)?;
    let own = nix::unistd::geteuid().as_raw();
    let problem = if found.uid() != own {
        format!(
            "belongs to uid {}, not to you; choose another with --state-dir",
            found.uid()
        )
    } else if found.mode() & 0o077 != 0 {
        format!(
            "is open to others (mode {:o}); run: chmod 700 {}",
            found.mode() & 0o777,
            path.display()
        )
    } else {
        return Ok(());
    };
    Err(CliError::new(
        CliExit::Usage,
        format!("the state directory {} {problem}", path.display()),
    )
    .into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(options: &PathOptions, env: &[(&str, &str)]) -> Result<Paths> {
        let find = |name: &str| {
            env.iter()
                .find(|(known, _)| *known == name)
                .map(|(_, value)| OsString::from(value))
        };
        Paths::resolve(options, find)
    }

    #[test]
    fn control_socket_follows_an_explicit_state_directory() {
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
    fn relative_xdg_values_are_ignored_and_home_is_required() {
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
            "HOME is not set; set it, or use --state-dir"
        );
    }

    #[test]
    fn socket_path_may_have_107_bytes_but_not_108() {
        let of_length = |length: usize| {
            let control = PathBuf::from(format!("/{}", "x".repeat(length - 1)));
            let options = PathOptions {
                control: Some(control),
                state_dir: Some("/s".into()),
                config: None,
            };
            resolve(&options, &[])
        };
        assert!(of_length(107).is_ok());
        let error = of_length(108).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("108 bytes long, and the limit is 107"),
            "{error}"
        );
    }

    #[test]
    fn state_directory_open_to_others_is_refused_unchanged() {
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
