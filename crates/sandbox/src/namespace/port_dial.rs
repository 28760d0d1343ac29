//! A connection to a port of the agent's own localhost, made by init and handed out. Init is
//! in the agent's network namespace, and never waits.

use std::io::{Error, ErrorKind, Result};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, connect, getpeername, getsockname,
    getsockopt, socket, sockopt,
};

/// Where a dev server may be, in the order tried.
const LOCALHOST: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::LOCALHOST),
    IpAddr::V6(Ipv6Addr::LOCALHOST),
];

/// A connection under way.
pub(crate) struct PortDial {
    port: u16,
    socket: OwnedFd,
    /// How many addresses have been tried.
    tried: usize,
    /// What the first of them said.
    said: Option<Error>,
}

/// How far it has come.
pub(crate) enum DialState {
    /// It stands.
    Connected(OwnedFd),
    /// Somebody has to answer first; wait until it can be written to.
    Waiting(PortDial),
    /// Nobody took it.
    Refused(Error),
}

/// Begins.
pub(crate) fn begin(port: u16) -> DialState {
    try_from(port, 0, None)
}

impl PortDial {
    /// What becomes writable when there is news.
    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Goes on after news.
    pub(crate) fn resume(self) -> DialState {
        let heard = match getsockopt(&self.socket, sockopt::SocketError) {
            Ok(0) => Ok(()),
            Ok(errno) => Err(Error::from_raw_os_error(errno)),
            Err(errno) => Err(errno.into()),
        };
        match heard.and_then(|()| is_another(&self.socket)) {
            Ok(()) => DialState::Connected(self.socket),
            Err(error) => try_from(self.port, self.tried, self.said.or(Some(error))),
        }
    }
}

fn try_from(port: u16, tried: usize, mut said: Option<Error>) -> DialState {
    for (number, address) in LOCALHOST.into_iter().enumerate().skip(tried) {
        match dial(SocketAddr::new(address, port)) {
            Ok((socket, true)) => return DialState::Connected(socket),
            Ok((socket, false)) => {
                return DialState::Waiting(PortDial {
                    port,
                    socket,
                    tried: number + 1,
                    said,
                });
            }
            Err(error) => said = said.or(Some(error)),
        }
    }
    DialState::Refused(said.unwrap_or_else(|| Error::from(ErrorKind::ConnectionRefused)))
}

/// A socket, and whether it is connected already.
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
            is_another(&socket)?;
            Ok((socket, true))
        }
        Err(Errno::EINPROGRESS) => Ok((socket, false)),
        Err(errno) => Err(errno.into()),
    }
}

/// TCP lets a socket connect to itself where the kernel gives it the very port it asks for.
fn is_another(socket: &OwnedFd) -> Result<()> {
    let own = getsockname::<SockaddrStorage>(socket.as_raw_fd())?;
    let peer = getpeername::<SockaddrStorage>(socket.as_raw_fd())?;
    if own == peer {
        return Err(Error::from(ErrorKind::ConnectionRefused));
    }
    Ok(())
}
