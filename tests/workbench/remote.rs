//! The remote backend: the part of the backends' contract that applies to a backend that does not
//! create containers, and the commands on a container that Palisade did not start.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Output, Stdio};

use control::remote::BlockingWorkbenchClient;
use policy::id::SandboxId;
use sandbox::contract::{
    ExecutionResult, Force, SandboxBackend, SandboxCommand, SandboxConfig, SandboxError,
    SandboxListener, SandboxMetadata, SandboxStatus, TransferBounds, TransferSummary,
};
use sandbox::namespace::Namespace;
use sandbox::remote::RemoteBackend;
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::gate::GateDir;
use testkit::output::{stderr, stdout};

use crate::PALISADE;
use crate::server::{Server, ServerAddress, SocketKind};
use crate::suite;

/// A namespace sandbox that simulates a remote container: the namespace backend creates it, and the
/// remote backend runs commands in it.
struct SimulatedContainer {
    namespace: Namespace,
    remote: RemoteBackend<BlockingWorkbenchClient>,
    _dir: TempDir,
}

impl SimulatedContainer {
    fn new() -> Self {
        let gate_dir = tempfile::Builder::new().prefix("wb").tempdir().unwrap();
        let directory = gate_dir.path().join("sandboxes");
        let namespace = Namespace::new(directory, PALISADE.into(), vec!["__init".into()]);
        let id = SandboxId::parse("one").unwrap();
        let client = control::workbench::client(&namespace, &id).unwrap();
        let remote = RemoteBackend::new(id, BlockingWorkbenchClient::new(client).unwrap());
        Self {
            namespace,
            remote,
            _dir: gate_dir,
        }
    }
}

impl Drop for SimulatedContainer {
    fn drop(&mut self) {
        let _ = self.namespace.delete(self.remote.id(), Force::Yes);
    }
}

impl suite::BackendFixture for SimulatedContainer {
    fn backend(&self) -> &dyn SandboxBackend {
        self
    }

    fn unavailable(&self) -> Box<dyn SandboxBackend> {
        panic!("a remote container has no unavailable backend")
    }

    fn traces(&self) -> Vec<String> {
        Vec::new()
    }
}

impl SandboxBackend for SimulatedContainer {
    fn create(&self, config: &SandboxConfig) -> Result<SandboxMetadata, SandboxError> {
        self.namespace.create(config)
    }

    fn pause(&self, id: &SandboxId) -> Result<(), SandboxError> {
        self.remote.pause(id)
    }

    fn resume(&self, id: &SandboxId) -> Result<(), SandboxError> {
        self.remote.resume(id)
    }

    fn delete(&self, id: &SandboxId, force: Force) -> Result<(), SandboxError> {
        self.remote.delete(id, force)
    }

    fn exec(
        &self,
        id: &SandboxId,
        command: &SandboxCommand,
    ) -> Result<ExecutionResult, SandboxError> {
        self.remote.exec(id, command)
    }

    fn upload(
        &self,
        id: &SandboxId,
        to: &Path,
        archive: &mut dyn Read,
        bounds: &TransferBounds,
    ) -> Result<TransferSummary, SandboxError> {
        self.remote.upload(id, to, archive, bounds)
    }

    fn download(
        &self,
        id: &SandboxId,
        from: &Path,
        archive: &mut dyn Write,
        bounds: &TransferBounds,
    ) -> Result<TransferSummary, SandboxError> {
        self.remote.download(id, from, archive, bounds)
    }

    fn listeners(&self, id: &SandboxId) -> Result<Vec<SandboxListener>, SandboxError> {
        self.remote.listeners(id)
    }

    fn status(&self, id: &SandboxId) -> SandboxStatus {
        self.remote.status(id)
    }
}

mod contract {
    suite::contract! { @each super::SimulatedContainer::new();
        every_call_for_an_unknown_sandbox_is_not_found
        command_returns_exit_code_and_separate_outputs
        input_environment_and_directory_reach_a_command
        a_command_that_takes_too_long_is_killed
        missing_program_is_named_in_the_error
        transfer_keeps_bytes_paths_modes_and_links
        a_single_file_goes_in_and_out
        an_upload_replaces_files_and_keeps_what_it_does_not_name
        a_transfer_beyond_its_bounds_is_refused
        truncated_archive_changes_nothing
    }

    use crate::suite;
}

/// An operator whose configuration names a workbench, and the workbench.
struct RemoteFixture {
    gate_dir: GateDir,
    server: Server,
}

