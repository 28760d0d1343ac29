//! Arguments of `execve`, prepared before the fork.

use std::ffi::CString;
use std::io::{Error, ErrorKind};

use super::protocol::Exec;
use super::step::{Step, StepError};

/// The arguments of a command.
pub(crate) struct ExecArgs {
    pub(crate) argv: Vec<CString>,
    pub(crate) environment: Vec<CString>,
    /// The paths at which the program is searched, in order.
    pub(crate) candidates: Vec<CString>,
    pub(crate) directory: CString,
    /// Whether the command has a terminal.
    pub(crate) terminal: bool,
}

impl ExecArgs {
    /// Converts a request. The variables in `exec` replace those in `defaults`.
    pub(crate) fn read(exec: &Exec, defaults: &[(String, String)]) -> Result<Self, StepError> {
        let text = |bytes: &[u8]| CString::new(bytes).step("reading the command");
        let argv = exec
            .argv
            .iter()
            .map(|word| text(word))
            .collect::<Result<Vec<_>, _>>()?;
        let program = exec
            .argv
            .first()
            .filter(|program| !program.is_empty())
            .ok_or_else(|| Error::from(ErrorKind::NotFound))
            .step("reading the command")?;
        let mut variables: Vec<(&[u8], &[u8])> = Vec::new();
        let requested = exec.environment.iter().map(|(k, v)| (&k[..], &v[..]));
        for (name, value) in defaults
            .iter()
            .map(|(k, v)| (k.as_bytes(), v.as_bytes()))
            .chain(requested)
        {
            variables.retain(|(known, _)| *known != name);
            variables.push((name, value));
        }
        let candidates = if program.contains(&b'/') {
            vec![text(program)?]
        } else {
            let path = variables.iter().find(|(name, _)| *name == b"PATH");
            path.map_or(&b""[..], |(_, path)| path)
                .split(|&byte| byte == b':')
                .filter(|directory| !directory.is_empty())
                .map(|directory| text(&[directory, b"/", program].concat()))
                .collect::<Result<Vec<_>, _>>()?
        };
        Ok(Self {
            argv,
            environment: variables
                .into_iter()
                .map(|(name, value)| text(&[name, b"=", value].concat()))
                .collect::<Result<Vec<_>, _>>()?,
            candidates,
            directory: text(exec.directory.as_deref().unwrap_or(b"/workspace"))?,
            terminal: exec.terminal.is_some(),
        })
    }
}
