//! An ssh server on loopback: the machine's sshd with generated keys.
#![expect(
    clippy::expect_used,
    reason = "a test without its server cannot continue"
)]

use std::io::Read;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use crate::port::Port;
use crate::wait;

/// Debian installs sshd here; the directory is usually not on PATH.
const SSHD: &str = "/usr/sbin/sshd";

/// A running ssh server. Dropping it stops the server.
pub struct Sshd {
    directory: TempDir,
    port: Port,
    user: String,
    child: Option<Child>,
}

impl Sshd {
    /// Starts a server that accepts one key for the user that runs the test.
    pub fn start() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        for name in ["host", "user", "other"] {
            let made = Command::new("ssh-keygen")
                .args(["-q", "-t", "ed25519", "-N", "", "-C", name, "-f"])
                .arg(directory.path().join(name))
                .status();
            assert!(made.expect("ssh-keygen").success());
        }
        let user = Command::new("id").arg("-un").output().expect("id").stdout;
        let mut sshd = Self {
            directory,
            port: Port::take(),
            user: String::from_utf8_lossy(&user).trim().to_owned(),
            child: None,
        };
        sshd.configure();
        sshd.run();
        sshd
    }

    fn configure(&self) {
        let path = |name: &str| self.directory.path().join(name).display().to_string();
        let search = std::env::var("PATH").unwrap_or_default();
        let text = format!(
            "ListenAddress {}\nHostKey {}\nAuthorizedKeysFile {}\nPidFile none\n\
             StrictModes no\nUsePAM no\nPermitRootLogin yes\nPasswordAuthentication no\n\
             KbdInteractiveAuthentication no\nMaxStartups 100\nSetEnv PATH={search}\n",
            self.port.address(),
            path("host"),
            path("user.pub"),
        );
        std::fs::write(self.directory.path().join("config"), text).expect("a config");
    }

    /// Starts the server again after [`Sshd::stop`].
    pub fn run(&mut self) {
        // sshd needs this privilege separation directory, which its service file creates.
        let _ = std::fs::create_dir_all("/run/sshd");
        let log = std::fs::File::create(self.directory.path().join("log")).expect("a log");
        let child = Command::new(SSHD)
            .args(["-D", "-e", "-f"])
            .arg(self.directory.path().join("config"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        self.child = Some(child.expect("sshd: install openssh-server"));
        wait::until_or(
            || has_ssh_banner(self.port.address()).then_some(()),
            || format!("sshd: {}", self.log()),
        );
    }

    /// Stops the server.
    pub fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// The log of the server.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    /// The address of the server.
    pub fn address(&self) -> SocketAddr {
        self.port.address()
    }

    /// The user that may log in.
    pub fn user(&self) -> &str {
        &self.user
    }

    /// The private key that the server accepts.
    pub fn key(&self) -> PathBuf {
        self.directory.path().join("user")
    }

    /// The public host key.
    pub fn host_key(&self) -> String {
        public(&self.directory.path().join("host.pub"))
    }

    /// A public key that no server uses.
    pub fn other_key(&self) -> String {
        public(&self.directory.path().join("other.pub"))
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Type and data of a public key, without the comment.
fn public(path: &Path) -> String {
    let text = std::fs::read_to_string(path).expect("a public key");
    let fields: Vec<&str> = text.split_whitespace().take(2).collect();
    fields.join(" ")
}

fn has_ssh_banner(address: SocketAddr) -> bool {
    let mut greeting = [0; 4];
    TcpStream::connect(address).is_ok_and(|mut stream| {
        let _ = stream.set_read_timeout(Some(Duration::from_secs(5)));
        stream.read_exact(&mut greeting).is_ok() && greeting == *b"SSH-"
    })
}
