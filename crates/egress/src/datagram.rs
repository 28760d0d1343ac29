//! Datagrams that remember which address they were sent to, and answers that come from it.

use std::io::{Error, ErrorKind, IoSlice, IoSliceMut, Result};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, OwnedFd};

use nix::libc::{in_addr, in_pktinfo, in6_addr, in6_pktinfo};
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, sendmsg,
};
use tokio::io::Interest;
use tokio::net::UdpSocket;

/// A datagram socket that answers for every address.
#[derive(Debug)]
pub struct Datagrams(UdpSocket);

/// Who sent a datagram, and to whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    /// The sender.
    pub from: SocketAddr,
    /// The address it meant.
    pub meant: IpAddr,
}

impl Datagrams {
    /// Takes a bound socket that has packet information switched on.
    pub fn new(socket: OwnedFd) -> Result<Self> {
        let socket = std::net::UdpSocket::from(socket);
        socket.set_nonblocking(true)?;
        UdpSocket::from_std(socket).map(Self)
    }

    /// The next datagram, cut at the buffer's length.
    pub async fn receive(&self, buffer: &mut [u8]) -> Result<(usize, Ends)> {
        self.0
            .async_io(Interest::READABLE, || receive(&self.0, buffer))
            .await
    }

    /// Sends from the address that was meant back to the sender.
    pub async fn answer(&self, bytes: &[u8], ends: Ends) -> Result<()> {
        self.0
            .async_io(Interest::WRITABLE, || answer(&self.0, bytes, ends))
            .await
    }
}

fn receive(socket: &UdpSocket, buffer: &mut [u8]) -> Result<(usize, Ends)> {
    let mut space = nix::cmsg_space!(in6_pktinfo, in_pktinfo);
    let mut parts = [IoSliceMut::new(buffer)];
    let message = recvmsg::<SockaddrStorage>(
        socket.as_raw_fd(),
        &mut parts,
        Some(&mut space),
        MsgFlags::MSG_DONTWAIT,
    )?;
    let odd = || Error::from(ErrorKind::InvalidData);
    let from = message.address.as_ref().and_then(inet).ok_or_else(odd)?;
    let meant = message.cmsgs()?.find_map(|control| match control {
        ControlMessageOwned::Ipv4PacketInfo(info) => Some(IpAddr::V4(Ipv4Addr::from_bits(
            u32::from_be(info.ipi_addr.s_addr),
        ))),
        ControlMessageOwned::Ipv6PacketInfo(info) => {
            Some(IpAddr::V6(Ipv6Addr::from(info.ipi6_addr.s6_addr)))
        }
        _ => None,
    });
    let meant = meant.ok_or_else(odd)?;
    Ok((message.bytes, Ends { from, meant }))
}

fn answer(socket: &UdpSocket, bytes: &[u8], ends: Ends) -> Result<()> {
    let four;
    let six;
    let source = match ends.meant {
        IpAddr::V4(meant) => {
            four = in_pktinfo {
                ipi_ifindex: 0,
                ipi_spec_dst: in_addr {
                    s_addr: meant.to_bits().to_be(),
                },
                ipi_addr: in_addr { s_addr: 0 },
            };
            ControlMessage::Ipv4PacketInfo(&four)
        }
        IpAddr::V6(meant) => {
            six = in6_pktinfo {
                ipi6_addr: in6_addr {
                    s6_addr: meant.octets(),
                },
                ipi6_ifindex: 0,
            };
            ControlMessage::Ipv6PacketInfo(&six)
        }
    };
    let to = SockaddrStorage::from(ends.from);
    let parts = [IoSlice::new(bytes)];
    sendmsg(
        socket.as_raw_fd(),
        &parts,
        &[source],
        MsgFlags::MSG_DONTWAIT,
        Some(&to),
    )?;
    Ok(())
}

fn inet(address: &SockaddrStorage) -> Option<SocketAddr> {
    if let Some(four) = address.as_sockaddr_in() {
        return Some(SocketAddrV4::from(*four).into());
    }
    address
        .as_sockaddr_in6()
        .map(|six| SocketAddrV6::from(*six).into())
}
