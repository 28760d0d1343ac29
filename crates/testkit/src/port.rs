//! A port for whoever binds it later.
//!
//! One that the kernel gave out and took back can be given to the next test before our gate
//! asks for it, or between two starts of the gate. These are below the range the kernel gives
//! out from (`ip_local_port_range`), and held against other tests.

#![expect(clippy::expect_used, reason = "a test without a port cannot go on")]

use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::UnixListener;

/// Where ports are taken from.
const FIRST: u16 = 20_000;
const MANY: u16 = 10_000;

/// A port on the loopback that nobody else gets as long as this lives.
#[derive(Debug)]
pub struct Port {
    address: SocketAddr,
    /// A name that only one can have, and that is free when its process ends, however it ends.
    _mine: UnixListener,
}

impl Port {
    /// Takes one that is free, for streams and for datagrams.
    pub fn take() -> Self {
        let from = std::process::id();
        let ports = (0..u32::from(MANY)).map(|n| (from.wrapping_mul(31) + n) % u32::from(MANY));
        let mut claims = ports.filter_map(|n| Self::claim(FIRST + u16::try_from(n).ok()?));
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
            _mine: mine,
        })
    }

    /// Where it is.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_anybodys_to_bind_and_nobody_elses_to_take() {
        let one = Port::take();
        let port = one.address().port();
        assert!(Port::claim(port).is_none());
        TcpListener::bind(one.address()).unwrap();
        drop(one);
        assert!(Port::claim(port).is_some());
    }
}
