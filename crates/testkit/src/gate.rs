//! A gate as a real process, in a place of its own.

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

/// A directory with room for one gate: state, socket, configuration. It is its operator's
/// home. Dropping it ends the sandboxes that were made in it, and its gate.
#[derive(Debug)]
pub struct GateDir {
    dir: TempDir,
    binary: PathBuf,
    operator: Operator,
}

impl GateDir {
    /// A fresh place for the given binary, with the smallest configuration.
    pub fn new(binary: &str) -> Self {
        Self::of(Operator::Oneself, binary)
    }

    /// The same, of a certain operator.
    #[expect(
        clippy::expect_used,
        reason = "a test without a directory cannot go on"
    )]
    pub fn of(operator: Operator, binary: &str) -> Self {
        // Short, because socket paths are.
        let dir = tempfile::Builder::new()
            .prefix("pal")
            .tempdir()
            .expect("a directory");
        operator.own(dir.path());
        let mut place = Self {
            dir,
            binary: binary.into(),
            operator,
        };
        if operator != Operator::Oneself {
            // Where the original is, they may not enter.
            let copy = place.path().join("palisade");
            if std::fs::hard_link(binary, &copy).is_err() {
                std::fs::copy(binary, &copy).expect("a copy");
            }
            place.binary = copy;
        }
        if operator == Operator::Borrower {
            Operator::lend(place.path());
        }
        place.write_config("version: \"1.0\"\n");
        place
    }

    /// Whose place it is.
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

    /// The operator's file.
    pub fn config(&self) -> PathBuf {
        self.path().join("palisade.yaml")
    }

    /// The database.
    pub fn database(&self) -> PathBuf {
        self.state().join("palisade.db")
    }

    /// Overwrites the database in place, as a failing disk does, under a gate that may run.
    #[expect(clippy::expect_used, reason = "a test without a file cannot go on")]
    pub fn damage_database(&self) {
        let file = std::fs::File::options().write(true).open(self.database());
        let file = file.expect("a database");
        let length = file.metadata().expect("a length").len();
        let length = usize::try_from(length).expect("a small file");
        file.write_all_at(&vec![0xee; length], 0).expect("a write");
    }

    /// Writes the operator's file in one go: a new file renamed over the old one.
    #[expect(clippy::expect_used, reason = "a test without a file cannot go on")]
    pub fn write_config(&self, text: &str) {
        let fresh = self.path().join(".palisade.yaml.new");
        std::fs::write(&fresh, text).expect("a file");
        self.operator.own(&fresh);
        std::fs::rename(fresh, self.config()).expect("a rename");
    }

    /// `palisade` with this place's flags and a bare environment.
    pub fn palisade(&self, args: &[&str]) -> Command {
        let mut command = match self.operator {
            Operator::Borrower => Operator::borrow(&self.binary, self.path()),
            Operator::Oneself | Operator::Nobody => self.operator.command(&self.binary),
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

    /// The process that restarts this place's background gate, as its lock names it.
    pub fn watchdog(&self) -> Option<i32> {
        let pid = std::fs::read_to_string(self.state().join("watchdog.lock")).ok()?;
        pid.trim().parse().ok()
    }

    /// Runs a command to its end.
    #[expect(clippy::expect_used, reason = "a test without the binary cannot go on")]
    pub fn run(&self, args: &[&str]) -> Output {
        self.palisade(args).output().expect("the binary")
    }

    /// Starts a gate in the foreground and waits for its 'ready'.
    pub fn start(&self) -> GateProcess<'_> {
        self.start_with(|command| command)
    }

    /// The same, with a last word on the command.
    #[expect(
        clippy::expect_used,
        clippy::panic,
        reason = "a test without a gate cannot go on"
    )]
    pub fn start_with(&self, adjust: impl FnOnce(&mut Command) -> &mut Command) -> GateProcess<'_> {
        let mut command = self.palisade(&["gate", "run"]);
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = adjust(&mut command).spawn().expect("the binary");
        let said = Arc::new(Mutex::new(String::new()));
        let stderr = child.stderr.take().expect("stderr is piped");
        let heard = Arc::clone(&said);
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let mut said = heard.lock().unwrap_or_else(PoisonError::into_inner);
                said.push_str(&line);
                said.push('\n');
            }
        });
        let mut gate = GateProcess {
            place: self,
            child,
            said,
        };
        wait::until("the gate to be ready", || {
            if gate.said().lines().any(|line| line == "ready") {
                return Some(());
            }
            if let Ok(Some(status)) = gate.child.try_wait() {
                panic!(
                    "the gate ended ({status}) before it was ready:\n{}",
                    gate.said()
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

/// A running gate. Dropping it kills it.
#[derive(Debug)]
pub struct GateProcess<'a> {
    place: &'a GateDir,
    child: Child,
    said: Arc<Mutex<String>>,
}

impl GateProcess<'_> {
    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// All it has written to stderr so far.
    pub fn said(&self) -> String {
        self.said
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Asks on its socket.
    #[expect(
        clippy::expect_used,
        reason = "a test whose gate does not answer has failed"
    )]
    pub fn ask(&self, method: &str, path: &str, body: &Value) -> HttpResponse {
        let body = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        http::send(&self.place.control(), method, path, body.as_bytes()).expect("an answer")
    }

    /// GETs on its socket.
    pub fn get(&self, path: &str) -> HttpResponse {
        self.ask("GET", path, &Value::Null)
    }

    /// Begins a request on its socket whose body has 100 bytes, and sends the first, `{`: until
    /// the rest comes the gate has a request in flight.
    #[expect(
        clippy::expect_used,
        reason = "a test whose gate does not answer has failed"
    )]
    pub fn hold_request(&self) -> UnixStream {
        let mut stream = UnixStream::connect(self.place.control()).expect("a connection");
        let head = "POST /internal/containers HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n\
                    Content-Length: 100\r\n\r\n";
        stream.write_all(head.as_bytes()).expect("a head");
        // From here on it is in flight.
        let head = http::read_head(&mut stream).expect("an answer");
        assert_eq!(head.status, 100, "{head:?}");
        stream.write_all(b"{").expect("a byte");
        stream
    }

    /// Sends a signal by name, as `kill` does.
    #[expect(clippy::expect_used, reason = "a test that cannot signal cannot go on")]
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill")
            .args([format!("-{name}"), self.pid().to_string()])
            .status()
            .expect("kill");
        assert!(status.success(), "kill -{name} failed");
    }

    /// `kill -9`, and waits for the end.
    #[expect(clippy::expect_used, reason = "a test that cannot kill cannot go on")]
    pub fn kill(mut self) {
        self.child.kill().expect("kill");
        self.child.wait().expect("wait");
    }

    /// Waits until it has ended by itself.
    pub fn wait(&mut self) -> ExitStatus {
        wait::until("the gate to end", || self.child.try_wait().ok().flatten())
    }
}

impl Drop for GateProcess<'_> {
    fn drop(&mut self) {
        // Both fail when it has ended already, which is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
