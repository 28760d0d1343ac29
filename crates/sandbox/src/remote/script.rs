//! Lines of shell for a container we know nothing of: POSIX, with `base64` and `tar`.

use std::ffi::OsStr;
use std::io::Read;
use std::path::Path;

use crate::contract::{Command, SandboxError};

/// What a script ends with when it refuses.
const REFUSED: i32 = 126;

/// A line to run.
#[derive(Debug)]
pub(super) struct Script {
    pub(super) line: String,
    /// The program it is about.
    pub(super) program: String,
    /// What stands before a refusal; nobody else knows it.
    mark: String,
}

/// Why a command did not come to run.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refused {
    pub(super) step: String,
    pub(super) reason: String,
}

impl Script {
    /// A command, which reads `input` if that is given.
    pub(super) fn of(
        command: &Command,
        input: Option<&str>,
        mark: &str,
    ) -> Result<Self, SandboxError> {
        let program = command.argv.first().map(|word| word.as_os_str());
        let program = program.unwrap_or_default().to_string_lossy().into_owned();
        let quoted = |text: &OsStr| quote(text, &program);
        let mut line = String::new();
        if let Some(input) = input {
            // Open, and gone from the workspace before the command sees it.
            line += &format!("exec < {input} && rm -f {input} || exit 1\n");
        }
        if let Some(directory) = &command.directory {
            let directory = quoted(directory.as_os_str())?;
            line += &format!(
                "cd -- {directory} 2>/dev/null || {{ echo '{mark} entering the directory' >&2; \
                 exit {REFUSED}; }}\n"
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
                _ => return Err(unfit(&program, "a variable's name")),
            }
        }
        let words = command
            .argv
            .iter()
            .map(|word| quoted(word))
            .collect::<Result<Vec<_>, _>>()?;
        let first = words.first().cloned().unwrap_or_default();
        line += &format!(
            "command -v -- {first} >/dev/null 2>&1 || {{ echo '{mark} running it' >&2; exit \
             {REFUSED}; }}\n"
        );
        // A shell that stays would be the parent that the command sees.
        line += &format!("exec {}\n", words.join(" "));
        Ok(Self {
            line,
            program,
            mark: mark.to_owned(),
        })
    }

    /// Whether this may be, or become, the beginning of a refusal.
    pub(super) fn may_be_refusal(&self, stderr: &[u8]) -> bool {
        let mark = self.mark.as_bytes();
        let length = mark.len().min(stderr.len());
        mark.get(..length) == stderr.get(..length)
    }

    /// Why it did not come to run, if it did not.
    pub(super) fn refused(&self, code: i32, stderr: &[u8]) -> Option<Refused> {
        let said = String::from_utf8_lossy(stderr);
        let step = said.strip_prefix(&format!("{} ", self.mark))?.trim_end();
        (code == REFUSED).then(|| Refused {
            step: step.to_owned(),
            reason: "No such file or directory".to_owned(),
        })
    }

    fn ours(line: String) -> Self {
        Self {
            line,
            program: String::new(),
            mark: String::new(),
        }
    }
}

/// Adds what is in one file, decoded, to another.
pub(super) fn append(part: &str, name: &str) -> Script {
    Script::ours(format!("base64 -d < {part} >> {name} && rm -f {part}"))
}

/// Unpacks an archive below a directory.
pub(super) fn unpack(name: &str, to: &Path) -> Result<Script, SandboxError> {
    let to = quote(to.as_os_str(), "tar")?;
    Ok(Script::ours(format!(
        "exec 3< {name} && rm -f {name} && mkdir -p -- {to} && cd -- {to} && tar -xpf - <&3"
    )))
}

/// Packs a file or directory, under its own name.
pub(super) fn pack(from: &Path) -> Result<Script, SandboxError> {
    let from = quote(from.as_os_str(), "tar")?;
    let mark = fresh_name()?;
    let line = format!(
        "p={from}\n\
         [ -e \"$p\" ] || {{ echo '{mark} finding it' >&2; exit {REFUSED}; }}\n\
         if [ -d \"$p\" ]; then cd -- \"$p\" && n=$(basename -- \"$PWD\") && cd ..; else \
         n=$(basename -- \"$p\") && cd -- \"$(dirname -- \"$p\")\"; fi || exit 1\n\
         set -o pipefail 2>/dev/null\n\
         tar -cf - -- \"$n\" | base64\n"
    );
    Ok(Script {
        line,
        program: "tar".to_owned(),
        mark,
    })
}

/// Removes what an upload left.
pub(super) fn remove(name: &str) -> Script {
    Script::ours(format!("rm -f {name} {name}.part"))
}

/// A name that nobody has, without anything to quote.
pub(super) fn fresh_name() -> Result<String, SandboxError> {
    let mut random = [0; 12];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut random))
        .map_err(SandboxError::system("choosing a name"))?;
    let random: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!(".palisade-{random}"))
}

/// A word that the shell takes for what it is.
fn quote(word: &OsStr, program: &str) -> Result<String, SandboxError> {
    let text = word
        .to_str()
        .filter(|text| !text.contains('\0'))
        .ok_or_else(|| unfit(program, "a word of the command"))?;
    Ok(format!("'{}'", text.replace('\'', "'\\''")))
}

fn unfit(program: &str, what: &str) -> SandboxError {
    SandboxError::Start {
        program: program.to_owned(),
        step: "reading the command".to_owned(),
        reason: format!("{what} is not text, and a remote shell takes nothing else"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_stays_a_word() {
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
    fn only_we_can_refuse() {
        let script = Script::of(&Command::new(["nothing"]), None, "mark").unwrap();
        let refused = script.refused(126, b"mark running it\n").unwrap();
        assert_eq!(refused.step, "running it");
        assert_eq!(script.refused(126, b"other running it\n"), None);
        assert_eq!(script.refused(1, b"mark running it\n"), None);
    }
}
