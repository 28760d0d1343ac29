//! Finds the TCP socket with two given ends.

use std::io::{BufRead, BufReader, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;

use super::cpu_budget::CpuBudget;
use super::sock_diag::{self, Diagnosis};

/// Maximum size of a table, sufficient for some 27 000 sockets.
const MAX_TABLE_BYTES: u64 = 4 << 20;

/// Returns the inode of the only socket with these ends in this network namespace, which is the
/// agent's. `None` if there is none, more than one, or the budget is exceeded.
pub(crate) fn find(
    proc: &OwnedFd,
    from: SocketAddr,
    to: SocketAddr,
    budget: CpuBudget,
) -> Option<u64> {
    match sock_diag::query_socket(from, to) {
        Ok(Diagnosis::Inode(inode)) => Some(inode).filter(|inode| *inode != 0),
        Ok(Diagnosis::NoSocket) => None,
        Ok(Diagnosis::Unsupported) | Err(_) => find_in_tables(proc, from, to, budget),
    }
}

/// Finds the socket in the tables of `/proc`, for kernels that do not support the query.
fn find_in_tables(
    proc: &OwnedFd,
    from: SocketAddr,
    to: SocketAddr,
    budget: CpuBudget,
) -> Option<u64> {
    let ends = (canonical_end(from), canonical_end(to));
    let mut found = None;
    // For IPv4 both tables are read, because an IPv6 socket can have an IPv4 peer.
    for table in ["self/net/tcp", "self/net/tcp6"] {
        let file = match openat(proc, table, OFlag::O_CLOEXEC, Mode::empty()) {
            // The kernel has no IPv6.
            Err(Errno::ENOENT) => continue,
            other => std::fs::File::from(other.ok()?),
        };
        for inode in matching_inodes(file, ends, budget)? {
            // Sockets on different devices can have the same ends.
            if found.replace(inode).is_some() {
                return None;
            }
        }
    }
    found
}

/// The inodes of all lines with these ends; `None` if the table was not read completely.
fn matching_inodes(table: impl Read, ends: SocketEnds, budget: CpuBudget) -> Option<Vec<u64>> {
    let mut table = BufReader::with_capacity(64 << 10, table.take(MAX_TABLE_BYTES));
    let (mut line, mut found) = (Vec::new(), Vec::new());
    while table.read_until(b'\n', &mut line).ok()? != 0 {
        // The line is truncated, by the limit or by the kernel.
        if line.pop() != Some(b'\n') || budget.is_exhausted() {
            return None;
        }
        if let Some(socket) = Socket::parse(&line)
            && socket.ends == ends
        {
            found.push(socket.inode);
        }
        line.clear();
    }
    (table.into_inner().limit() > 0).then_some(found)
}

/// The local and the remote end of a socket.
pub(crate) type SocketEnds = ((IpAddr, u16), (IpAddr, u16));

/// The address and port of an end, without IPv6 flow and scope.
pub(crate) fn canonical_end(end: SocketAddr) -> (IpAddr, u16) {
    (end.ip().to_canonical(), end.port())
}

/// One line of a table.
#[derive(Debug, PartialEq, Eq)]
struct Socket {
    ends: SocketEnds,
    inode: u64,
}

impl Socket {
    /// Parses a line; `None` for the heading, and for a socket without a process.
    fn parse(line: &[u8]) -> Option<Self> {
        let line = std::str::from_utf8(line).ok()?;
        let mut fields = line.split_ascii_whitespace().skip(1);
        let ends = (parse_end(fields.next()?)?, parse_end(fields.next()?)?);
        // State, queues, timer, retransmits, user and timeout are skipped.
        let inode = fields.nth(6)?;
        if !inode.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        let inode = inode.parse().ok().filter(|inode| *inode != 0)?;
        Some(Self { ends, inode })
    }
}

/// Parses an end: 32-bit words in the machine's byte order.
fn parse_end(text: &str) -> Option<(IpAddr, u16)> {
    let (address, port) = text.split_once(':')?;
    let port = u16::try_from(parse_hex(port, 4)?).ok()?;
    let word = |at: usize| Some(parse_hex(address.get(at..at + 8)?, 8)?.to_ne_bytes());
    let address = match address.len() {
        8 => IpAddr::V4(Ipv4Addr::from(word(0)?)),
        32 => {
            let words = [word(0)?, word(8)?, word(16)?, word(24)?];
            let octets: [u8; 16] = words.concat().try_into().ok()?;
            IpAddr::V6(Ipv6Addr::from(octets)).to_canonical()
        }
        _ => return None,
    };
    Some((address, port))
}

/// Parses exactly this many hexadecimal digits.
fn parse_hex(text: &str, digits: usize) -> Option<u32> {
    let is_valid = text.len() == digits && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_valid
        .then(|| u32::from_str_radix(text, 16).ok())
        .flatten()
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::time::Duration;

    use super::*;

    const HEADING: &str = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when \
                           retrnsmt   uid  timeout inode\n";
    const LINE: &str = "   1: 020000C0:C350 010200C0:0050 01 00000000:00000000 00:00000000 \
                        00000000  1000        0 4711 1 0000000000000000 20 4 30 10 -1\n";

    fn ends(from: &str, to: &str) -> SocketEnds {
        (
            canonical_end(from.parse().unwrap()),
            canonical_end(to.parse().unwrap()),
        )
    }

    fn test_budget() -> CpuBudget {
        CpuBudget::new(Duration::from_secs(10))
    }

    fn find_inodes(table: &str, from: &str, to: &str) -> Option<Vec<u64>> {
        matching_inodes(table.as_bytes(), ends(from, to), test_budget())
    }

    /// The tables are written for the machine that reads them.
    #[cfg(target_endian = "little")]
    #[test]
    fn socket_is_found_by_local_and_remote_end() {
        let (own, other) = ("192.0.0.2:50000", "192.0.2.1:80");
        let table = format!("{HEADING}{LINE}");
        assert_eq!(find_inodes(&table, own, other), Some(vec![4711]));
        assert_eq!(find_inodes(&table, other, own), Some(vec![]));
        assert_eq!(find_inodes(&table, own, "192.0.2.1:81"), Some(vec![]));
        // An IPv6 socket with an IPv4 peer, and one with an IPv6 peer.
        let mapped = LINE
            .replace("020000C0", "0000000000000000FFFF0000020000C0")
            .replace("010200C0", "0000000000000000FFFF0000010200C0");
        assert_eq!(find_inodes(&mapped, own, other), Some(vec![4711]));
        let with_ipv6 = LINE
            .replace("020000C0", "B80D0120000000000000000002000000")
            .replace("010200C0", "B80D0120000000000000000001000000");
        let found = find_inodes(&with_ipv6, "[2001:db8::2]:50000", "[2001:db8::1]:80");
        assert_eq!(found, Some(vec![4711]));
        // Both matches are returned.
        let two = format!("{LINE}{}", LINE.replace("4711", "4712"));
        assert_eq!(find_inodes(&two, own, other), Some(vec![4711, 4712]));
    }

    #[test]
    fn malformed_lines_are_skipped() {
        for line in [
            "",
            HEADING.trim_end(),
            "   1:",
            "   1: 020000C0:C350",
            "   1: 020000C0:C350 010200C0:0050 01 0:0 0:0 0 1000 0",
            "   1: 020000C0:C350 010200C0:0050 01 0:0 0:0 0 1000 0 0",
            "   1: 020000C0:C350 010200C0:0050 01 0:0 0:0 0 1000 0 -1",
            "   1: 020000C0:C350 010200C0:0050 01 0:0 0:0 0 1000 0 +1",
            "   1: 020000C0:C350 010200C0:0050 01 0:0 0:0 0 1000 0 99999999999999999999",
            "   1: +20000C0:C350 010200C0:0050 01 0:0 0:0 0 1000 0 4711",
            "   1: 020000C0:+350 010200C0:0050 01 0:0 0:0 0 1000 0 4711",
            "   1: 020000C0:1C350 010200C0:0050 01 0:0 0:0 0 1000 0 4711",
            "   1: 020000C0C350 010200C0:0050 01 0:0 0:0 0 1000 0 4711",
            "   1: 020000C:C350 010200C0:0050 01 0:0 0:0 0 1000 0 4711",
            "   1: ää00C0:C350 010200C0:0050 01 0:0 0:0 0 1000 0 4711",
        ] {
            assert_eq!(Socket::parse(line.as_bytes()), None, "{line}");
        }
        assert_eq!(Socket::parse(b"   1: \xff\xfe:C350"), None);
        assert!(Socket::parse(LINE.as_bytes()).is_some());
    }

    #[test]
    fn truncated_table_yields_none() {
        let (own, other) = ("192.0.0.2:50000", "192.0.2.1:80");
        let truncated = format!("{HEADING}{}", LINE.trim_end());
        assert_eq!(find_inodes(&truncated, own, other), None);
        assert_eq!(
            matching_inodes(
                LINE.as_bytes(),
                ends(own, other),
                CpuBudget::new(Duration::ZERO)
            ),
            None
        );
        let lines = usize::try_from(MAX_TABLE_BYTES).unwrap() / LINE.len() + 1;
        assert_eq!(find_inodes(&LINE.repeat(lines), own, other), None);
        // Without a newline, no more than the limit is buffered.
        let endless = std::io::repeat(b'x');
        assert_eq!(
            matching_inodes(endless, ends(own, other), test_budget()),
            None
        );
    }

    #[test]
    fn query_and_tables_return_the_same_inode() {
        let proc: OwnedFd = std::fs::File::open("/proc").unwrap().into();
        for local in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(local) else {
                continue;
            };
            let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (own, other) = (stream.local_addr().unwrap(), stream.peer_addr().unwrap());
            let inode = nix::sys::stat::fstat(stream.as_fd()).unwrap().st_ino;
            for find in [find, find_in_tables] {
                assert_eq!(
                    find(&proc, own, other, test_budget()),
                    Some(inode),
                    "{local}"
                );
            }
            drop(listener);
            drop(stream);
            for find in [find, find_in_tables] {
                assert_eq!(find(&proc, own, other, test_budget()), None, "{local}");
            }
        }
    }
}
