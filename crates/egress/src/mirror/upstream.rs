//! Connection settings of a mirror's upstream: an address that the dialer has checked, the
//! operator's key, and git and ssh options that allow nothing else.

use std::fmt::Write as _;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;

use config::Settings;
use config::leaf::SecretSource;
use config::section::git::{MirrorSettings, MirrorTransport, UpstreamAddress};
use policy::id::SandboxId;
use tempfile::NamedTempFile;
use tokio::process::{Child, Command};
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::error::MirrorError;
use super::git_command::{GitCommandError, clean_command, is_installed, not_started};
use crate::dialer::Dialer;

/// Timeout of a command that prints a key, in seconds.
const KEY_COMMAND_TIMEOUT_SECS: u64 = 30;

/// Maximum size of a key.
const MAX_KEY_BYTES: usize = 64 * 1024;

/// Prefix of temporary files with a key, a host key or roots.
pub const TEMP_FILE_PREFIX: &str = ".kept-";

/// Dialer, settings and sandbox of a request to a mirror's upstream.
#[derive(Clone, Copy)]
pub struct UpstreamAccess<'a> {
    /// The dialer that checks the address.
    pub dialer: &'a Dialer,
    /// The operator's settings.
    pub settings: &'a Settings,
    /// The sandbox that the request is from.
    pub sandbox: &'a SandboxId,
    /// Directory for temporary key files.
    pub directory: &'a Path,
}

/// A mirror's upstream, ready for use. Its temporary files are removed on drop.
#[derive(Debug)]
pub struct MirrorUpstream {
    transport: MirrorTransport,
    url: String,
    host: String,
    user: Option<String>,
    port: u16,
    path: String,
    address: SocketAddr,
    /// Connect timeout in seconds.
    connect_timeout: u64,
    key: Option<Key>,
    known_hosts: Option<NamedTempFile>,
    /// The system's and the operator's root certificates.
    roots: Option<NamedTempFile>,
}

#[derive(Debug)]
enum Key {
    /// The operator's own file.
    File(std::path::PathBuf),
    /// A temporary file with the key from a variable or a command.
    Temporary(NamedTempFile),
}

impl Key {
    fn path(&self) -> &Path {
        match self {
            Key::File(path) => path,
            Key::Temporary(file) => file.path(),
        }
    }
}

impl MirrorUpstream {
    /// Resolves the upstream's address and writes its temporary files.
    pub async fn resolve(
        mirror: &MirrorSettings,
        access: &UpstreamAccess<'_>,
    ) -> Result<Self, MirrorError> {
        let UpstreamAccess {
            dialer,
            settings,
            sandbox,
            directory,
        } = *access;
        let upstream_address = mirror
            .address()
            .ok_or_else(|| MirrorError::unreachable("its address is not valid"))?;
        if upstream_address.transport == MirrorTransport::Ssh
            && !spawn_blocking(|| is_installed("ssh"))
                .await
                .is_ok_and(|installed| installed)
        {
            return Err(MirrorError::missing_program("ssh"));
        }
        let addresses = dialer
            .resolve(sandbox, &upstream_address.host, upstream_address.port)
            .await?;
        let address = addresses
            .first()
            .copied()
            .ok_or_else(|| MirrorError::unreachable("it has no address"))?;
        let key = match (&mirror.identity, upstream_address.transport) {
            (Some(source), MirrorTransport::Ssh) => Some(load_key(source, directory).await?),
            _ => None,
        };
        let known_hosts = match (&mirror.host_key, upstream_address.transport) {
            (Some(line), MirrorTransport::Ssh) => {
                let line = format!("palisade {line}\n");
                Some(write_temporary(line.into(), directory).await?)
            }
            _ => None,
        };
        let roots = match upstream_address.transport {
            MirrorTransport::Https if !settings.egress.extra_roots.is_empty() => {
                Some(write_roots(settings, directory).await?)
            }
            _ => None,
        };
        let connect_timeout = settings.egress.timeouts.connect.as_secs().max(1);
        let UpstreamAddress {
            transport,
            user,
            host,
            port,
            path,
        } = upstream_address;
        // An entry in `egress.resolve` may change the port as well.
        let url = match transport {
            MirrorTransport::Git => format!("git://{address}{path}"),
            MirrorTransport::Https => format!("https://{host}:{}{path}", address.port()),
            MirrorTransport::Http => format!("http://{host}:{}{path}", address.port()),
            MirrorTransport::Ssh => mirror.upstream.clone(),
        };
        Ok(Self {
            transport,
            url,
            host: host.to_string(),
            user: user.map(str::to_owned),
            port,
            path,
            address,
            connect_timeout,
            key,
            known_hosts,
            roots,
        })
    }

