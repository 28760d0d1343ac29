//! Fixture: an operator with a repository, and the commands they type.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use testkit::gate::GateDir;
use testkit::operator::Operator;
use testkit::pty::Pty;
use testkit::repo::TestRepo;
use testkit::{leftovers, output};

const PALISADE: &str = env!("CARGO_BIN_EXE_palisade");

/// A gate directory with a repository. Dropping it ends its sandboxes.
pub(crate) struct SandboxFixture {
    pub(crate) gate_dir: GateDir,
    pub(crate) repo: TestRepo,
}

impl SandboxFixture {
    pub(crate) fn new(operator: Operator) -> Self {
        Self::of(operator, PALISADE)
    }

    /// Creates a fixture that uses another build of palisade, for measurements.
    pub(crate) fn of(operator: Operator, binary: &str) -> Self {
        let gate_dir = GateDir::with_operator(operator, binary);
        let repo = TestRepo::new(&gate_dir.path().join("project"), operator);
        Self { gate_dir, repo }
    }

    /// `palisade` as typed in a directory. Sandboxes of a user with subids use `--root`.
    pub(crate) fn palisade_in(&self, dir: &Path, args: &[&str]) -> Command {
        let mut command = match args {
            [verb @ ("create" | "run"), rest @ ..]
                if self.gate_dir.operator() == Operator::SubidUser =>
            {
                self.gate_dir.palisade(&[&[*verb, "--root"], rest].concat())
            }
            _ => self.gate_dir.palisade(args),
        };
        command.current_dir(dir);
        command
    }

    /// `palisade` as typed in the repository.
    pub(crate) fn palisade(&self, args: &[&str]) -> Command {
        self.palisade_in(self.repo.dir(), args)
    }

    /// Runs `palisade`, which may fail.
    pub(crate) fn run(&self, args: &[&str]) -> Output {
        self.palisade(args).output().unwrap()
    }

    /// Runs `palisade`, which must succeed, and returns its output.
    pub(crate) fn ok(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(output.status.success(), "{args:?}: {}", describe(&output));
        output::stdout(&output)
    }

    /// Runs `palisade` and parses its output as JSON.
    pub(crate) fn json(&self, args: &[&str]) -> Value {
        let printed = self.ok(&[args, &["--json"]].concat());
        serde_json::from_str(&printed).unwrap_or_else(|error| panic!("{error}: {printed}"))
    }

    /// Runs `palisade`, which must fail with that code, and returns its error output.
    pub(crate) fn fails(&self, code: i32, args: &[&str]) -> String {
        let output = self.run(args);
        assert_eq!(
            output.status.code(),
            Some(code),
            "{args:?}: {}",
            describe(&output)
        );
        output::stderr(&output)
    }

    /// Creates a sandbox and returns its id.
    pub(crate) fn create(&self, name: &str) -> String {
        text(&self.json(&["create", name])["id"])
    }

    /// Runs a line of bash in the sandbox; the line may fail.
    pub(crate) fn bash(&self, name: &str, line: &str) -> Output {
        self.run(&["exec", name, "--", "bash", "-c", line])
    }

    /// Runs a line of bash in the sandbox, which must succeed, and returns its output.
    pub(crate) fn stdout_of(&self, name: &str, line: &str) -> String {
        let output = self.bash(name, line);
        assert!(output.status.success(), "{line}: {}", describe(&output));
        output::stdout(&output).trim_end().to_owned()
    }

    /// `palisade` on a terminal.
    pub(crate) fn on_terminal(&self, args: &[&str]) -> Pty {
        let mut command = self.palisade(args);
        command.env("TERM", "xterm");
        Pty::start(self.gate_dir.operator(), &command)
    }

    /// The process id of the running gate.
    pub(crate) fn gate(&self) -> i32 {
        let status = self.json(&["gate", "status"]);
        i32::try_from(status["pid"].as_i64().unwrap()).unwrap()
    }

    /// The process id of a sandbox's init, from its record.
    pub(crate) fn init(&self, id: &str) -> i32 {
        let record = self.gate_dir.state().join("sandboxes").join(id);
        let record = std::fs::read(record.join("record.json")).unwrap();
        let record: Value = serde_json::from_slice(&record).unwrap();
        i32::try_from(record["init"]["pid"].as_i64().unwrap()).unwrap()
    }

    /// Stops the gate and asserts that no resource of a sandbox is left.
    pub(crate) fn assert_nothing_left(&self) {
        self.ok(&["gate", "stop"]);
        let left = leftovers::find(&self.gate_dir, &[&self.repo]);
        assert!(left.is_empty(), "{left:#?}");
    }
}

/// Status and output of a command, for messages.
pub(crate) fn describe(output: &Output) -> String {
    format!(
        "{}\nstdout: {}\nstderr: {}",
        output.status,
        output::stdout(output),
        output::stderr(output)
    )
}

/// A JSON string.
pub(crate) fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}