impl RemoteFixture {
    fn new() -> Self {
        let gate_dir = GateDir::new(PALISADE);
        let server = Server::start_with(SocketKind::Unix, &[], |command| {
            command
                .env("SIDECAR_AUTH_TOKEN", "open-sesame")
                .env("SIDECAR_REQUIRE_AUTH", "1");
        });
        let fixture = Self { gate_dir, server };
        fixture.wait_for_ready(20_000);
        fixture
    }

    /// Writes the configuration, with this timeout for the workbench in milliseconds.
    fn wait_for_ready(&self, ms: u32) {
        let ServerAddress::Unix(socket) = &self.server.address else {
            panic!("not a Unix socket");
        };
        self.gate_dir.write_config(&format!(
            "version: \"1.0\"\nsandbox:\n  backend: remote\n  remote:\n    socket_path: {}\n    \
             wait_for_ready_ms: {ms}\n    auth:\n      token: open-sesame\n      required: true\n",
            socket.display()
        ));
    }

    fn run(&self, args: &[&str]) -> Output {
        self.gate_dir.palisade(args).output().unwrap()
    }

    fn ok(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
        stdout(&output)
    }
}

#[test]
fn commands_and_copies_work_with_a_remote_container() {
    let fixture = RemoteFixture::new();
    let root = std::fs::canonicalize(fixture.server.root()).unwrap();
    let pwd = fixture.ok(&["exec", "remote", "--", "pwd"]);
    assert_eq!(pwd.trim_end(), root.to_str().unwrap());
    let script = "echo out; echo err >&2; echo $WORD; exit 7";
    let output = fixture.run(&[
        "exec",
        "remote",
        "-e",
        "WORD=said",
        "--",
        "sh",
        "-c",
        script,
    ]);
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(
        (stdout(&output), stderr(&output)),
        ("out\nsaid\n".into(), "err\n".into())
    );
    let output = fixture.run(&["exec", "remote", "--", "no-such-program"]);
    assert!(
        stderr(&output).contains("'no-such-program' could not be run"),
        "{}",
        stderr(&output)
    );
    assert_eq!(
        fixture.ok(&["shell", "remote", "-c", "echo $((6 * 7))"]),
        "42\n"
    );

    let files = tempfile::tempdir().unwrap();
    let source = files.path().join("tree");
    std::fs::create_dir(&source).unwrap();
    std::fs::write(source.join("file"), b"a\xff\0b").unwrap();
    fixture.ok(&["upload", "remote", source.to_str().unwrap(), "in"]);
    assert_eq!(fixture.server.read("in/tree/file"), b"a\xff\0b");
    let back = files.path().join("back");
    fixture.ok(&["download", "remote", "in/tree", back.to_str().unwrap()]);
    assert_eq!(std::fs::read(back.join("tree/file")).unwrap(), b"a\xff\0b");
    let left: Vec<_> = std::fs::read_dir(&root).unwrap().collect();
    assert_eq!(left.len(), 1, "{left:?}");
    let read = fixture.ok(&["tool", "remote", "ls", "{\"path\":\"in\"}"]);
    assert!(read.contains("tree/"), "{read}");
}