    /// The URL for git.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The transport.
    pub fn transport(&self) -> MirrorTransport {
        self.transport
    }

    /// Path of the repository on its host.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Configures a git command to connect to this upstream only.
    pub fn configure_git(&self, command: &mut Command) {
        let allowed = match self.transport {
            MirrorTransport::Ssh => "ssh",
            MirrorTransport::Https => "https",
            MirrorTransport::Http => "http",
            MirrorTransport::Git => "git",
        };
        command.env("GIT_ALLOW_PROTOCOL", allowed);
        match self.transport {
            MirrorTransport::Ssh => {
                let mut line = "ssh".to_owned();
                for argument in self.ssh_options() {
                    let _ = write!(line, " {}", shell_quoted(&argument));
                }
                command
                    .env("GIT_SSH_COMMAND", line)
                    .env("GIT_SSH_VARIANT", "ssh");
            }
            MirrorTransport::Https | MirrorTransport::Http => {
                let Self { host, address, .. } = self;
                let port = address.port();
                let ip = match address {
                    SocketAddr::V4(v4) => v4.ip().to_string(),
                    SocketAddr::V6(v6) => format!("[{}]", v6.ip()),
                };
                let pinned = format!("http.curloptResolve={host}:{port}:{ip}");
                let slow = "http.lowSpeedLimit=1";
                command.args(["-c", &pinned, "-c", "http.followRedirects=false"]);
                command.args(["-c", slow, "-c", "http.lowSpeedTime=60"]);
                if let Some(roots) = &self.roots {
                    let roots = roots.path().display();
                    command.args(["-c", &format!("http.sslCAInfo={roots}")]);
                }
            }
            MirrorTransport::Git => {
                let virtual_host = format!("{}:{}", self.host, self.port);
                command.env("GIT_OVERRIDE_VIRTUAL_HOST", virtual_host);
            }
        }
    }

