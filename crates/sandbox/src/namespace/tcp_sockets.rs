//! The agent's TCP sockets: which one has two given ends.

use std::io::{BufRead, BufReader, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;

use super::cpu_budget::CpuBudget;
use super::sock_diag::{self, Diagnosis};

/// The longest table that is read: some 27 000 sockets.
const MAX_TABLE_BYTES: u64 = 4 << 20;

/// The inode of the one socket of this network namespace, the agent's, that has these ends.
/// None if there is no such socket, more than one, or no telling in time.
pub(crate) fn find(
    proc: &OwnedFd,
    from: SocketAddr,
    to: SocketAddr,
    budget: CpuBudget,
) -> Option<u64> {
    match sock_diag::query_socket(from, to) {
        Ok(Diagnosis::Inode(inode)) => Some(inode).filter(|inode| *inode != 0),
        Ok(Diagnosis::Nothing) => None,
        Ok(Diagnosis::Silent) | Err(_) => find_in_tables(proc, from, to, budget),
    }
}

/// The same where the kernel answers no questions, and only writes tables.
fn find_in_tables(
    proc: &OwnedFd,
    from: SocketAddr,
    to: SocketAddr,
    budget: CpuBudget,
) -> Option<u64> {
    let ends = (plain(from), plain(to));
    let mut found = None;
    // Also for IPv4 both: a socket of IPv6 can speak it.
    for table in ["self/net/tcp", "self/net/tcp6"] {
        let file = match openat(proc, table, OFlag::O_CLOEXEC, Mode::empty()) {
            // A kernel without IPv6.
            Err(Errno::ENOENT) => continue,
            other => std::fs::File::from(other.ok()?),
        };
        for inode in matching(file, ends, budget)? {
            // Sockets on different devices can have the same ends.
            if found.replace(inode).is_some() {
                return None;
            }
        }
    }
    found
}

/// The inodes of all lines with these ends; none at all of a table that was not read whole.
fn matching(table: impl Read, ends: SocketEnds, budget: CpuBudget) -> Option<Vec<u64>> {
    let mut table = BufReader::with_capacity(64 << 10, table.take(MAX_TABLE_BYTES));
    let (mut line, mut found) = (Vec::new(), Vec::new());
    while table.read_until(b'\n', &mut line).ok()? != 0 {
        // Cut off: by the limit, or by whoever wrote it.
        if line.pop() != Some(b'\n') || budget.is_over() {
            return None;
        }
        if let Some(socket) = Socket::read(&line)
            && socket.ends == ends
        {
            found.push(socket.inode);
        }
        line.clear();
    }
    (table.into_inner().limit() > 0).then_some(found)
}

/// The socket's own end and the other one.
pub(crate) type SocketEnds = ((IpAddr, u16), (IpAddr, u16));

/// An end without what IPv6 says beside the address.
pub(crate) fn plain(end: SocketAddr) -> (IpAddr, u16) {
    (end.ip().to_canonical(), end.port())
}

/// One line.
#[derive(Debug, PartialEq, Eq)]
struct Socket {
    ends: SocketEnds,
    inode: u64,
}

impl Socket {
    /// Reads a line; none of the heading, and of a socket that no process has any more.
    fn read(line: &[u8]) -> Option<Self> {
        let line = std::str::from_utf8(line).ok()?;
        let mut fields = line.split_ascii_whitespace().skip(1);
        let ends = (end(fields.next()?)?, end(fields.next()?)?);
        // State, queues, timer, retransmits, user and time-out come between.
        let inode = fields.nth(6)?;
        if !inode.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        let inode = inode.parse().ok().filter(|inode| *inode != 0)?;
        Some(Self { ends, inode })
    }
}

/// An end as the tables write it: words of 32 bits in this machine's order.
fn end(text: &str) -> Option<(IpAddr, u16)> {
    let (address, port) = text.split_once(':')?;
    let port = u16::try_from(hex(port, 4)?).ok()?;
    let word = |at: usize| Some(hex(address.get(at..at + 8)?, 8)?.to_ne_bytes());
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

/// Exactly so many digits, and nothing else.
fn hex(text: &str, digits: usize) -> Option<u32> {
    let right = text.len() == digits && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    right.then(|| u32::from_str_radix(text, 16).ok()).flatten()
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
        (plain(from.parse().unwrap()), plain(to.parse().unwrap()))
    }

    fn soon() -> CpuBudget {
        CpuBudget::of(Duration::from_secs(10))
    }

    fn look(table: &str, from: &str, to: &str) -> Option<Vec<u64>> {
        matching(table.as_bytes(), ends(from, to), soon())
    }

    /// The tables are written for the machine that reads them.
    #[cfg(target_endian = "little")]
    #[test]
    fn a_socket_is_found_by_both_its_ends_in_their_order() {
        let (own, other) = ("192.0.0.2:50000", "192.0.2.1:80");
        let table = format!("{HEADING}{LINE}");
        assert_eq!(look(&table, own, other), Some(vec![4711]));
        assert_eq!(look(&table, other, own), Some(vec![]));
        assert_eq!(look(&table, own, "192.0.2.1:81"), Some(vec![]));
        // One of IPv6 that speaks IPv4, and one that speaks IPv6.
        let mapped = LINE
            .replace("020000C0", "0000000000000000FFFF0000020000C0")
            .replace("010200C0", "0000000000000000FFFF0000010200C0");
        assert_eq!(look(&mapped, own, other), Some(vec![4711]));
        let six = LINE
            .replace("020000C0", "B80D0120000000000000000002000000")
            .replace("010200C0", "B80D0120000000000000000001000000");
        let found = look(&six, "[2001:db8::2]:50000", "[2001:db8::1]:80");
        assert_eq!(found, Some(vec![4711]));
        // Two of them: the caller is to know.
        let two = format!("{LINE}{}", LINE.replace("4711", "4712"));
        assert_eq!(look(&two, own, other), Some(vec![4711, 4712]));
    }

    #[test]
    fn what_is_no_line_of_a_living_socket_is_passed_over() {
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
            assert_eq!(Socket::read(line.as_bytes()), None, "{line}");
        }
        assert_eq!(Socket::read(b"   1: \xff\xfe:C350"), None);
        assert!(Socket::read(LINE.as_bytes()).is_some());
    }

    #[test]
    fn a_table_that_was_not_read_whole_says_nothing() {
        let (own, other) = ("192.0.0.2:50000", "192.0.2.1:80");
        let cut = format!("{HEADING}{}", LINE.trim_end());
        assert_eq!(look(&cut, own, other), None);
        assert_eq!(
            matching(
                LINE.as_bytes(),
                ends(own, other),
                CpuBudget::of(Duration::ZERO)
            ),
            None
        );
        let lines = usize::try_from(MAX_TABLE_BYTES).unwrap() / LINE.len() + 1;
        assert_eq!(look(&LINE.repeat(lines), own, other), None);
        // Without any end of a line, no more is kept than that.
        let endless = std::io::repeat(b'x');
        assert_eq!(matching(endless, ends(own, other), soon()), None);
    }

    #[test]
    fn both_ways_name_the_inode_that_the_descriptor_has() {
        let proc: OwnedFd = std::fs::File::open("/proc").unwrap().into();
        for local in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(local) else {
                continue;
            };
            let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (own, other) = (stream.local_addr().unwrap(), stream.peer_addr().unwrap());
            let inode = nix::sys::stat::fstat(stream.as_fd()).unwrap().st_ino;
            for find in [find, find_in_tables] {
                assert_eq!(find(&proc, own, other, soon()), Some(inode), "{local}");
            }
            drop(listener);
            drop(stream);
            for find in [find, find_in_tables] {
                assert_eq!(find(&proc, own, other, soon()), None, "{local}");
            }
        }
    }
}
