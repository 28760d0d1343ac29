//! UDP socket that reports the destination of each datagram, and answers from that address.

use std::io::{Error, ErrorKind, IoSlice, IoSliceMut, Result};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, OwnedFd};

use nix::libc::{in_addr, in_pktinfo, in6_addr, in6_pktinfo};
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, sendmsg,
};
use tokio::io::Interest;
use tokio::net::UdpSocket;

/// A datagram socket that serves every local address.
#[derive(Debug)]
pub struct DatagramSocket(UdpSocket);

/// Sender and destination of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatagramAddresses {
    /// The sender.
    pub sender: SocketAddr,
    /// The destination address.
    pub destination: IpAddr,
}

impl DatagramSocket {
    /// Wraps a bound socket that has packet information enabled.
    pub fn new(socket: OwnedFd) -> Result<Self> {
        let socket = std::net::UdpSocket::from(socket);
        socket.set_nonblocking(true)?;
        UdpSocket::from_std(socket).map(Self)
    }

    /// Receives the next datagram, truncated to the buffer's length.
    pub async fn receive(&self, buffer: &mut [u8]) -> Result<(usize, DatagramAddresses)> {
        self.0
            .async_io(Interest::READABLE, || receive(&self.0, buffer))
            .await
    }

    /// Sends an answer to the sender, from the datagram's destination address.
    pub async fn answer(&self, bytes: &[u8], addresses: DatagramAddresses) -> Result<()> {
        self.0
            .async_io(Interest::WRITABLE, || answer(&self.0, bytes, addresses))
            .await
    }
}

fn receive(socket: &UdpSocket, buffer: &mut [u8]) -> Result<(usize, DatagramAddresses)> {
    let mut space = nix::cmsg_space!(in6_pktinfo, in_pktinfo);
    let mut parts = [IoSliceMut::new(buffer)];
    let message = recvmsg::<SockaddrStorage>(
        socket.as_raw_fd(),
        &mut parts,
        Some(&mut space),
        MsgFlags::MSG_DONTWAIT,
    )?;
    let invalid = || Error::from(ErrorKind::InvalidData);
    let sender = message
        .address
        .as_ref()
        .and_then(socket_address)
        .ok_or_else(invalid)?;
    let destination = message.cmsgs()?.find_map(|control| match control {
        ControlMessageOwned::Ipv4PacketInfo(info) => Some(IpAddr::V4(Ipv4Addr::from_bits(
            u32::from_be(info.ipi_addr.s_addr),
        ))),
        ControlMessageOwned::Ipv6PacketInfo(info) => {
            Some(IpAddr::V6(Ipv6Addr::from(info.ipi6_addr.s6_addr)))
        }
        _ => None,
    });
    let destination = destination.ok_or_else(invalid)?;
    Ok((
        message.bytes,
        DatagramAddresses {
            sender,
            destination,
        },
    ))
}

fn answer(socket: &UdpSocket, bytes: &[u8], addresses: DatagramAddresses) -> Result<()> {
    let four;
    let six;
    let source = match addresses.destination {
        IpAddr::V4(destination) => {
            four = in_pktinfo {
                ipi_ifindex: 0,
                ipi_spec_dst: in_addr {
                    s_addr: destination.to_bits().to_be(),
                },
                ipi_addr: in_addr { s_addr: 0 },
            };
            ControlMessage::Ipv4PacketInfo(&four)
        }
        IpAddr::V6(destination) => {
            six = in6_pktinfo {
                ipi6_addr: in6_addr {
                    s6_addr: destination.octets(),
                },
                ipi6_ifindex: 0,
            };
            ControlMessage::Ipv6PacketInfo(&six)
        }
    };
    let to = SockaddrStorage::from(addresses.sender);
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

fn socket_address(address: &SockaddrStorage) -> Option<SocketAddr> {
    if let Some(four) = address.as_sockaddr_in() {
        return Some(SocketAddrV4::from(*four).into());
    }
    address
        .as_sockaddr_in6()
        .map(|six| SocketAddrV6::from(*six).into())
}