#[test]
fn remote_shell_keeps_its_working_directory() {
    let fixture = RemoteFixture::new();
    fixture.server.write("deep/er/file", "here\n");
    let mut shell = fixture
        .gate_dir
        .palisade(&["shell", "remote"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = shell.stdin.take().unwrap();
    input
        .write_all(b"cd deep\ncd er && cat file\nfalse\n")
        .unwrap();
    drop(input);
    let output = shell.wait_with_output().unwrap();
    assert_eq!(stdout(&output), "here\n");
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn lifecycle_commands_on_a_remote_container_are_refused() {
    let fixture = RemoteFixture::new();
    let managed = "the container is managed elsewhere";
    for (args, what) in [
        (&["create", "fix"][..], "made"),
        (&["create", "fix", "--backend", "remote"], "made"),
        (&["pause", "remote"], "paused"),
        (&["resume", "remote"], "resumed"),
        (&["delete", "--force", "remote"], "deleted"),
        (&["snapshot", "remote"], "committed"),
        (&["checkpoint", "remote", "before"], "kept"),
        (&["fork", "remote", "other"], "copied"),
        (&["ports", "remote", "--publish", "0:80"], "published"),
    ] {
        let output = fixture.run(args);
        assert_eq!(
            output.status.code(),
            Some(4),
            "{args:?}: {}",
            stderr(&output)
        );
        let printed = stderr(&output);
        assert!(
            printed.contains(managed) && printed.contains(what),
            "{args:?}: {printed}"
        );
    }
    assert_eq!(fixture.ok(&["exec", "remote", "--", "echo", "on"]), "on\n");
    let socket = match &fixture.server.address {
        ServerAddress::Unix(path) => path.display().to_string(),
        ServerAddress::Tcp(address) => address.to_string(),
    };
    fixture.wait_for_ready(1000);
    let RemoteFixture { gate_dir, server } = fixture;
    drop(server);
    let output = gate_dir
        .palisade(&["exec", "remote", "--", "true"])
        .output()
        .unwrap();
    let printed = stderr(&output);
    let sentence = format!("Timed out waiting for coding sidecar at unix:{socket}");
    assert!(printed.contains(&sentence), "{printed}");
}

#[test]
fn remote_container_is_listed_and_its_name_reserved() {
    let fixture = RemoteFixture::new();
    let row = |json: &str| -> Value {
        let rows: Value = serde_json::from_str(json).unwrap();
        assert_eq!(rows.as_array().map(Vec::len), Some(1), "{rows}");
        rows[0].clone()
    };
    let table = fixture.ok(&["list"]);
    assert!(table.contains("managed elsewhere, reachable"), "{table}");
    let shown = row(&fixture.ok(&["list", "--json"]));
    for (field, value) in [
        ("id", json!("remote")),
        ("name", json!("remote")),
        ("backend", json!("remote")),
        ("status", json!("active")),
        ("reason", Value::Null),
        ("branch_name", Value::Null),
        ("created_at", Value::Null),
    ] {
        assert_eq!(shown[field], value, "{field}");
    }
    let get = |path| testkit::http::send(&fixture.gate_dir.control(), "GET", path, b"").unwrap();
    assert_eq!(get("/v1/sandboxes/remote").json(), shown);
    assert_eq!(get("/v1/sandboxes?name=other").json(), json!([]));

    for args in [
        &["create", "--backend", "namespace", "--no-repo", "Remote!"][..],
        &[
            "run",
            "--backend=namespace",
            "--no-repo",
            "-n",
            "remote",
            "true",
        ],
        &["diff", "remote"],
        &["merge", "remote"],
    ] {
        let output = fixture.run(args);
        let printed = stderr(&output);
        assert_eq!(output.status.code(), Some(4), "{args:?}: {printed}");
        let elsewhere = "the container is managed elsewhere";
        assert!(printed.contains(elsewhere), "{args:?}: {printed}");
    }

    let RemoteFixture { gate_dir, server } = fixture;
    drop(server);
    let table = stdout(&gate_dir.run(&["list"]));
    let unreachable =
        "managed elsewhere, not reachable: Timed out waiting for coding sidecar at unix:";
    assert!(table.contains(unreachable), "{table}");
    let shown = row(&stdout(&gate_dir.run(&["list", "--json"])));
    assert_eq!(shown["status"], "error");
    let reason = shown["reason"].as_str().unwrap();
    assert!(reason.starts_with("Timed out"), "{reason}");
}

#[test]
fn actions_in_a_remote_container_are_recorded() {
    let fixture = RemoteFixture::new();
    let recorded_methods = || -> Vec<String> {
        let list = fixture.ok(&["audit", "list", "--json", "--sandbox", "remote"]);
        let records: Vec<Value> = serde_json::from_str(&list).unwrap();
        records
            .iter()
            .inspect(|record| assert_eq!(record["event"], "sandbox_entered"))
            .map(|record| record["method"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(recorded_methods(), Vec::<String>::new());
    fixture.ok(&["exec", "remote", "--", "true"]);
    fixture.ok(&["shell", "remote", "-c", "echo hello > file"]);
    fixture.ok(&["tool", "remote", "read", "{\"path\":\"file\"}"]);
    let files = tempfile::tempdir().unwrap();
    let at = |name: &str| files.path().join(name).to_str().unwrap().to_owned();
    fixture.ok(&["download", "remote", "file", &at("")]);
    fixture.ok(&["upload", "remote", &at("file"), "in"]);
    let mut methods = recorded_methods();
    methods.sort();
    assert_eq!(methods, ["download", "exec", "exec", "shell", "upload"]);
    // A refused command was not recorded as an entry.
    let refused = fixture.run(&["pause", "remote"]);
    assert!(!refused.status.success());
    assert_eq!(recorded_methods().len(), 5);
}
