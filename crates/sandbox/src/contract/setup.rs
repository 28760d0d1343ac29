//! The set-up command of a new sandbox.

use std::fmt;
use std::time::Duration;

use policy::id::SandboxId;

use super::{SandboxBackend, SandboxCommand, SandboxError};

/// Maximum number of output lines of a failed command that are reported, counted from the end.
const MAX_LINES: usize = 20;

/// Maximum number of characters of a reported line.
const MAX_LINE_CHARS: usize = 500;

/// Shell script that runs its arguments as a command with both outputs on one pipe, so that the
/// lines are reported in their order.
const MERGE_OUTPUTS: &str = "exec \"$@\" 2>&1";

/// A failed set-up command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetupFailure {
    /// How the command ended.
    pub end: SetupEnd,
    /// The last lines of the command's output, which the agent controls.
    pub lines: Vec<String>,
}

/// How a failed set-up command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetupEnd {
    /// The command exited with this code.
    Exited(i32),
    /// The command was killed after this time.
    TimedOut(Duration),
}

impl fmt::Display for SetupFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.end {
            SetupEnd::Exited(code) => write!(f, "the set-up command exited with code {code}")?,
            SetupEnd::TimedOut(after) => write!(
                f,
                "the set-up command was killed: it did not end within {after:?}"
            )?,
        }
        if self.lines.is_empty() {
            return f.write_str("; it wrote nothing");
        }
        f.write_str("; its last output:")?;
        self.lines
            .iter()
            .try_for_each(|line| write!(f, "\n  {line}"))
    }
}

impl std::error::Error for SetupFailure {}

/// Runs a set-up command and waits for its exit.
pub fn run(
    backend: &dyn SandboxBackend,
    id: &SandboxId,
    command: &[String],
    timeout: Duration,
) -> Result<(), SandboxError> {
    let shell = ["/bin/sh", "-c", MERGE_OUTPUTS, "sh"];
    let words = shell.into_iter().chain(command.iter().map(String::as_str));
    let command = SandboxCommand {
        timeout: Some(timeout),
        ..SandboxCommand::new(words)
    };
    let (end, output) = match backend.exec(id, &command) {
        Ok(result) if result.exit_code == 0 => return Ok(()),
        Ok(result) => (
            SetupEnd::Exited(result.exit_code),
            [result.stdout, result.stderr].concat(),
        ),
        Err(SandboxError::TimedOut { after, output }) => (SetupEnd::TimedOut(after), output),
        Err(other) => return Err(other),
    };
    let lines = last_lines(&output);
    Err(SetupFailure { end, lines }.into())
}

fn last_lines(output: &[u8]) -> Vec<String> {
    // UTF-8 has at most four bytes for each character; earlier output is not decoded.
    let max_bytes = MAX_LINES * (MAX_LINE_CHARS + 1) * 4;
    let from = output.len().saturating_sub(max_bytes);
    let text = String::from_utf8_lossy(output.get(from..).unwrap_or_default());
    let lines: Vec<&str> = text.lines().collect();
    let from = lines.len().saturating_sub(MAX_LINES);
    let last = lines.get(from..).unwrap_or_default().iter();
    last.map(|line| line.chars().take(MAX_LINE_CHARS).collect())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_names_its_cause_and_the_last_lines() {
        let failed = |end, lines: &[&str]| {
            let lines = lines.iter().map(|&line| line.to_owned()).collect();
            SetupFailure { end, lines }.to_string()
        };
        assert_eq!(
            failed(SetupEnd::Exited(3), &["one", "two"]),
            "the set-up command exited with code 3; its last output:\n  one\n  two"
        );
        assert_eq!(
            failed(SetupEnd::TimedOut(Duration::from_secs(90)), &[]),
            "the set-up command was killed: it did not end within 90s; it wrote nothing"
        );
    }

    #[test]
    fn reported_output_is_bounded_in_lines_and_in_their_length() {
        let output: String = (0..100).map(|n| format!("line {n}\n")).collect();
        let lines = last_lines(output.as_bytes());
        assert_eq!(lines.len(), MAX_LINES);
        assert_eq!(lines.last().map(String::as_str), Some("line 99"));
        let long = last_lines(&vec![b'x'; 10 << 20]);
        assert_eq!(
            long.iter().map(String::len).collect::<Vec<_>>(),
            [MAX_LINE_CHARS]
        );
        assert_eq!(last_lines(b"no end \xff"), ["no end \u{fffd}"]);
        assert_eq!(last_lines(b""), [""; 0]);
    }
}
