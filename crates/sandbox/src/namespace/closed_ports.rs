//! A socket that shows which connections the kernel refuses.
//!
//! The gate listens on a few ports. A connection to any other port is refused by the kernel
//! of the gate's namespace, and no listener sees it. A raw socket receives a copy of every
//! TCP packet that arrives there; its filter, in the kernel, keeps the packets that open a
//! connection to a port without a listener and drops all others.

use std::io::{Error, Result};
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};

use libc::{
    BPF_ABS, BPF_ALU, BPF_AND, BPF_B, BPF_H, BPF_IND, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_LDX,
    BPF_MSH, BPF_RET, sock_filter, sock_fprog,
};
use nix::sys::socket::sockopt;
use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, setsockopt, socket};

/// Bytes of a packet that the filter keeps: the longest IPv4 header and the TCP ports.
const KEPT_BYTES: u32 = 64;

/// Size of the receive buffer. When it is full, further packets are dropped; the kernel refuses
/// their connections nevertheless.
const RECEIVE_BUFFER_BYTES: usize = 128 * 1024;

/// Offsets of the destination port and the flags in a TCP header (RFC 9293, 3.1).
const PORT_OFFSET: u32 = 2;
const FLAGS_OFFSET: u32 = 13;
// Flags of a TCP header.
const SYN: u32 = 0x02;
const ACK: u32 = 0x10;

/// Opens the socket for the family of `wildcard`. `listened` are the ports with a listener.
pub(crate) fn open(wildcard: IpAddr, listened: &[u16]) -> Result<OwnedFd> {
    let family = if wildcard.is_ipv4() {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(family, SockType::Raw, flags, SockProtocol::Tcp)?;
    attach(&socket, &filter(wildcard.is_ipv4(), listened))?;
    if wildcard.is_ipv4() {
        setsockopt(&socket, sockopt::Ipv4PacketInfo, &true)?;
    } else {
        setsockopt(&socket, sockopt::Ipv6RecvPacketInfo, &true)?;
    }
    setsockopt(&socket, sockopt::RcvBuf, &RECEIVE_BUFFER_BYTES)?;
    Ok(socket)
}

/// The filter. Over IPv4 a packet begins with the IP header, over IPv6 with the TCP header
/// (raw(7), RFC 3542 section 3).
fn filter(is_ipv4: bool, listened: &[u16]) -> Vec<sock_filter> {
    let at = if is_ipv4 { BPF_IND } else { BPF_ABS };
    let mut program = Vec::new();
    if is_ipv4 {
        program.push(step(BPF_LDX | BPF_B | BPF_MSH, 0));
    }
    program.extend([
        step(BPF_LD | BPF_B | at, FLAGS_OFFSET),
        step(BPF_ALU | BPF_AND | BPF_K, SYN | ACK),
        jump(SYN, 1, 0),
        step(BPF_RET | BPF_K, 0),
        step(BPF_LD | BPF_H | at, PORT_OFFSET),
    ]);
    for port in listened {
        program.extend([jump(u32::from(*port), 0, 1), step(BPF_RET | BPF_K, 0)]);
    }
    program.push(step(BPF_RET | BPF_K, KEPT_BYTES));
    program
}

fn step(code: u32, k: u32) -> sock_filter {
    instruction(code, k, 0, 0)
}

fn jump(k: u32, jt: u8, jf: u8) -> sock_filter {
    instruction(BPF_JMP | BPF_JEQ | BPF_K, k, jt, jf)
}

fn instruction(code: u32, k: u32, jt: u8, jf: u8) -> sock_filter {
    // Codes have eight bits.
    let code = u16::try_from(code).unwrap_or_default();
    sock_filter { code, jt, jf, k }
}

fn attach(socket: &OwnedFd, program: &[sock_filter]) -> Result<()> {
    let len = u16::try_from(program.len()).map_err(Error::other)?;
    let program = sock_fprog {
        len,
        filter: program.as_ptr().cast_mut(),
    };
    let length = libc::socklen_t::try_from(size_of::<sock_fprog>()).map_err(Error::other)?;
    // SAFETY: pointer and length are those of `program`, whose filter has `len` instructions
    // and outlives the call; the kernel copies both and writes to neither.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const program).cast(),
            length,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(Error::last_os_error())
    }
}
