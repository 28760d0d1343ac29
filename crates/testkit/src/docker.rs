//! A private Docker daemon for a test, with real containers. The containers have no network beyond
//! the loopback; their image holds the machine's busybox and the program under test.
#![expect(
    clippy::expect_used,
    reason = "a test without its daemon cannot continue"
)]

use std::io::{BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::http::{HttpResponse, read_response};
use crate::{require, require_root, wait};

/// Debian installs dockerd here; the directory is usually not on PATH.
const DOCKERD: &str = "/usr/sbin/dockerd";

/// PATH of the daemon.
const DAEMON_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The static busybox of the machine.
const BUSYBOX: &str = "/bin/busybox";

/// The name of the image.
const IMAGE: &str = "palisade-test:latest";

/// Timeout of one request to the daemon, on a busy machine.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(120);

/// A running Docker daemon. Dropping it ends its containers and the daemon.
pub struct Docker {
    directory: TempDir,
    child: Child,
    program: PathBuf,
}

/// A running container. Dropping it removes the container.
pub struct Container<'a> {
    docker: &'a Docker,
    id: String,
}

/// The network that a container uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// Only a private loopback.
    None,
    /// The network of the host.
    Host,
}

impl Docker {
    /// Starts a daemon whose only image has busybox and the libraries of `program`. Returns `None`
    /// without root or Docker; in CI that is a failure.
    #[expect(clippy::panic, reason = "in CI a skip is a failure")]
    pub fn start(program: &Path) -> Option<Self> {
        if !require_root("a private Docker daemon") {
            return None;
        }
        if !require(Path::new(DOCKERD).exists(), "docker.io is not installed") {
            return None;
        }
        let directory = tempfile::Builder::new()
            .prefix("dk")
            .tempdir()
            .expect("a directory");
        let at = |name: &str| directory.path().join(name).display().to_string();
        let log = std::fs::File::create(directory.path().join("log")).expect("a file");
        // A killed test must leave neither its daemon nor the daemon's mounts.
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "TERM", "unshare", "--mount", DOCKERD])
            .args(["--data-root", &at("data"), "--exec-root", &at("exec")])
            .args(["--pidfile", &at("pid"), "--host"])
            .arg(format!("unix://{}", at("docker.sock")))
            // The daemon must not change the machine's network, and must run on any file system.
            .args(["--bridge=none", "--iptables=false", "--ip6tables=false"])
            .args(["--ip-forward=false", "--storage-driver=vfs"])
            // containerd and runc are usually not on PATH either.
            .env("PATH", DAEMON_PATH)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a descriptor"))
            .stderr(log)
            .spawn()
            .expect("dockerd");
        let mut docker = Self {
            directory,
            child,
            program: program.to_owned(),
        };
        wait::until("the Docker daemon", || {
            if let Ok(Some(ended)) = docker.child.try_wait() {
                panic!("dockerd ended: {ended}\n{}", docker.log());
            }
            let ping = docker.try_request("GET", "/_ping", "text/plain", b"");
            ping.ok().filter(|answer| answer.status == 200)
        });
        docker.import();
        Some(docker)
    }

    fn log(&self) -> String {
        let log = std::fs::read_to_string(self.directory.path().join("log"));
        log.unwrap_or_default()
    }

    fn try_request(
        &self,
        method: &str,
        path: &str,
        kind: &str,
        body: &[u8],
    ) -> std::io::Result<HttpResponse> {
        let mut stream = UnixStream::connect(self.directory.path().join("docker.sock"))?;
        stream.set_read_timeout(Some(REQUEST_TIMEOUT))?;
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: docker\r\nConnection: close\r\nContent-Type: \
             {kind}\r\nContent-Length: {length}\r\n\r\n"
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(body)?;
        read_response(BufReader::new(stream))
    }

    /// Sends a request to the daemon's API, which must succeed.
    fn request(&self, method: &str, path: &str, body: &Value) -> Value {
        let body = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        let answer = self
            .try_request(method, path, "application/json", body.as_bytes())
            .expect("an answer");
        let status = answer.status;
        assert!(
            (200..400).contains(&status),
            "{method} {path}: {status} {}\n{}",
            answer.text(),
            self.log()
        );
        answer.json()
    }

    /// Imports the image from local files; nothing is downloaded.
    fn import(&self) {
        let root = self.directory.path().join("root");
        for name in ["bin", "etc", "tmp", "workspace"] {
            std::fs::create_dir_all(root.join(name)).expect("a directory");
        }
        let run = |command: &mut Command| {
            let output = command.output().expect("a program");
            assert!(output.status.success(), "{command:?}");
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        std::fs::copy(BUSYBOX, root.join("bin/busybox")).expect("busybox-static");
        for applet in run(Command::new(BUSYBOX).arg("--list")).lines() {
            let link = root.join("bin").join(applet);
            if applet != "busybox" {
                std::os::unix::fs::symlink("busybox", link).expect("a link");
            }
        }
        let linked = run(Command::new("ldd").arg(&self.program));
        for library in linked.split_whitespace().filter(|w| w.starts_with('/')) {
            let to = root.join(library.trim_start_matches('/'));
            std::fs::create_dir_all(to.parent().expect("a directory")).expect("a directory");
            std::fs::copy(library, to).expect("a library");
        }
        let archive = self.directory.path().join("root.tar");
        run(Command::new("tar")
            .arg("-C")
            .arg(&root)
            .arg("-cf")
            .arg(&archive)
            .arg("."));
        let archive = std::fs::read(archive).expect("the archive");
        let (name, tag) = IMAGE.split_once(':').expect("a tag");
        let path = format!("/images/create?fromSrc=-&repo={name}&tag={tag}");
        let answer = self.try_request("POST", &path, "application/x-tar", &archive);
        let answer = answer.expect("an answer");
        assert!(answer.status == 200, "{}\n{}", answer.text(), self.log());
    }

    /// Runs the program in a container with the host directory `shared` at `/run/shared`.
    pub fn run(
        &self,
        args: &[&str],
        environment: &[&str],
        network: Network,
        shared: &Path,
    ) -> Container<'_> {
        let network = match network {
            Network::None => "none",
            Network::Host => "host",
        };
        let body = json!({
            "Image": IMAGE,
            "Entrypoint": ["/bin/program"],
            "Cmd": args,
            "Env": environment,
            "HostConfig": {
                "NetworkMode": network,
                "Binds": [
                    format!("{}:/bin/program:ro", self.program.display()),
                    format!("{}:/run/shared", shared.display()),
                ],
            },
        });
        let made = self.request("POST", "/containers/create", &body);
        let id = made.get("Id").and_then(Value::as_str).expect("an id");
        self.request("POST", &format!("/containers/{id}/start"), &Value::Null);
        Container {
            docker: self,
            id: id.to_owned(),
        }
    }
}

impl Container<'_> {
    /// `docker restart`.
    pub fn restart(&self) {
        let path = format!("/containers/{}/restart?t=10", self.id);
        self.docker.request("POST", &path, &Value::Null);
    }

    /// `docker kill`, then `docker start`.
    pub fn kill_and_start(&self) {
        for what in ["kill", "start"] {
            let path = format!("/containers/{}/{what}", self.id);
            self.docker.request("POST", &path, &Value::Null);
        }
    }
}

impl Drop for Container<'_> {
    fn drop(&mut self) {
        let path = format!("/containers/{}?force=true", self.id);
        let _ = self
            .docker
            .try_request("DELETE", &path, "application/json", b"");
    }
}

impl Drop for Docker {
    fn drop(&mut self) {
        let pid = Pid::from_raw(self.child.id().cast_signed());
        let _ = kill(pid, Signal::SIGTERM);
        wait::until("the daemon to end", || self.child.try_wait().ok().flatten());
    }
}
