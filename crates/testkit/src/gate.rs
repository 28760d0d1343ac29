//! A gate as a real process, with a state directory and settings of its own.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;
use tempfile::TempDir;

use crate::http::{self, HttpResponse};
use crate::operator::Operator;
use crate::{leftovers, wait};

/// A directory with the state, the control socket and the settings of one gate. It is also the
/// home of the gate's operator. Dropping it ends the sandboxes and the gate of the directory.
#[derive(Debug)]
pub struct GateDir {
    dir: TempDir,
    binary: PathBuf,
    operator: Operator,
}

impl GateDir {
    /// A new directory for the given binary, with a minimal palisade.yaml.
    pub fn new(binary: &str) -> Self {
        Self::with_operator(Operator::CurrentUser, binary)
    }

    /// A new directory that belongs to `operator`.
    #[expect(
        clippy::expect_used,
        reason = "a test without a directory cannot continue"
    )]
    pub fn with_operator(operator: Operator, binary: &str) -> Self {
        // A short name, because the length of a socket path is limited.
        let dir = tempfile::Builder::new()
            .prefix("pal")
            .tempdir()
            .expect("a directory");
        operator.chown(dir.path());
        let mut gate_dir = Self {
            dir,
            binary: binary.into(),
            operator,
        };
        if operator != Operator::CurrentUser {
            // Other users may not enter the directory of the original.
            let copy = gate_dir.path().join("palisade");
            if std::fs::hard_link(binary, &copy).is_err() {
                std::fs::copy(binary, &copy).expect("a copy");
            }
            gate_dir.binary = copy;
        }
        if operator == Operator::SubidUser {
            Operator::write_subid_files(gate_dir.path());
        }
        gate_dir.write_config("version: \"1.0\"\n");
        gate_dir
    }

    /// The operator that owns the directory.
    pub fn operator(&self) -> Operator {
        self.operator
    }

    /// The directory itself.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The state directory.
    pub fn state(&self) -> PathBuf {
        self.path().join("state")
    }

    /// The control socket.
    pub fn control(&self) -> PathBuf {
        self.state().join("control.sock")
    }

    /// The path of palisade.yaml.
    pub fn config(&self) -> PathBuf {
        self.path().join("palisade.yaml")
    }

    /// The database.
    pub fn database(&self) -> PathBuf {
        self.state().join("palisade.db")
    }

    /// Overwrites the database in place, as a failing disk does, under a gate that may run.
    #[expect(clippy::expect_used, reason = "a test without a file cannot continue")]
    pub fn damage_database(&self) {
        let file = std::fs::File::options().write(true).open(self.database());
        let file = file.expect("a database");
        let length = file.metadata().expect("a length").len();
        let length = usize::try_from(length).expect("a small file");
        file.write_all_at(&vec![0xee; length], 0).expect("a write");
    }

    /// Replaces palisade.yaml atomically.
    #[expect(clippy::expect_used, reason = "a test without a file cannot continue")]
    pub fn write_config(&self, text: &str) {
        let fresh = self.path().join(".palisade.yaml.new");
        std::fs::write(&fresh, text).expect("a file");
        self.operator.chown(&fresh);
        std::fs::rename(fresh, self.config()).expect("a rename");
    }

    /// A `palisade` command with the flags for this directory and an empty environment.
    pub fn palisade(&self, args: &[&str]) -> Command {
        let mut command = match self.operator {
            Operator::SubidUser => Operator::command_with_subids(&self.binary, self.path()),
            Operator::CurrentUser | Operator::Unprivileged => self.operator.command(&self.binary),
        };
        command
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.env("HOME", self.path());
        command
            .arg("--state-dir")
            .arg(self.state())
            .arg("--config")
            .arg(self.config());
        command.args(args).stdin(Stdio::null());
        command
    }

    /// The process id of the background gate's watchdog, from its lock file.
    pub fn watchdog(&self) -> Option<i32> {
        let pid = std::fs::read_to_string(self.state().join("watchdog.lock")).ok()?;
        pid.trim().parse().ok()
    }

    /// Runs a command to its end.
    #[expect(
        clippy::expect_used,
        reason = "a test without the binary cannot continue"
    )]
    pub fn run(&self, args: &[&str]) -> Output {
        self.palisade(args).output().expect("the binary")
    }

    /// Starts a gate in the foreground and waits for its 'ready'.
    pub fn start(&self) -> GateProcess<'_> {
        self.start_with(|command| command)
    }

    /// Starts a gate with a command that `adjust` has changed.
    #[expect(
        clippy::expect_used,
        clippy::panic,
        reason = "a test without a gate cannot continue"
    )]
    pub fn start_with(&self, adjust: impl FnOnce(&mut Command) -> &mut Command) -> GateProcess<'_> {
        let mut command = self.palisade(&["gate", "run"]);
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = adjust(&mut command).spawn().expect("the binary");
        let stderr_text = Arc::new(Mutex::new(String::new()));
        let stderr = child.stderr.take().expect("stderr is piped");
        let received = Arc::clone(&stderr_text);
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let mut stderr_text = received.lock().unwrap_or_else(PoisonError::into_inner);
                stderr_text.push_str(&line);
                stderr_text.push('\n');
            }
        });
        let mut gate = GateProcess {
            gate_dir: self,
            child,
            stderr_text,
        };
        wait::until("the gate to be ready", || {
            if gate.stderr().lines().any(|line| line == "ready") {
                return Some(());
            }
            if let Ok(Some(status)) = gate.child.try_wait() {
                panic!(
                    "the gate ended ({status}) before it was ready:\n{}",
                    gate.stderr()
                );
            }
            None
        });
        gate
    }
}

