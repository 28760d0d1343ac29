//! Test fixture: a namespace backend with a temporary directory.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::PathBuf;

use policy::id::SandboxId;
use sandbox::contract::{
    ExecutionResult, Force, GatePorts, SandboxBackend, SandboxCommand, SandboxConfig,
    SandboxLimits, SystemConfig,
};
use sandbox::name::Slug;
use sandbox::namespace::Namespace;

/// A backend and its directory.
pub(crate) struct NamespaceFixture {
    pub(crate) backend: Namespace,
    pub(crate) directory: tempfile::TempDir,
    /// Every cgroup in the records of this fixture's sandboxes.
    cgroups: RefCell<BTreeSet<PathBuf>>,
}

impl NamespaceFixture {
    pub(crate) fn new() -> Self {
        Self::in_directory(tempfile::tempdir().unwrap())
    }

    pub(crate) fn in_directory(directory: tempfile::TempDir) -> Self {
        let backend = backend(directory.path().join("sandboxes"));
        Self {
            backend,
            directory,
            cgroups: RefCell::default(),
        }
    }

    /// A fixture with one sandbox.
    pub(crate) fn with_sandbox() -> (Self, SandboxId) {
        let fixture = Self::new();
        let config = config("one");
        fixture.backend.create(&config).unwrap();
        (fixture, config.id)
    }

    /// Creates another sandbox with a changed configuration.
    pub(crate) fn create(&self, name: &str, change: impl FnOnce(&mut SandboxConfig)) -> SandboxId {
        let mut config = config(name);
        change(&mut config);
        self.backend.create(&config).unwrap();
        config.id
    }

    /// Runs a shell command.
    pub(crate) fn shell(&self, id: &SandboxId, line: &str) -> ExecutionResult {
        self.backend.exec(id, &SandboxCommand::shell(line)).unwrap()
    }

    /// Runs a shell command that must succeed without error output, and returns its output.
    pub(crate) fn stdout_of(&self, id: &SandboxId, line: &str) -> String {
        let result = self.shell(id, line);
        assert_eq!(
            (result.exit_code, text(&result.stderr)),
            (0, String::new()),
            "{line}: {}",
            text(&result.stdout)
        );
        text(&result.stdout)
    }

    /// Counts the processes named `sleep`.
    pub(crate) fn sleepers(&self, id: &SandboxId) -> u32 {
        // A process may exit between the listing and the read.
        let line = "cat /proc/[0-9]*/comm 2>/dev/null | grep -c sleep || true";
        self.stdout_of(id, line).trim().parse().unwrap()
    }

    /// Installs the probe in a sandbox.
    pub(crate) fn install_probe(&self, id: &SandboxId) {
        let mut command = SandboxCommand::shell("cat > /tmp/probe && chmod +x /tmp/probe");
        command.stdin = std::fs::read(program("sandbox-probe")).unwrap();
        let result = self.backend.exec(id, &command).unwrap();
        assert_eq!(result.exit_code, 0, "{}", text(&result.stderr));
    }
}

impl crate::suite::BackendFixture for NamespaceFixture {
    fn backend(&self) -> &dyn SandboxBackend {
        &self.backend
    }

    fn unavailable(&self) -> Box<dyn SandboxBackend> {
        let place = self.directory.path().join("sandboxes");
        let missing = self.directory.path().join("no-such-launcher");
        Box::new(Namespace::new(place, missing, Vec::new()))
    }

    /// The directories of this fixture, and the cgroups of its sandboxes.
    fn traces(&self) -> Vec<String> {
        let place = self.directory.path().join("sandboxes");
        let names = |place: &std::path::Path| -> Vec<String> {
            std::fs::read_dir(place)
                .into_iter()
                .flatten()
                .flatten()
                .map(|entry| entry.file_name().to_string_lossy().into_owned())
                .collect()
        };
        let mut traces = names(&place);
        traces.retain(|name| name != ".lock");
        for name in traces.clone() {
            let record = std::fs::read(place.join(name).join("record.json")).unwrap_or_default();
            let record: serde_json::Value = serde_json::from_slice(&record).unwrap_or_default();
            let listed = record.get("cgroups").and_then(|list| list.as_array());
            let paths = listed.into_iter().flatten().filter_map(|one| one.as_str());
            self.cgroups.borrow_mut().extend(paths.map(PathBuf::from));
        }
        let cgroups = self.cgroups.borrow();
        let left = cgroups.iter().filter(|cgroup| cgroup.exists());
        traces.extend(left.map(|cgroup| cgroup.display().to_string()));
        traces.sort();
        traces
    }
}

impl Drop for NamespaceFixture {
    fn drop(&mut self) {
        let place = self.directory.path().join("sandboxes");
        for entry in std::fs::read_dir(place).into_iter().flatten().flatten() {
            if let Some(Ok(id)) = entry.file_name().to_str().map(SandboxId::parse) {
                let _ = self.backend.delete(&id, Force::Yes);
            }
        }
    }
}

pub(crate) fn backend(directory: PathBuf) -> Namespace {
    Namespace::new(directory, program("sandbox-init"), Vec::new())
}

/// The path of a binary of this crate, or of a copy if the test's user has no permission for the
/// original.
pub(crate) fn program(name: &str) -> PathBuf {
    let original = match name {
        "sandbox-init" => env!("CARGO_BIN_EXE_sandbox-init"),
        _ => env!("CARGO_BIN_EXE_sandbox-probe"),
    };
    match std::env::var_os("PALISADE_TEST_PROGRAMS") {
        Some(directory) => PathBuf::from(directory).join(name),
        None => original.into(),
    }
}

pub(crate) fn config(name: &str) -> SandboxConfig {
    SandboxConfig {
        id: SandboxId::parse(name).unwrap(),
        name: Slug::from_name(name).unwrap(),
        environment: Vec::new(),
        ports: GatePorts::default(),
        limits: SandboxLimits::default(),
        system: SystemConfig::default(),
        trust: None,
        setup_command: None,
    }
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Polls a condition that cannot be awaited otherwise.
pub(crate) fn until(what: &str, condition: impl Fn() -> bool) {
    poll_without_pause(what, || {
        let is_true = condition();
        if !is_true {
            let _ = nix::poll::poll(&mut [], 5_u8);
        }
        is_true
    });
}

/// Polls a condition as [`until`] does, but without a pause between polls, for exact timing.
pub(crate) fn poll_without_pause(what: &str, condition: impl Fn() -> bool) {
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !condition() {
        assert!(
            std::time::Instant::now() < deadline,
            "timed out waiting for {what}"
        );
        std::thread::yield_now();
    }
}
