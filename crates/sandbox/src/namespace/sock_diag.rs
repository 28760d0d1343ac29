//! Queries the kernel for the socket with two given ends (sock_diag(7)).
//!
//! The tables in `/proc` have the same data, but for them the kernel visits the sockets of the
//! whole machine. Layouts are those of `linux/netlink.h`, `linux/sock_diag.h` and
//! `linux/inet_diag.h`.

use std::io::Result;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket,
};

use super::tcp_sockets::{SocketEnds, canonical_end};

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_DUMP: u16 = 0x300;
const NLMSG_DONE: u16 = 3;
const HEADER_BYTES: usize = 16;
/// The offset of the socket's ends in the kernel's answer.
const ENDS_OFFSET: usize = HEADER_BYTES + 4;
/// The offset of the socket's inode in the kernel's answer.
const INODE_OFFSET: usize = HEADER_BYTES + 68;

/// The kernel's answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Diagnosis {
    /// The socket's inode; 0 if no process holds the socket any more.
    Inode(u64),
    /// No socket has these ends.
    NoSocket,
    /// The kernel does not support the query.
    Unsupported,
}

/// Queries the TCP sockets of this network namespace.
pub(crate) fn query_socket(from: SocketAddr, to: SocketAddr) -> Result<Diagnosis> {
    let netlink = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        SockProtocol::NetlinkSockDiag,
    )?;
    let ends = (canonical_end(from), canonical_end(to));
    let answer = send_and_receive(&netlink, &build_request(ends, NLM_F_REQUEST))?;
    if let Some(diagnosis) = parse_answer(&answer, ends) {
        return Ok(diagnosis);
    }
    // The error for 'no such socket' and for an unsupported query is the same. A dump of sockets in
    // no state is empty unless dumps are unsupported.
    let answer = send_and_receive(&netlink, &build_request(ends, NLM_F_REQUEST | NLM_F_DUMP))?;
    let empty = read_word(&answer, 4)
        .is_some_and(|[low, high, ..]| [low, high] == NLMSG_DONE.to_ne_bytes())
        && read_word(&answer, HEADER_BYTES) == Some([0; 4]);
    Ok(if empty {
        Diagnosis::NoSocket
    } else {
        Diagnosis::Unsupported
    })
}

/// Sends a request and receives the answer, which the kernel sends synchronously.
fn send_and_receive(netlink: &OwnedFd, request: &[u8]) -> Result<Vec<u8>> {
    send(netlink.as_raw_fd(), request, MsgFlags::MSG_NOSIGNAL)?;
    let mut answer = vec![0; 8 << 10];
    let length = recv(netlink.as_raw_fd(), &mut answer, MsgFlags::empty())?;
    answer.truncate(length);
    Ok(answer)
}

fn build_request(((own, port), (other, its_port)): SocketEnds, flags: u16) -> Vec<u8> {
    let family = match own {
        IpAddr::V4(_) => libc::AF_INET,
        IpAddr::V6(_) => libc::AF_INET6,
    };
    let small = |number: i32| u8::try_from(number).unwrap_or(0);
    let body = [
        &[small(family), small(libc::IPPROTO_TCP), 0, 0][..],
        // No socket states, which only a dump filters by.
        &[0; 4],
        &port.to_be_bytes(),
        &its_port.to_be_bytes(),
        &address_bytes(own),
        &address_bytes(other),
        // Any device and any cookie.
        &[0; 4],
        &[0xff; 8],
    ]
    .concat();
    let length = u32::try_from(HEADER_BYTES + body.len()).unwrap_or(0);
    [
        &length.to_ne_bytes()[..],
        &SOCK_DIAG_BY_FAMILY.to_ne_bytes(),
        &flags.to_ne_bytes(),
        &[0; 8],
        &body,
    ]
    .concat()
}

fn address_bytes(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => {
            let [a, b, c, d] = address.octets();
            [a, b, c, d, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
        }
        IpAddr::V6(address) => address.octets(),
    }
}

/// Parses an answer about a socket. A socket with other ends, such as a listener that would accept
/// the connection, is not the wanted one.
fn parse_answer(answer: &[u8], ends: SocketEnds) -> Option<Diagnosis> {
    let [low, high, ..] = read_word(answer, 4)?;
    if u16::from_ne_bytes([low, high]) != SOCK_DIAG_BY_FAMILY {
        return None;
    }
    let inode = u32::from_ne_bytes(read_word(answer, INODE_OFFSET)?);
    let is_ipv4 = i32::from(*answer.get(HEADER_BYTES)?) == libc::AF_INET;
    let address = |at: usize| {
        let octets: [u8; 16] = answer.get(at..at + 16)?.try_into().ok()?;
        Some(if is_ipv4 {
            let [a, b, c, d, ..] = octets;
            IpAddr::V4(Ipv4Addr::new(a, b, c, d))
        } else {
            IpAddr::V6(Ipv6Addr::from(octets)).to_canonical()
        })
    };
    let [own, port, its, its_port] = read_word(answer, ENDS_OFFSET)?;
    let found = (
        (address(ENDS_OFFSET + 4)?, u16::from_be_bytes([own, port])),
        (
            address(ENDS_OFFSET + 20)?,
            u16::from_be_bytes([its, its_port]),
        ),
    );
    Some(if found == ends {
        Diagnosis::Inode(inode.into())
    } else {
        Diagnosis::NoSocket
    })
}

fn read_word(bytes: &[u8], at: usize) -> Option<[u8; 4]> {
    bytes.get(at..at + 4)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn socket_is_found_by_both_ends_not_its_listener() {
        for local in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(local) else {
                continue;
            };
            let address = listener.local_addr().unwrap();
            let stream = TcpStream::connect(address).unwrap();
            let own = stream.local_addr().unwrap();
            let inode = nix::sys::stat::fstat(&stream).unwrap().st_ino;
            assert_eq!(query_socket(own, address).unwrap(), Diagnosis::Inode(inode));
            // The connection was not accepted, so no process holds the other end.
            assert_eq!(query_socket(address, own).unwrap(), Diagnosis::Inode(0));
            let unknown_end = SocketAddr::new(own.ip(), 1);
            assert_eq!(
                query_socket(address, unknown_end).unwrap(),
                Diagnosis::NoSocket
            );
            assert_eq!(
                query_socket(unknown_end, address).unwrap(),
                Diagnosis::NoSocket
            );
        }
    }

    #[test]
    fn ipv6_socket_with_ipv4_peer_is_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let mapped = SocketAddr::new(Ipv4Addr::LOCALHOST.to_ipv6_mapped().into(), port);
        let Ok(stream) = TcpStream::connect(mapped) else {
            return;
        };
        let (own, other) = (stream.local_addr().unwrap(), stream.peer_addr().unwrap());
        let inode = nix::sys::stat::fstat(&stream).unwrap().st_ino;
        assert_eq!(query_socket(own, other).unwrap(), Diagnosis::Inode(inode));
    }

    #[test]
    fn truncated_answer_is_none() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let stream = TcpStream::connect(address).unwrap();
        let ends = (
            canonical_end(stream.local_addr().unwrap()),
            canonical_end(address),
        );
        let answer = [&[0; 4][..], &SOCK_DIAG_BY_FAMILY.to_ne_bytes(), &[0; 90]].concat();
        for length in 0..INODE_OFFSET + 4 {
            assert_eq!(parse_answer(&answer[..length], ends), None, "{length}");
        }
        assert_eq!(parse_answer(&answer, ends), Some(Diagnosis::NoSocket));
    }
}
