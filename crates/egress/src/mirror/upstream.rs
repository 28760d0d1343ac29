//! How a mirror's upstream is reached: at an address the dialer has checked, with the
//! operator's key, by a program that trusts nothing else.

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

use super::program::{GitCommandError, clean, is_there, not_started};
use super::stale::Stale;
use crate::dialer::Dialer;

/// How long a command that prints a key may take, in seconds.
const KEY_WITHIN: u64 = 30;

/// The longest key.
const MOST_KEY: usize = 64 * 1024;

/// How the files are called that hold a key while it is used.
pub const KEPT: &str = ".kept-";

/// Who wants to get there, and what they have.
#[derive(Clone, Copy)]
pub struct Asking<'a> {
    /// The way out.
    pub dialer: &'a Dialer,
    /// The rules.
    pub settings: &'a Settings,
    /// For whom.
    pub sandbox: &'a SandboxId,
    /// Where keys are kept while they are used.
    pub directory: &'a Path,
}

/// An upstream, for as long as it is used: its key is in a file until then.
#[derive(Debug)]
pub struct Upstream {
    transport: MirrorTransport,
    url: String,
    host: String,
    user: Option<String>,
    port: u16,
    path: String,
    address: SocketAddr,
    /// Seconds until a connection must be there.
    patience: u64,
    key: Option<Key>,
    known_hosts: Option<NamedTempFile>,
    /// Roots beyond the system's.
    roots: Option<NamedTempFile>,
}

#[derive(Debug)]
enum Key {
    /// The operator's own file.
    File(std::path::PathBuf),
    /// What a variable held or a command printed.
    Kept(NamedTempFile),
}

impl Key {
    fn path(&self) -> &Path {
        match self {
            Key::File(path) => path,
            Key::Kept(file) => file.path(),
        }
    }
}

