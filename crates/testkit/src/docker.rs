//! A Docker daemon of a test's own, and containers in it: real ones, without a network beyond
//! the loopback, made of the machine's busybox and the programs a test brings along.
#![expect(clippy::expect_used, reason = "a test without its daemon cannot go on")]

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

/// Where Debian has it, which is on few people's path.
const DOCKERD: &str = "/usr/sbin/dockerd";

const PROGRAMS: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

const BUSYBOX: &str = "/bin/busybox";

/// What the daemon calls the image.
const IMAGE: &str = "palisade-test:latest";

/// How long the daemon may take for one thing, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// A running daemon. Its containers and it itself end when it is dropped.
pub struct Docker {
    place: TempDir,
    child: Child,
    program: PathBuf,
}

/// A container of its.
pub struct Container<'a> {
    docker: &'a Docker,
    id: String,
}

/// What a container has of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// Its own loopback, and nothing else.
    None,
    /// The host's.
    Host,
}

impl Docker {
    /// A daemon whose one image has busybox and what `program` is linked to, or nothing where
    /// that cannot be: in CI that is a failure.
    #[expect(clippy::panic, reason = "in CI a skip is a failure")]
    pub fn start(program: &Path) -> Option<Self> {
        if !require_root("a Docker daemon of its own") {
            return None;
        }
        if !require(Path::new(DOCKERD).exists(), "docker.io is not installed") {
            return None;
        }
        let place = tempfile::Builder::new()
            .prefix("dk")
            .tempdir()
            .expect("a directory");
        let at = |name: &str| place.path().join(name).display().to_string();
        let log = std::fs::File::create(place.path().join("log")).expect("a file");
        // A test that is killed must not leave its daemon, nor that its mounts.
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "TERM", "unshare", "--mount", DOCKERD])
            .args(["--data-root", &at("data"), "--exec-root", &at("exec")])
            .args(["--pidfile", &at("pid"), "--host"])
            .arg(format!("unix://{}", at("docker.sock")))
            // Nothing of the machine's network is touched, and any file system will do.
            .args(["--bridge=none", "--iptables=false", "--ip6tables=false"])
            .args(["--ip-forward=false", "--storage-driver=vfs"])
            // Its containerd and runc are on few people's path, too.
            .env("PATH", PROGRAMS)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a descriptor"))
            .stderr(log)
            .spawn()
            .expect("dockerd");
        let mut docker = Self {
            place,
            child,
            program: program.to_owned(),
        };
        wait::until("the Docker daemon", || {
            if let Ok(Some(ended)) = docker.child.try_wait() {
                panic!("dockerd ended: {ended}\n{}", docker.log());
            }
            let ping = docker.try_ask("GET", "/_ping", "text/plain", b"");
            ping.ok().filter(|answer| answer.status == 200)
        });
        docker.import();
        Some(docker)
    }

    fn log(&self) -> String {
        let log = std::fs::read_to_string(self.place.path().join("log"));
        log.unwrap_or_default()
    }

    fn try_ask(
        &self,
        method: &str,
        path: &str,
        kind: &str,
        body: &[u8],
    ) -> std::io::Result<HttpResponse> {
        let mut stream = UnixStream::connect(self.place.path().join("docker.sock"))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: docker\r\nConnection: close\r\nContent-Type: \
             {kind}\r\nContent-Length: {length}\r\n\r\n"
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(body)?;
        read_response(BufReader::new(stream))
    }

    /// Asks the daemon for something that it must do.
    fn ask(&self, method: &str, path: &str, body: &Value) -> Value {
        let body = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        let answer = self
            .try_ask(method, path, "application/json", body.as_bytes())
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

    /// Makes the image. None is fetched from anywhere.
    fn import(&self) {
        let root = self.place.path().join("root");
        for name in ["bin", "etc", "tmp", "workspace"] {
            std::fs::create_dir_all(root.join(name)).expect("a directory");
        }
        let words = |command: &mut Command| {
            let output = command.output().expect("a program");
            assert!(output.status.success(), "{command:?}");
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        std::fs::copy(BUSYBOX, root.join("bin/busybox")).expect("busybox-static");
        for applet in words(Command::new(BUSYBOX).arg("--list")).lines() {
            let link = root.join("bin").join(applet);
            if applet != "busybox" {
                std::os::unix::fs::symlink("busybox", link).expect("a link");
            }
        }
        let linked = words(Command::new("ldd").arg(&self.program));
        for library in linked.split_whitespace().filter(|w| w.starts_with('/')) {
            let to = root.join(library.trim_start_matches('/'));
            std::fs::create_dir_all(to.parent().expect("a directory")).expect("a directory");
            std::fs::copy(library, to).expect("a library");
        }
        let archive = self.place.path().join("root.tar");
        words(
            Command::new("tar")
                .arg("-C")
                .arg(&root)
                .arg("-cf")
                .arg(&archive)
                .arg("."),
        );
        let archive = std::fs::read(archive).expect("the archive");
        let (name, tag) = IMAGE.split_once(':').expect("a tag");
        let path = format!("/images/create?fromSrc=-&repo={name}&tag={tag}");
        let answer = self.try_ask("POST", &path, "application/x-tar", &archive);
        let answer = answer.expect("an answer");
        assert!(answer.status == 200, "{}\n{}", answer.text(), self.log());
    }

    /// Runs the program in a container, with a directory of the host's at `/run/shared`.
    pub fn run(
        &self,
        words: &[&str],
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
            "Cmd": words,
            "Env": environment,
            "HostConfig": {
                "NetworkMode": network,
                "Binds": [
                    format!("{}:/bin/program:ro", self.program.display()),
                    format!("{}:/run/shared", shared.display()),
                ],
            },
        });
        let made = self.ask("POST", "/containers/create", &body);
        let id = made.get("Id").and_then(Value::as_str).expect("an id");
        self.ask("POST", &format!("/containers/{id}/start"), &Value::Null);
        Container {
            docker: self,
            id: id.to_owned(),
        }
    }
}

impl Container<'_> {
    /// What `docker restart` does.
    pub fn restart(&self) {
        let path = format!("/containers/{}/restart?t=10", self.id);
        self.docker.ask("POST", &path, &Value::Null);
    }

    /// What `docker kill` and `docker start` do.
    pub fn kill_and_start(&self) {
        for what in ["kill", "start"] {
            let path = format!("/containers/{}/{what}", self.id);
            self.docker.ask("POST", &path, &Value::Null);
        }
    }
}

impl Drop for Container<'_> {
    fn drop(&mut self) {
        let path = format!("/containers/{}?force=true", self.id);
        let _ = self
            .docker
            .try_ask("DELETE", &path, "application/json", b"");
    }
}

impl Drop for Docker {
    fn drop(&mut self) {
        let pid = Pid::from_raw(self.child.id().cast_signed());
        let _ = kill(pid, Signal::SIGTERM);
        wait::until("the daemon to end", || self.child.try_wait().ok().flatten());
    }
}
