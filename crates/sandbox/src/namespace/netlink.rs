//! The rtnetlink messages that connect two network namespaces.
//!
//! This module encodes the messages without a library, because they are few, fixed and sent only
//! once. Layouts are those of `linux/netlink.h`, `linux/rtnetlink.h` and `linux/if_link.h`.

use std::io::{Error, Result};
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket,
};

const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_CREATE: u16 = 0x400;
const NLM_F_EXCL: u16 = 0x200;
const NLMSG_ERROR: u16 = 2;
const HEADER_BYTES: usize = 16;

const IFLA_IFNAME: u16 = 3;
const IFLA_LINKINFO: u16 = 18;
const IFLA_NET_NS_FD: u16 = 28;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
const VETH_INFO_PEER: u16 = 1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_F_NODAD: u8 = 2;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_GATEWAY: u16 = 5;

/// The kind of a route.
#[derive(Clone, Copy)]
pub(crate) enum Route {
    /// Every address is local.
    EverythingIsLocal,
    /// This address is not local, but on the link.
    Except(IpAddr),
    /// This address is on the link.
    Neighbour(IpAddr),
    /// The default route, through this gateway.
    DefaultVia(IpAddr),
}

/// A netlink socket of the network namespace in which it was opened.
pub(crate) struct Netlink {
    socket: OwnedFd,
    sequence: u32,
}

impl Netlink {
    /// Opens a socket in the current network namespace.
    pub(crate) fn open() -> Result<Self> {
        let socket = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::NetlinkRoute,
        )?;
        Ok(Self {
            socket,
            sequence: 0,
        })
    }

    /// Creates a veth pair: `name` in this namespace, and `peer` in the namespace `other`.
    pub(crate) fn add_pair(&mut self, name: &str, peer: &str, other: BorrowedFd<'_>) -> Result<()> {
        let mut body = link_message(0, 0, 0);
        append_attribute(&mut body, IFLA_IFNAME, &c_name(name));
        let mut far = link_message(0, 0, 0);
        append_attribute(&mut far, IFLA_IFNAME, &c_name(peer));
        append_attribute(&mut far, IFLA_NET_NS_FD, &other.as_raw_fd().to_ne_bytes());
        let mut data = Vec::new();
        append_attribute(&mut data, VETH_INFO_PEER, &far);
        let mut info = Vec::new();
        append_attribute(&mut info, IFLA_INFO_KIND, b"veth");
        append_attribute(&mut info, IFLA_INFO_DATA, &data);
        append_attribute(&mut body, IFLA_LINKINFO, &info);
        self.request(libc::RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, &body)
    }

    /// The index of a link.
    pub(crate) fn link_index(&mut self, name: &str) -> Result<i32> {
        let mut body = link_message(0, 0, 0);
        append_attribute(&mut body, IFLA_IFNAME, &c_name(name));
        let answer = self.exchange(libc::RTM_GETLINK, 0, &body)?;
        read_i32(&answer, HEADER_BYTES + 4)
            .ok_or_else(|| Error::other("netlink returned a link without an index"))
    }

    /// Sets a link up.
    pub(crate) fn set_up(&mut self, index: i32) -> Result<()> {
        let up = libc::IFF_UP.cast_unsigned();
        self.request(libc::RTM_NEWLINK, 0, &link_message(index, up, up))
    }

    /// Adds an address to a link, usable at once.
    pub(crate) fn add_address(&mut self, index: i32, address: IpAddr) -> Result<()> {
        let bytes = octets(address);
        let flags = if address.is_ipv6() { IFA_F_NODAD } else { 0 };
        let mut body = vec![family(address), host_prefix_length(address), flags, 0];
        body.extend(index.to_ne_bytes());
        append_attribute(&mut body, IFA_LOCAL, &bytes);
        append_attribute(&mut body, IFA_ADDRESS, &bytes);
        self.request(libc::RTM_NEWADDR, NLM_F_CREATE | NLM_F_EXCL, &body)
    }

    /// Adds a route over a link. The route has the address family of `family_of`.
    pub(crate) fn add_route(&mut self, index: i32, route: Route, family_of: IpAddr) -> Result<()> {
        // The exception is in the table `local`, too, because that table is consulted first: the
        // longest prefix wins within a table, not between tables.
        let (length, table, scope, kind) = match route {
            Route::EverythingIsLocal => (
                0,
                libc::RT_TABLE_LOCAL,
                libc::RT_SCOPE_HOST,
                libc::RTN_LOCAL,
            ),
            Route::Except(address) => (
                host_prefix_length(address),
                libc::RT_TABLE_LOCAL,
                libc::RT_SCOPE_LINK,
                libc::RTN_UNICAST,
            ),
            Route::Neighbour(address) => (
                host_prefix_length(address),
                libc::RT_TABLE_MAIN,
                libc::RT_SCOPE_LINK,
                libc::RTN_UNICAST,
            ),
            Route::DefaultVia(_) => (
                0,
                libc::RT_TABLE_MAIN,
                libc::RT_SCOPE_UNIVERSE,
                libc::RTN_UNICAST,
            ),
        };
        let mut body = vec![
            family(family_of),
            length,
            0,
            0,
            table,
            libc::RTPROT_STATIC,
            scope,
            kind,
        ];
        body.extend(0_u32.to_ne_bytes());
        match route {
            Route::EverythingIsLocal => {}
            Route::Except(address) | Route::Neighbour(address) => {
                append_attribute(&mut body, RTA_DST, &octets(address));
            }
            Route::DefaultVia(address) => {
                append_attribute(&mut body, RTA_GATEWAY, &octets(address));
            }
        }
        append_attribute(&mut body, RTA_OIF, &index.to_ne_bytes());
        self.request(libc::RTM_NEWROUTE, NLM_F_CREATE | NLM_F_EXCL, &body)
    }

    fn request(&mut self, kind: u16, flags: u16, body: &[u8]) -> Result<()> {
        self.exchange(kind, flags | NLM_F_ACK, body).map(drop)
    }

    /// Sends a message and receives the answer; a refusal is an error.
    fn exchange(&mut self, kind: u16, flags: u16, body: &[u8]) -> Result<Vec<u8>> {
        self.sequence += 1;
        let mut message = Vec::with_capacity(HEADER_BYTES + body.len());
        let message_length = u32::try_from(HEADER_BYTES + body.len()).map_err(Error::other)?;
        message.extend(message_length.to_ne_bytes());
        message.extend(kind.to_ne_bytes());
        message.extend((flags | NLM_F_REQUEST).to_ne_bytes());
        message.extend(self.sequence.to_ne_bytes());
        message.extend(0_u32.to_ne_bytes());
        message.extend(body);
        send(self.socket.as_raw_fd(), &message, MsgFlags::empty())?;
        let mut answer = vec![0; 16 << 10];
        let length = recv(self.socket.as_raw_fd(), &mut answer, MsgFlags::empty())?;
        answer.truncate(length);
        let kind = answer
            .get(4..6)
            .and_then(|bytes| bytes.try_into().ok())
            .map(u16::from_ne_bytes);
        if kind == Some(NLMSG_ERROR) {
            match read_i32(&answer, HEADER_BYTES) {
                Some(0) => {}
                Some(errno) => return Err(Error::from_raw_os_error(errno.wrapping_neg())),
                None => return Err(Error::other("netlink sent a truncated answer")),
            }
        }
        Ok(answer)
    }
}