impl Drop for GateDir {
    fn drop(&mut self) {
        leftovers::clear(self);
    }
}

/// A running gate. Dropping it kills the process.
#[derive(Debug)]
pub struct GateProcess<'a> {
    gate_dir: &'a GateDir,
    child: Child,
    stderr_text: Arc<Mutex<String>>,
}

impl GateProcess<'_> {
    /// The process id of the gate.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// All that the gate has written to stderr so far.
    pub fn stderr(&self) -> String {
        self.stderr_text
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Sends a request to the control socket.
    #[expect(
        clippy::expect_used,
        reason = "a test whose gate does not answer has failed"
    )]
    pub fn request(&self, method: &str, path: &str, body: &Value) -> HttpResponse {
        let body = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        http::send(&self.gate_dir.control(), method, path, body.as_bytes()).expect("an answer")
    }

    /// Sends a GET request to the control socket.
    pub fn get(&self, path: &str) -> HttpResponse {
        self.request("GET", path, &Value::Null)
    }

    /// Begins a request to the control socket whose body has 100 bytes, and sends only the first
    /// byte, `{`: the request is in flight until the other bytes arrive.
    #[expect(
        clippy::expect_used,
        reason = "a test whose gate does not answer has failed"
    )]
    pub fn hold_request(&self) -> UnixStream {
        let mut stream = UnixStream::connect(self.gate_dir.control()).expect("a connection");
        let head = "POST /internal/containers HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n\
                    Content-Length: 100\r\n\r\n";
        stream.write_all(head.as_bytes()).expect("a head");
        // The request is in flight after the status 100.
        let head = http::read_head(&mut stream).expect("an answer");
        assert_eq!(head.status, 100, "{head:?}");
        stream.write_all(b"{").expect("a byte");
        stream
    }

    /// Sends a signal by name, as `kill` does.
    #[expect(
        clippy::expect_used,
        reason = "a test that cannot signal cannot continue"
    )]
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill")
            .args([format!("-{name}"), self.pid().to_string()])
            .status()
            .expect("kill");
        assert!(status.success(), "kill -{name} failed");
    }

    /// `kill -9`, and waits for the end.
    #[expect(
        clippy::expect_used,
        reason = "a test that cannot kill cannot continue"
    )]
    pub fn kill(mut self) {
        self.child.kill().expect("kill");
        self.child.wait().expect("wait");
    }

    /// Waits for the gate to exit.
    pub fn wait(&mut self) -> ExitStatus {
        wait::until("the gate to end", || self.child.try_wait().ok().flatten())
    }
}

impl Drop for GateProcess<'_> {
    fn drop(&mut self) {
        // Both fail if the process has exited already, which is expected.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
