//! The processes under test, each with the same server behind it.

use std::fmt::Write as _;
use std::fs;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Number of rules in the policy.
const RULES: usize = 50;

/// A bridge and its address.
pub struct Peer {
    pub process: ChildProcess,
    pub at: SocketAddr,
}

/// A process that is stopped when this value is dropped.
pub struct ChildProcess {
    child: Child,
}

impl ChildProcess {
    fn start(command: &mut Command, at: SocketAddr) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?} does not start: {error}"));
        let started = Instant::now();
        while TcpStream::connect(at).is_err() {
            let ended = child.try_wait().unwrap();
            assert!(ended.is_none(), "{command:?} ended: {ended:?}");
            assert!(started.elapsed().as_secs() < 30, "{command:?} is not up");
            std::thread::park_timeout(Duration::from_millis(20));
        }
        Self { child }
    }

    /// Resident memory, in kilobytes.
    pub fn memory(&self) -> f64 {
        let path = format!("/proc/{}/status", self.child.id());
        let status = fs::read_to_string(path).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:"));
        let number = line.and_then(|line| line.split_whitespace().nth(1));
        number.unwrap().parse().unwrap()
    }

    /// Processor time so far, in microseconds. Threads are counted, children are not.
    pub fn processor(&self) -> f64 {
        let path = format!("/proc/{}/stat", self.child.id());
        let stat = fs::read_to_string(path).unwrap();
        let after = stat.rsplit(") ").next().unwrap();
        let mut fields = after.split(' ').skip(11);
        let mut ticks = || fields.next().unwrap().parse::<f64>().unwrap();
        // A tick is a hundredth of a second on all common Linux systems.
        (ticks() + ticks()) * 1e4
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        // On SIGTERM the process ends its own children.
        let pid = self.child.id().to_string();
        let signalled = Command::new("kill").arg(pid).status();
        if !signalled.is_ok_and(|status| status.success()) {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

/// A free address on the loopback.
fn free_address() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap()
}

/// The gate with audit; `with_policy` adds a policy of fifty rules.
pub fn gate(palisade: &Path, fixture: &Path, dir: &Path, with_policy: bool) -> Peer {
    let at = free_address();
    let bundle = dir.join("bundle");
    fs::create_dir_all(&bundle).unwrap();
    fs::write(bundle.join("policy.rego"), policy()).unwrap();
    let config = dir.join("palisade.yaml");
    let policies = if with_policy {
        "policies: { bundles: [{ id: bench, path: bundle, entrypoint: mcp/authz }] }\n"
    } else {
        ""
    };
    let text = format!(
        "version: \"1.0\"\nserver:\n  single_port: \"{at}\"\n{policies}\
         tools:\n  - name: fixture\n    command: [\"{}\"]\n",
        fixture.display()
    );
    fs::write(&config, text).unwrap();
    let mut command = Command::new(palisade);
    command
        .arg("--state-dir")
        .arg(dir.join("state"))
        .arg("--config")
        .arg(config)
        .args(["gate", "run"])
        .env("HOME", dir);
    Peer {
        process: ChildProcess::start(&mut command, at),
        at,
    }
}

/// A policy of which every rule is evaluated and none matches: an allowed call is the most
/// expensive call.
fn policy() -> String {
    let mut text =
        "package mcp.authz\n\ndefault allow := false\n\nallow if not denied\n".to_owned();
    for rule in 0..RULES {
        write!(
            text,
            "\ndenied if {{\n\tinput.params.name == \"forbidden_{rule}\"\n\tstartswith(input.params.arguments.path, \"/private/{rule}/\")\n}}\n"
        )
        .unwrap();
    }
    text
}

/// supergateway, with sessions.
pub fn supergateway(program: &Path, fixture: &Path) -> Peer {
    let at = free_address();
    let mut command = Command::new(program);
    command
        .arg("--stdio")
        .arg(fixture)
        .args(["--outputTransport", "streamableHttp", "--stateful"])
        .args(["--logLevel", "none", "--port"])
        .arg(at.port().to_string());
    Peer {
        process: ChildProcess::start(&mut command, at),
        at,
    }
}

/// mcp-proxy, with sessions.
pub fn mcp_proxy(program: &Path, fixture: &Path) -> Peer {
    let at = free_address();
    let mut command = Command::new(program);
    command
        .args(["--host", "127.0.0.1", "--port"])
        .arg(at.port().to_string())
        .arg(fixture);
    Peer {
        process: ChildProcess::start(&mut command, at),
        at,
    }
}
