//! The operator's own terminal, as far as a command inside needs it.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};

use crate::contract::SandboxError;
use crate::namespace::ends;
use crate::namespace::protocol::Size;

/// The size of a terminal; `None` when it is none.
pub fn size(terminal: &impl AsFd) -> Option<Size> {
    // SAFETY: all-zero is a valid `winsize`.
    let mut size: libc::winsize = unsafe { std::mem::zeroed() };
    // SAFETY: the call writes one `winsize`, which outlives it.
    let result = unsafe {
        libc::ioctl(
            terminal.as_fd().as_raw_fd(),
            libc::TIOCGWINSZ,
            &raw mut size,
        )
    };
    (result == 0).then_some(Size {
        rows: size.ws_row,
        columns: size.ws_col,
    })
}

/// Gives a terminal of a command another size, by its master: what is typed next meets it.
pub fn set_size(master: &OwnedFd, size: Size) -> Result<(), SandboxError> {
    ends::set_size(master, size).map_err(SandboxError::system("sizing the terminal"))
}

/// A terminal that passes every key on, until this is dropped.
pub struct Raw {
    terminal: OwnedFd,
    before: Termios,
}

impl Raw {
    /// Makes `terminal` raw.
    pub fn new(terminal: &impl AsFd) -> Result<Self, SandboxError> {
        let failed = || SandboxError::system::<std::io::Error>("taking the terminal");
        let terminal = terminal.as_fd().try_clone_to_owned().map_err(failed())?;
        let before = tcgetattr(&terminal).map_err(|errno| failed()(errno.into()))?;
        let mut raw = before.clone();
        cfmakeraw(&mut raw);
        tcsetattr(&terminal, SetArg::TCSADRAIN, &raw).map_err(|errno| failed()(errno.into()))?;
        Ok(Self { terminal, before })
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // The terminal may be gone, and there is nothing else to restore then.
        let _ = tcsetattr(&self.terminal, SetArg::TCSADRAIN, &self.before);
    }
}