impl Upstream {
    /// Finds out where it is, and gets the key ready.
    pub async fn reach(mirror: &MirrorSettings, asking: &Asking<'_>) -> Result<Self, Stale> {
        let Asking {
            dialer,
            settings,
            sandbox,
            directory,
        } = *asking;
        let place = mirror
            .address()
            .ok_or_else(|| Stale::unreachable("its address cannot be read"))?;
        if place.transport == MirrorTransport::Ssh
            && !spawn_blocking(|| is_there("ssh"))
                .await
                .is_ok_and(|there| there)
        {
            return Err(Stale::missing("ssh"));
        }
        let addresses = dialer.find(sandbox, &place.host, place.port).await?;
        let address = addresses
            .first()
            .copied()
            .ok_or_else(|| Stale::unreachable("it has no address"))?;
        let key = match (&mirror.identity, place.transport) {
            (Some(source), MirrorTransport::Ssh) => Some(key(source, directory).await?),
            _ => None,
        };
        let known_hosts = match (&mirror.host_key, place.transport) {
            (Some(line), MirrorTransport::Ssh) => {
                let line = format!("palisade {line}\n");
                Some(keep(line.into(), directory).await?)
            }
            _ => None,
        };
        let roots = match place.transport {
            MirrorTransport::Https if !settings.egress.extra_roots.is_empty() => {
                Some(roots(settings, directory).await?)
            }
            _ => None,
        };
        let patience = settings.egress.timeouts.connect.as_secs().max(1);
        let UpstreamAddress {
            transport,
            user,
            host,
            port,
            path,
        } = place;
        // Where the operator says where a host is, that has a port of its own.
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
            patience,
            key,
            known_hosts,
            roots,
        })
    }

    /// Its address as git is told.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// How it is spoken to.
    pub fn transport(&self) -> MirrorTransport {
        self.transport
    }

    /// The repository, as its host is told.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Leads a git command there, and nowhere else.
    pub fn prepare(&self, command: &mut Command) {
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
                for word in self.ssh_options() {
                    let _ = write!(line, " {}", quoted(&word));
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
                let asked = format!("{}:{}", self.host, self.port);
                command.env("GIT_OVERRIDE_VIRTUAL_HOST", asked);
            }
        }
    }

    /// Begins a conversation with a program of git's on the other side.
    pub fn speak(&self, program: &str) -> Result<Child, GitCommandError> {
        let mut command = clean("ssh");
        command.args(self.ssh_options());
        if let Some(user) = &self.user {
            command.arg("-l").arg(user);
        }
        command
            .arg("--")
            .arg(&self.host)
            .arg(format!("{program} {}", quoted(&self.path)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command.spawn().map_err(|error| not_started("ssh", &error))
    }

    /// No configuration, agent, password, forwarding or second connection; one key; one host
    /// key; the address that was checked.
    fn ssh_options(&self) -> Vec<String> {
        let mut words = vec!["-F".to_owned(), "/dev/null".to_owned(), "-T".to_owned()];
        let mut option = |text: String| words.extend(["-o".to_owned(), text]);
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
        option(format!("ConnectTimeout={}", self.patience));
        option(format!("HostName={}", self.address.ip()));
        // What is said first counts, also before what git adds.
        option(format!("Port={}", self.address.port()));
        let hosts = self.known_hosts.as_ref().map(NamedTempFile::path);
        let hosts = hosts.unwrap_or(Path::new("/dev/null"));
        option(format!("UserKnownHostsFile={}", hosts.display()));
        let key = self.key.as_ref().map_or(Path::new("none"), Key::path);
        option(format!("IdentityFile={}", key.display()));
        words
    }
}

/// A word for a POSIX shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

async fn key(source: &SecretSource, directory: &Path) -> Result<Key, Stale> {
    let text = match source {
        SecretSource::File(path) => return Ok(Key::File(path.clone())),
        SecretSource::Env(name) => std::env::var(name)
            .map_err(|_| Stale::key(&format!("the variable {name} is not set")))?
            .into_bytes(),
        SecretSource::Command(line) => printed(line).await?,
    };
    if text.len() > MOST_KEY || text.is_empty() {
        return Err(Stale::key("it is empty or too long"));
    }
    // ssh wants a last line that ends.
    let text = [text.trim_ascii_end(), b"\n"].concat();
    keep(text, directory).await.map(Key::Kept)
}

/// What the operator's command prints.
async fn printed(line: &str) -> Result<Vec<u8>, Stale> {
    let mut command = Command::new("sh");
    command
        .args(["-c", line])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    let within = std::time::Duration::from_secs(KEY_WITHIN);
    let ran = timeout(within, command.output()).await;
    let ran = ran.map_err(|_| Stale::key("its command does not end"))?;
    let ran = ran.map_err(|error| Stale::key(&error.to_string()))?;
    if !ran.status.success() {
        return Err(Stale::key("its command failed"));
    }
    Ok(ran.stdout)
}

/// A file that only the gate reads, and that goes when it is dropped.
async fn keep(content: Vec<u8>, directory: &Path) -> Result<NamedTempFile, Stale> {
    let directory = directory.to_owned();
    let kept = spawn_blocking(move || {
        let mut file = NamedTempFile::with_prefix_in(KEPT, directory)?;
        file.write_all(&content)?;
        file.flush()?;
        Ok::<_, std::io::Error>(file)
    });
    kept.await
        .map_err(std::io::Error::other)
        .flatten()
        .map_err(|error| Stale::key(&error.to_string()))
}

/// The system's roots and the operator's in one file.
async fn roots(settings: &Settings, directory: &Path) -> Result<NamedTempFile, Stale> {
    let mut all = tokio::fs::read("/etc/ssl/certs/ca-certificates.crt")
        .await
        .unwrap_or_default();
    for path in &settings.egress.extra_roots {
        let more = tokio::fs::read(path).await;
        let more = more.map_err(|error| Stale::unreachable(&format!("its root: {error}")))?;
        all.push(b'\n');
        all.extend(more);
    }
    keep(all, directory).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_survives_a_shell() {
        for word in ["plain", "a b", "it's", "$(x) `y` \"z\" !", "-o", ""] {
            let line = format!("printf %s {}", quoted(word));
            let ran = std::process::Command::new("sh")
                .args(["-c", &line])
                .output();
            assert_eq!(ran.unwrap().stdout, word.as_bytes(), "{word}");
        }
    }
}
