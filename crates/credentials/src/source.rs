//! Reads the value of a credential from its source.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use config::Secret;
use config::leaf::SecretSource;
use tokio::io::AsyncReadExt;
use tokio::process::Command;
use zeroize::Zeroizing;

/// Maximum size of a value.
const MAX_VALUE: usize = 64 * 1024;

/// Maximum run time of a command that prints a value.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum length of a command's error output in an error message.
const MAX_ERROR_TEXT: usize = 300;

/// Why a value cannot be read. The messages are for the operator and contain no value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    /// The variable, the file or the output is missing or empty.
    #[error("{0} is not set")]
    Missing(String),
    /// The source exists and cannot be read.
    #[error("{origin} cannot be read: {cause}")]
    Unreadable {
        /// The source, as the configuration names it.
        origin: String,
        /// The cause.
        cause: String,
    },
    /// The value cannot be a header value.
    #[error("the value of {0} has more than one line, control characters or more than 64 KiB")]
    Invalid(String),
}

impl SourceError {
    fn unreadable(origin: &str, cause: impl std::fmt::Display) -> Self {
        Self::Unreadable {
            origin: origin.to_owned(),
            cause: cause.to_string(),
        }
    }
}

/// The source as error messages name it. A command is not quoted, because an argument of it may
/// be a secret.
pub fn describe(source: &SecretSource) -> String {
    match source {
        SecretSource::Env(name) => format!("the environment variable {name}"),
        SecretSource::File(path) => format!("the file {}", path.display()),
        SecretSource::Command(line) => {
            let program = line.split_whitespace().next().unwrap_or_default();
            format!("the output of '{program} …'")
        }
    }
}

/// Reads a file with a value.
pub(crate) async fn read_file(source: &SecretSource, path: &Path) -> Result<Secret, SourceError> {
    let origin = describe(source);
    let read = async {
        let file = tokio::fs::File::open(path).await?;
        let mut bytes = Zeroizing::new(Vec::new());
        file.take(MAX_VALUE as u64 + 1)
            .read_to_end(&mut bytes)
            .await?;
        Ok::<_, std::io::Error>(bytes)
    };
    match read.await {
        Ok(bytes) => check(&origin, &bytes),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Err(SourceError::Missing(origin))
        }
        Err(error) => Err(SourceError::unreadable(&origin, error)),
    }
}

/// Runs a command of the operator's and reads the value from its output.
pub(crate) async fn run_command(source: &SecretSource, line: &str) -> Result<Secret, SourceError> {
    let origin = describe(source);
    let spawned = Command::new("/bin/sh")
        .args(["-c", line])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true)
        .spawn();
    let mut child = spawned.map_err(|error| SourceError::unreadable(&origin, error))?;
    let group = child.id();
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let running = async {
        let (bytes, error_text) = tokio::try_join!(read_bounded(stdout), read_bounded(stderr))?;
        Ok::<_, std::io::Error>((bytes, error_text, child.wait().await?))
    };
    let ended = tokio::time::timeout(COMMAND_TIMEOUT, running).await;
    if let (Err(_), Some(group)) = (&ended, group.and_then(|id| i32::try_from(id).ok())) {
        // The shell is killed on drop; its children are in its process group.
        let group = nix::unistd::Pid::from_raw(group);
        // The group may have ended already.
        let _ = nix::sys::signal::killpg(group, nix::sys::signal::Signal::SIGKILL);
    }
    let ended = ended.map_err(|_| SourceError::unreadable(&origin, "the command timed out"))?;
    let (bytes, error_text, status) =
        ended.map_err(|error| SourceError::unreadable(&origin, error))?;
    if !status.success() {
        let text = String::from_utf8_lossy(&error_text);
        let text = text.trim();
        let end = text.floor_char_boundary(MAX_ERROR_TEXT);
        let cause = format!("{status}: {}", text.get(..end).unwrap_or_default());
        return Err(SourceError::unreadable(&origin, cause.escape_debug()));
    }
    check(&origin, &bytes)
}

/// Reads at most one byte more than a value may have. The rest of the output is discarded, so that
/// the command does not block.
async fn read_bounded(
    pipe: Option<impl tokio::io::AsyncRead + Unpin>,
) -> std::io::Result<Zeroizing<Vec<u8>>> {
    let mut bytes = Zeroizing::new(Vec::new());
    let Some(mut pipe) = pipe else {
        return Ok(bytes);
    };
    (&mut pipe)
        .take(MAX_VALUE as u64 + 1)
        .read_to_end(&mut bytes)
        .await?;
    tokio::io::copy(&mut pipe, &mut tokio::io::sink()).await?;
    Ok(bytes)
}

/// Validates a value: one line of printable characters, without surrounding white space.
pub(crate) fn check(origin: &str, bytes: &[u8]) -> Result<Secret, SourceError> {
    let invalid = || SourceError::Invalid(origin.to_owned());
    if bytes.len() > MAX_VALUE {
        return Err(invalid());
    }
    let text = std::str::from_utf8(bytes).map_err(|_| invalid())?.trim();
    if text.is_empty() {
        return Err(SourceError::Missing(origin.to_owned()));
    }
    if text.chars().any(char::is_control) {
        return Err(invalid());
    }
    Ok(Secret::new(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(line: &str) -> SecretSource {
        SecretSource::Command(line.to_owned())
    }

    async fn output(line: &str) -> Result<String, SourceError> {
        let value = run_command(&command(line), line).await?;
        Ok(value.expose().to_owned())
    }

    #[tokio::test]
    async fn command_output_is_trimmed_and_must_be_one_line() {
        assert_eq!(output("echo ' value '").await.unwrap(), "value");
        let invalid = output("printf 'a\\nb'").await.unwrap_err();
        assert_eq!(
            invalid.to_string(),
            "the value of the output of 'printf …' has more than one line, control characters or \
             more than 64 KiB"
        );
        assert!(matches!(output("true").await, Err(SourceError::Missing(_))));
        let large = output("head -c 100000 /dev/zero | tr '\\0' x").await;
        assert!(matches!(large, Err(SourceError::Invalid(_))));
    }

    #[tokio::test]
    async fn failed_command_reports_status_and_error_text_but_no_argument() {
        let error = output("echo hidden >/dev/null; echo locked >&2; exit 3").await;
        assert_eq!(
            error.unwrap_err().to_string(),
            "the output of 'echo …' cannot be read: exit status: 3: locked"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn command_that_does_not_end_is_killed() {
        let error = output("sleep 1000").await.unwrap_err();
        assert!(error.to_string().contains("timed out"), "{error}");
    }

    #[tokio::test]
    async fn file_is_read_without_its_final_newline() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("token");
        let source = SecretSource::File(path.clone());
        let missing = read_file(&source, &path).await.unwrap_err();
        assert!(matches!(missing, SourceError::Missing(_)));
        std::fs::write(&path, "file-value\n").unwrap();
        let value = read_file(&source, &path).await.unwrap();
        assert_eq!(value.expose(), "file-value");
    }
}