    /// Starts a git program on the upstream's host over ssh.
    pub fn spawn_ssh(&self, program: &str) -> Result<Child, GitCommandError> {
        let mut command = clean_command("ssh");
        command.args(self.ssh_options());
        if let Some(user) = &self.user {
            command.arg("-l").arg(user);
        }
        command
            .arg("--")
            .arg(&self.host)
            .arg(format!("{program} {}", shell_quoted(&self.path)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command.spawn().map_err(|error| not_started("ssh", &error))
    }

    /// Options of ssh: no configuration file, agent, password, forwarding or connection sharing;
    /// one key, one host key, and the checked address.
    fn ssh_options(&self) -> Vec<String> {
        let mut arguments = vec!["-F".to_owned(), "/dev/null".to_owned(), "-T".to_owned()];
        let mut option = |text: String| arguments.extend(["-o".to_owned(), text]);
        for fixed in [
            "BatchMode=yes",
            "StrictHostKeyChecking=yes",
            "GlobalKnownHostsFile=/dev/null",
            "HostKeyAlias=palisade",
            "CheckHostIP=no",
            "UpdateHostKeys=no",
            "IdentitiesOnly=yes",
            "IdentityAgent=none",
            "ClearAllForwardings=yes",
            "ForwardAgent=no",
            "PermitLocalCommand=no",
            "ControlMaster=no",
            "ControlPath=none",
            "ServerAliveInterval=15",
            "ServerAliveCountMax=3",
            "LogLevel=ERROR",
        ] {
            option(fixed.to_owned());
        }
        option(format!("ConnectTimeout={}", self.connect_timeout));
        option(format!("HostName={}", self.address.ip()));
        // ssh uses the first value of an option, so this one wins over the port that git adds.
        option(format!("Port={}", self.address.port()));
        let hosts = self.known_hosts.as_ref().map(NamedTempFile::path);
        let hosts = hosts.unwrap_or(Path::new("/dev/null"));
        option(format!("UserKnownHostsFile={}", hosts.display()));
        let key = self.key.as_ref().map_or(Path::new("none"), Key::path);
        option(format!("IdentityFile={}", key.display()));
        arguments
    }
}

/// Quotes an argument for a POSIX shell.
fn shell_quoted(argument: &str) -> String {
    format!("'{}'", argument.replace('\'', r"'\''"))
}

async fn load_key(source: &SecretSource, directory: &Path) -> Result<Key, MirrorError> {
    let text = match source {
        SecretSource::File(path) => return Ok(Key::File(path.clone())),
        SecretSource::Env(name) => std::env::var(name)
            .map_err(|_| {
                MirrorError::unreadable_key(&format!("the environment variable {name} is not set"))
            })?
            .into_bytes(),
        SecretSource::Command(line) => key_command_output(line).await?,
    };
    if text.len() > MAX_KEY_BYTES || text.is_empty() {
        return Err(MirrorError::unreadable_key("the key is empty or too long"));
    }
    // ssh requires a newline at the end of the key.
    let text = [text.trim_ascii_end(), b"\n"].concat();
    write_temporary(text, directory).await.map(Key::Temporary)
}

/// Runs the operator's key command and returns its output.
async fn key_command_output(line: &str) -> Result<Vec<u8>, MirrorError> {
    let mut command = Command::new("sh");
    command
        .args(["-c", line])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    let limit = std::time::Duration::from_secs(KEY_COMMAND_TIMEOUT_SECS);
    let ran = timeout(limit, command.output()).await;
    let ran = ran.map_err(|_| MirrorError::unreadable_key("the key command timed out"))?;
    let ran = ran.map_err(|error| MirrorError::unreadable_key(&error.to_string()))?;
    if !ran.status.success() {
        return Err(MirrorError::unreadable_key("the key command failed"));
    }
    Ok(ran.stdout)
}

/// Writes a temporary file that only the gate's user can read. It is removed on drop.
async fn write_temporary(content: Vec<u8>, directory: &Path) -> Result<NamedTempFile, MirrorError> {
    let directory = directory.to_owned();
    let written = spawn_blocking(move || {
        let mut file = NamedTempFile::with_prefix_in(TEMP_FILE_PREFIX, directory)?;
        file.write_all(&content)?;
        file.flush()?;
        Ok::<_, std::io::Error>(file)
    });
    written
        .await
        .map_err(std::io::Error::other)
        .flatten()
        .map_err(|error| MirrorError::unreadable_key(&error.to_string()))
}

/// Writes the system's and the operator's root certificates to one file.
async fn write_roots(settings: &Settings, directory: &Path) -> Result<NamedTempFile, MirrorError> {
    let mut all = tokio::fs::read("/etc/ssl/certs/ca-certificates.crt")
        .await
        .unwrap_or_default();
    for path in &settings.egress.extra_roots {
        let more = tokio::fs::read(path).await;
        let more = more.map_err(|error| {
            MirrorError::unreachable(&format!("reading an extra root failed: {error}"))
        })?;
        all.push(b'\n');
        all.extend(more);
    }
    write_temporary(all, directory).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shell_quoted_argument_reaches_the_program_unchanged() {
        for argument in ["plain", "a b", "it's", "$(x) `y` \"z\" !", "-o", ""] {
            let line = format!("printf %s {}", shell_quoted(argument));
            let ran = std::process::Command::new("sh")
                .args(["-c", &line])
                .output();
            assert_eq!(ran.unwrap().stdout, argument.as_bytes(), "{argument}");
        }
    }
}