/// The namespace this thread is in, as a descriptor.
pub(crate) fn this_namespace() -> Result<OwnedFd> {
    // SAFETY: the path is a constant with its NUL; the result is checked before it becomes an
    // `OwnedFd`.
    let fd = unsafe {
        libc::open(
            c"/proc/self/ns/net".as_ptr(),
            libc::O_RDONLY | libc::O_CLOEXEC,
        )
    };
    if fd < 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: `open` returned a new descriptor, which has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// `struct ifinfomsg`.
fn link_message(index: i32, flags: u32, change: u32) -> Vec<u8> {
    let mut body = vec![0; 4];
    body.extend(index.to_ne_bytes());
    body.extend(flags.to_ne_bytes());
    body.extend(change.to_ne_bytes());
    body
}

/// Appends an attribute, padded to a multiple of four bytes.
fn append_attribute(body: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
    body.extend(length.to_ne_bytes());
    body.extend(kind.to_ne_bytes());
    body.extend(value);
    body.resize(body.len().next_multiple_of(4), 0);
}

fn c_name(name: &str) -> Vec<u8> {
    let mut bytes = name.as_bytes().to_vec();
    bytes.push(0);
    bytes
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

fn family(address: IpAddr) -> u8 {
    let family = if address.is_ipv4() {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    u8::try_from(family).unwrap_or_default()
}

fn host_prefix_length(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

fn read_i32(bytes: &[u8], at: usize) -> Option<i32> {
    let bytes = bytes.get(at..at + 4)?.try_into().ok()?;
    Some(i32::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_carry_their_true_length_and_end_on_four_bytes() {
        let mut body = Vec::new();
        append_attribute(&mut body, IFLA_IFNAME, &c_name("lo"));
        assert_eq!(body.len(), 8);
        assert_eq!(body[..2], 7_u16.to_ne_bytes());
        append_attribute(&mut body, IFLA_INFO_KIND, b"veth");
        assert_eq!(body.len(), 16);
    }
}
