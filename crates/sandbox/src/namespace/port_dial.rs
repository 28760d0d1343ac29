//! Connects to a port on the sandbox's localhost on behalf of a client. Init is in the agent's
//! network namespace, and never blocks.

use std::io::{Error, ErrorKind, Result};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, connect, getpeername, getsockname,
    getsockopt, socket, sockopt,
};

/// The addresses of localhost, in the order tried.
const LOCALHOST: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::LOCALHOST),
    IpAddr::V6(Ipv6Addr::LOCALHOST),
];

/// A connection attempt in progress.
pub(crate) struct PortDial {
    port: u16,
    socket: OwnedFd,
    /// The number of addresses tried.
    tried: usize,
    /// The error of the first address.
    first_error: Option<Error>,
}

/// The state of a connection attempt.
pub(crate) enum DialState {
    /// Connected.
    Connected(OwnedFd),
    /// In progress; wait until the socket is writable.
    Waiting(PortDial),
    /// Refused on all addresses.
    Refused(Error),
}

/// Starts a connection attempt.
pub(crate) fn begin(port: u16) -> DialState {
    try_addresses(port, 0, None)
}

impl PortDial {
    /// The socket that becomes writable when the attempt has ended.
    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Continues after the socket became writable.
    pub(crate) fn resume(self) -> DialState {
        let result = match getsockopt(&self.socket, sockopt::SocketError) {
            Ok(0) => Ok(()),
            Ok(errno) => Err(Error::from_raw_os_error(errno)),
            Err(errno) => Err(errno.into()),
        };
        match result.and_then(|()| check_not_self_connection(&self.socket)) {
            Ok(()) => DialState::Connected(self.socket),
            Err(error) => try_addresses(self.port, self.tried, self.first_error.or(Some(error))),
        }
    }
}

fn try_addresses(port: u16, tried: usize, mut first_error: Option<Error>) -> DialState {
    for (number, address) in LOCALHOST.into_iter().enumerate().skip(tried) {
        match dial(SocketAddr::new(address, port)) {
            Ok((socket, true)) => return DialState::Connected(socket),
            Ok((socket, false)) => {
                return DialState::Waiting(PortDial {
                    port,
                    socket,
                    tried: number + 1,
                    first_error,
                });
            }
            Err(error) => first_error = first_error.or(Some(error)),
        }
    }
    DialState::Refused(first_error.unwrap_or_else(|| Error::from(ErrorKind::ConnectionRefused)))
}

/// Opens a socket; returns whether it is connected already.
fn dial(address: SocketAddr) -> Result<(OwnedFd, bool)> {
    let family = if address.is_ipv4() {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(family, SockType::Stream, flags, None)?;
    match connect(socket.as_raw_fd(), &SockaddrStorage::from(address)) {
        Ok(()) => {
            check_not_self_connection(&socket)?;
            Ok((socket, true))
        }
        Err(Errno::EINPROGRESS) => Ok((socket, false)),
        Err(errno) => Err(errno.into()),
    }
}

/// Rejects a TCP self-connection, which happens when the kernel assigns the target port as the
/// source port.
fn check_not_self_connection(socket: &OwnedFd) -> Result<()> {
    let own = getsockname::<SockaddrStorage>(socket.as_raw_fd())?;
    let peer = getpeername::<SockaddrStorage>(socket.as_raw_fd())?;
    if own == peer {
        return Err(Error::from(ErrorKind::ConnectionRefused));
    }
    Ok(())
}
