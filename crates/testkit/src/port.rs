//! Reservation of a loopback port that a gate binds later.
//!
//! The kernel can assign a released ephemeral port to another test before the gate binds it, or
//! between two starts of the gate. Reserved ports are below the ephemeral range
//! (`ip_local_port_range`), and other tests cannot reserve them at the same time.

#![expect(clippy::expect_used, reason = "a test without a port cannot continue")]

use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::UnixListener;

/// The range of reserved ports.
const FIRST_PORT: u16 = 20_000;
const PORT_COUNT: u16 = 10_000;

/// A port on the loopback, reserved until this is dropped.
#[derive(Debug)]
pub struct Port {
    address: SocketAddr,
    /// An abstract Unix socket as a lock; the kernel releases it with the process.
    _lock: UnixListener,
}

impl Port {
    /// Reserves a port that is free for TCP and UDP.
    pub fn take() -> Self {
        let from = std::process::id();
        let ports =
            (0..u32::from(PORT_COUNT)).map(|n| (from.wrapping_mul(31) + n) % u32::from(PORT_COUNT));
        let mut claims = ports.filter_map(|n| Self::claim(FIRST_PORT + u16::try_from(n).ok()?));
        claims.next().expect("a free port")
    }

    fn claim(port: u16) -> Option<Self> {
        let name = format!("palisade-test-port-{port}");
        let name = std::os::unix::net::SocketAddr::from_abstract_name(name).ok()?;
        let mine = UnixListener::bind_addr(&name).ok()?;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        TcpListener::bind(address).ok()?;
        UdpSocket::bind(address).ok()?;
        Some(Self {
            address,
            _lock: mine,
        })
    }

    /// The address on the loopback.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_port_can_be_bound_but_not_reserved_twice() {
        let one = Port::take();
        let port = one.address().port();
        assert!(Port::claim(port).is_none());
        TcpListener::bind(one.address()).unwrap();
        drop(one);
        assert!(Port::claim(port).is_some());
    }
}
