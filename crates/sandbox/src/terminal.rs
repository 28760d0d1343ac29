//! Size and raw mode of the operator's terminal.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};

use crate::contract::SandboxError;
use crate::namespace::protocol::TerminalSize;
use crate::namespace::stdio;

/// Returns the size of a terminal; `None` if the descriptor is no terminal.
pub fn size(terminal: &impl AsFd) -> Option<TerminalSize> {
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
    (result == 0).then_some(TerminalSize {
        rows: size.ws_row,
        columns: size.ws_col,
    })
}

/// Resizes a command's terminal through its master, so that the next input sees the new size.
pub fn set_size(master: &OwnedFd, size: TerminalSize) -> Result<(), SandboxError> {
    stdio::set_size(master, size).map_err(SandboxError::system("resizing the terminal"))
}

/// A terminal in raw mode, restored on drop.
pub struct RawTerminal {
    terminal: OwnedFd,
    before: Termios,
}

impl RawTerminal {
    /// Switches `terminal` to raw mode.
    pub fn new(terminal: &impl AsFd) -> Result<Self, SandboxError> {
        let failed =
            || SandboxError::system::<std::io::Error>("switching the terminal to raw mode");
        let terminal = terminal.as_fd().try_clone_to_owned().map_err(failed())?;
        let before = tcgetattr(&terminal).map_err(|errno| failed()(errno.into()))?;
        let mut raw = before.clone();
        cfmakeraw(&mut raw);
        tcsetattr(&terminal, SetArg::TCSADRAIN, &raw).map_err(|errno| failed()(errno.into()))?;
        Ok(Self { terminal, before })
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // The terminal may be gone, and then there is nothing to restore.
        let _ = tcsetattr(&self.terminal, SetArg::TCSADRAIN, &self.before);
    }
}
