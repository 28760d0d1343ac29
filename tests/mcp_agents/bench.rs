//! An operator's repository, and a client that works on it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use testkit::gate::Place;
use testkit::operator::Operator;
use testkit::repo::Repo;
use testkit::{leftovers, said};

const PALISADE: &str = env!("CARGO_BIN_EXE_palisade");

/// A place for a gate and a repository in it. Dropping it ends its sandboxes.
pub(crate) struct Bench {
    pub(crate) place: Place,
    pub(crate) repo: Repo,
}

impl Bench {
    pub(crate) fn new() -> Self {
        let place = Place::new(PALISADE);
        let repo = Repo::new(&place.path().join("project"), Operator::Oneself);
        Self { place, repo }
    }

    /// `palisade` as typed in the repository.
    pub(crate) fn run(&self, args: &[&str]) -> Output {
        let mut command = self.place.palisade(args);
        command.current_dir(self.repo.dir()).output().unwrap()
    }

    /// Runs it; it must go well. Returns what it printed.
    pub(crate) fn ok(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(output.status.success(), "{args:?}: {}", said::err(&output));
        said::out(&output)
    }

    /// Has the client do a part of drive.py; everything in `held` must hold.
    pub(crate) fn drive(&self, what: &str, mode: &str, held: &[&str]) {
        let text = |path: PathBuf| path.to_str().unwrap().to_owned();
        let server = [
            PALISADE.to_owned(),
            "--state-dir".to_owned(),
            text(self.place.state()),
            "--config".to_owned(),
            text(self.place.config()),
            "mcp".to_owned(),
        ];
        self.drive_with(what, mode, &server, held);
    }

    /// The same with a server that is started so.
    pub(crate) fn drive_with(&self, what: &str, mode: &str, server: &[String], held: &[&str]) {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/mcp_agents/drive.py");
        let mut command = Command::new(python());
        command
            .arg(source)
            .args([what, mode])
            .args(server)
            .current_dir(self.repo.dir())
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", self.place.path());
        let output = command.output().unwrap();
        let said = said::out(&output);
        let told: Vec<&str> = said
            .lines()
            .filter_map(|line| line.strip_prefix("ok "))
            .collect();
        assert!(
            output.status.success() && told == held,
            "{what}, {mode}: {told:?}\n{}",
            said::err(&output)
        );
    }

    /// The diary of a branch, oldest first.
    pub(crate) fn diary(&self, branch: &str) -> Vec<String> {
        let range = format!("main..{branch}");
        let log = self.repo.git(&["log", "--reverse", "--format=%s", &range]);
        log.lines().map(str::to_owned).collect()
    }

    /// Stops the gate; then nothing of any sandbox may be there.
    pub(crate) fn assert_nothing_left(&self) {
        self.ok(&["gate", "stop"]);
        let left = leftovers::find(&self.place, &[&self.repo]);
        assert!(left.is_empty(), "{left:#?}");
    }
}

/// The Python that has the client.
fn python() -> PathBuf {
    let cache = std::env::var_os("PALISADE_CACHE").map_or_else(
        || Path::new(&std::env::var_os("HOME").unwrap()).join(".cache/palisade"),
        PathBuf::from,
    );
    let peers = cache.join("mcp");
    assert!(
        peers.join(".installed").exists(),
        "MCP clients are missing here: tests/mcp/install installs them"
    );
    peers.join("venv/bin/python")
}
