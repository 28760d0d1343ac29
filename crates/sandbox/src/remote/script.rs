//! Shell scripts for an arbitrary container: POSIX, with `base64` and `tar`.

use std::ffi::OsStr;
use std::io::Read;
use std::path::Path;

use crate::contract::{SandboxCommand, SandboxError};

/// Exit code of a script that could not start its command.
const REFUSED_EXIT_CODE: i32 = 126;

/// A script.
#[derive(Debug)]
pub(super) struct Script {
    pub(super) line: String,
    /// The program that the script runs.
    pub(super) program: String,
    /// A random prefix of refusals on standard error.
    marker: String,
}

/// Why a command could not be started.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct StartRefusal {
    pub(super) step: String,
    pub(super) reason: String,
}

impl Script {
    /// Creates a script for a command, whose standard input is the file `input` if there is one.
    pub(super) fn for_command(
        command: &SandboxCommand,
        input: Option<&str>,
        marker: &str,
    ) -> Result<Self, SandboxError> {
        let program = command.argv.first().map(|word| word.as_os_str());
        let program = program.unwrap_or_default().to_string_lossy().into_owned();
        let quoted = |text: &OsStr| quote(text, &program);
        let mut line = String::new();
        if let Some(input) = input {
            // The file is opened and then removed before the command sees it.
            line += &format!("exec < {input} && rm -f {input} || exit 1\n");
        }
        if let Some(directory) = &command.directory {
            let directory = quoted(directory.as_os_str())?;
            line += &format!(
                "cd -- {directory} 2>/dev/null || {{ echo '{marker} entering the directory' >&2; \
                 exit {REFUSED_EXIT_CODE}; }}\n"
            );
        }
        for (name, value) in &command.environment {
            let is_name = |text: &str| {
                !text.is_empty()
                    && !text.starts_with(|c: char| c.is_ascii_digit())
                    && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
            };
            match name.to_str() {
                Some(name) if is_name(name) => {
                    line += &format!("export {name}={}\n", quoted(value)?);
                }
                _ => return Err(unsupported_argument(&program, "a variable's name")),
            }
        }
        let words = command
            .argv
            .iter()
            .map(|word| quoted(word))
            .collect::<Result<Vec<_>, _>>()?;
        let first = words.first().cloned().unwrap_or_default();
        line += &format!(
            "command -v -- {first} >/dev/null 2>&1 || {{ echo '{marker} running it' >&2; exit \
             {REFUSED_EXIT_CODE}; }}\n"
        );
        // With `exec` no shell remains as the command's parent.
        line += &format!("exec {}\n", words.join(" "));
        Ok(Self {
            line,
            program,
            marker: marker.to_owned(),
        })
    }

    /// Whether this may be the start of a refusal.
    pub(super) fn may_be_refusal_prefix(&self, stderr: &[u8]) -> bool {
        let marker = self.marker.as_bytes();
        let length = marker.len().min(stderr.len());
        marker.get(..length) == stderr.get(..length)
    }

    /// Returns the reason if the command could not be started.
    pub(super) fn start_refusal(&self, code: i32, stderr: &[u8]) -> Option<StartRefusal> {
        let text = String::from_utf8_lossy(stderr);
        let step = text.strip_prefix(&format!("{} ", self.marker))?.trim_end();
        (code == REFUSED_EXIT_CODE).then(|| StartRefusal {
            step: step.to_owned(),
            reason: "No such file or directory".to_owned(),
        })
    }

    fn internal(line: String) -> Self {
        Self {
            line,
            program: String::new(),
            marker: String::new(),
        }
    }
}

/// Appends a decoded file to another.
pub(super) fn append(part: &str, name: &str) -> Script {
    Script::internal(format!("base64 -d < {part} >> {name} && rm -f {part}"))
}

/// Unpacks an archive below a directory.
pub(super) fn unpack(name: &str, to: &Path) -> Result<Script, SandboxError> {
    let to = quote(to.as_os_str(), "tar")?;
    Ok(Script::internal(format!(
        "exec 3< {name} && rm -f {name} && mkdir -p -- {to} && cd -- {to} && tar -xpf - <&3"
    )))
}

/// Packs a file or directory, under its own name.
pub(super) fn pack(from: &Path) -> Result<Script, SandboxError> {
    let from = quote(from.as_os_str(), "tar")?;
    let marker = random_name()?;
    let line = format!(
        "p={from}\n\
         [ -e \"$p\" ] || {{ echo '{marker} finding the source' >&2; exit {REFUSED_EXIT_CODE}; }}\n\
         if [ -d \"$p\" ]; then cd -- \"$p\" && n=$(basename -- \"$PWD\") && cd ..; else \
         n=$(basename -- \"$p\") && cd -- \"$(dirname -- \"$p\")\"; fi || exit 1\n\
         set -o pipefail 2>/dev/null\n\
         tar -cf - -- \"$n\" | base64\n"
    );
    Ok(Script {
        line,
        program: "tar".to_owned(),
        marker,
    })
}

/// Removes the temporary files of an upload.
pub(super) fn remove(name: &str) -> Script {
    Script::internal(format!("rm -f {name} {name}.part"))
}

/// Creates a random name that needs no quoting.
pub(super) fn random_name() -> Result<String, SandboxError> {
    let mut random = [0; 12];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut random))
        .map_err(SandboxError::system("choosing a name"))?;
    let random: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!(".palisade-{random}"))
}

/// Quotes an argument for the shell.
fn quote(word: &OsStr, program: &str) -> Result<String, SandboxError> {
    let text = word
        .to_str()
        .filter(|text| !text.contains('\0'))
        .ok_or_else(|| unsupported_argument(program, "a word of the command"))?;
    Ok(format!("'{}'", text.replace('\'', "'\\''")))
}

fn unsupported_argument(program: &str, what: &str) -> SandboxError {
    SandboxError::Start {
        program: program.to_owned(),
        step: "reading the command".to_owned(),
        reason: format!("{what} is not UTF-8, which a remote shell requires"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shell_quoting_keeps_each_argument() {
        for word in [
            "a b", "'", "$(id)", "`id`", "\"", "\\", "-n", "*", "a\nb", "",
        ] {
            let quoted = quote(OsStr::new(word), "x").unwrap();
            let output = std::process::Command::new("sh")
                .args(["-c", &format!("printf %s {quoted}")])
                .output()
                .unwrap();
            assert_eq!(output.stdout, word.as_bytes(), "{quoted}");
        }
        assert!(quote(OsStr::new("a\0b"), "x").is_err());
    }

    #[test]
    fn only_the_script_itself_can_report_a_refusal() {
        let script = Script::for_command(&SandboxCommand::new(["nothing"]), None, "mark").unwrap();
        let start_refusal = script.start_refusal(126, b"mark running it\n").unwrap();
        assert_eq!(start_refusal.step, "running it");
        assert_eq!(script.start_refusal(126, b"other running it\n"), None);
        assert_eq!(script.start_refusal(1, b"mark running it\n"), None);
    }
}
