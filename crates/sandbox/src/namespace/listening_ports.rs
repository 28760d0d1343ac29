//! Lists the listening TCP ports in the sandbox, from the kernel's tables.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Result};
use std::os::fd::OwnedFd;

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;

/// Maximum number of reported ports, which have to fit into a message.
const MAX_PORTS: usize = 4096;

/// `TCP_LISTEN` in the tables' format.
const TCP_LISTEN: &str = "0A";

/// The listening ports of this process's network namespace, which is the agent's.
pub(crate) fn list_listening_ports(proc: &OwnedFd) -> Result<Vec<u16>> {
    let mut ports = BTreeSet::new();
    for table in ["self/net/tcp", "self/net/tcp6"] {
        let file = match openat(proc, table, OFlag::O_CLOEXEC, Mode::empty()) {
            // The kernel has no IPv6.
            Err(Errno::ENOENT) => continue,
            other => std::fs::File::from(other?),
        };
        for line in BufReader::new(file).lines() {
            ports.extend(parse_listening_port(&line?));
        }
    }
    Ok(ports.into_iter().take(MAX_PORTS).collect())
}

/// Parses the port of a line about a listening socket.
fn parse_listening_port(line: &str) -> Option<u16> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let (own, _, state) = (fields.next()?, fields.next()?, fields.next()?);
    let (_, port) = own.rsplit_once(':')?;
    (state == TCP_LISTEN).then_some(u16::from_str_radix(port, 16).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listening_lines_have_a_port() {
        for (line, wanted) in [
            ("  sl  local_address rem_address   st tx_queue", None),
            (
                "   0: 0100007F:1F90 00000000:0000 0A 00000000:0",
                Some(8080),
            ),
            ("   1: 0100007F:1F90 0100007F:C350 01 00000000:0", None),
            (
                "   0: 00000000000000000000000001000000:0050 00000000000000000000000000000000:0000 0A 0",
                Some(80),
            ),
            ("", None),
        ] {
            assert_eq!(parse_listening_port(line), wanted, "{line}");
        }
    }
}
