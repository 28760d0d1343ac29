//! Two network namespaces, connected by a veth pair and to nothing else.
//!
//! ```text
//!   agent's namespace                       gate's namespace
//!   lo 127.0.0.1, ::1 (private)
//!   eth0 192.0.0.2 ───────────────────────▶ gate 192.0.0.1
//!        default via gate                   local default dev lo: every address is local
//!                                           listeners on 0.0.0.0 and [::]
//! ```
//!
//! Packets to any address end at a socket of the gate, and `getsockname` returns the destination
//! address. A packet with a forged source is dropped as a martian: every source except the agent's
//! own is a local address.

use std::io::Result;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::sched::{CloneFlags, unshare};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage, bind, listen, setsockopt, socket,
    sockopt,
};

use super::closed_ports;
use super::netlink::{Netlink, Route, this_namespace};
use crate::contract::{GatePorts, ListenerTransport};

/// The gate's addresses on the link. 192.0.0.0/29 is reserved for such links and never routed (RFC
/// 7335).
const GATE_ADDRESSES: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(192, 0, 0, 1)),
    IpAddr::V6(Ipv6Addr::new(0xfd70, 0x616c, 0x6973, 0, 0, 0, 0, 1)),
];
/// The agent's addresses on the link.
const AGENT_ADDRESSES: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(192, 0, 0, 2)),
    IpAddr::V6(Ipv6Addr::new(0xfd70, 0x616c, 0x6973, 0, 0, 0, 0, 2)),
];

/// A socket of the gate with its transport and address.
pub(crate) type GateSocket = (ListenerTransport, SocketAddr, OwnedFd);

/// Configures both namespaces. The caller is in a new network namespace, which becomes the gate's,
/// and is in the agent's afterwards.
pub(crate) fn configure(ports: &GatePorts) -> Result<Vec<GateSocket>> {
    let mut gate = Netlink::open()?;
    let gate_namespace = this_namespace()?;
    let gate_sockets = open_gate_sockets(ports)?;
    let lo = gate.link_index("lo")?;
    gate.set_up(lo)?;

    unshare(CloneFlags::CLONE_NEWNET)?;
    let mut agent = Netlink::open()?;
    let agent_lo = agent.link_index("lo")?;
    agent.set_up(agent_lo)?;
    agent.add_pair("eth0", "gate", gate_namespace.as_fd())?;
    let agent_link = agent.link_index("eth0")?;
    let gate_link = gate.link_index("gate")?;
    agent.set_up(agent_link)?;
    gate.set_up(gate_link)?;

    for (gate_address, agent_address) in GATE_ADDRESSES.into_iter().zip(AGENT_ADDRESSES) {
        if gate_address.is_ipv6() && !has_ipv6() {
            continue;
        }
        gate.add_address(gate_link, gate_address)?;
        agent.add_address(agent_link, agent_address)?;
        gate.add_route(gate_link, Route::Except(agent_address), agent_address)?;
        gate.add_route(lo, Route::EverythingIsLocal, gate_address)?;
        agent.add_route(agent_link, Route::Neighbour(gate_address), gate_address)?;
        agent.add_route(agent_link, Route::DefaultVia(gate_address), gate_address)?;
    }
    // The agent has no capabilities, and its localhost is private: it may use every port.
    std::fs::write("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0")?;
    Ok(gate_sockets)
}

fn has_ipv6() -> bool {
    std::path::Path::new("/proc/sys/net/ipv6").exists()
}

fn open_gate_sockets(ports: &GatePorts) -> Result<Vec<GateSocket>> {
    let mut wildcards = vec![IpAddr::V4(Ipv4Addr::UNSPECIFIED)];
    if has_ipv6() {
        wildcards.push(IpAddr::V6(Ipv6Addr::UNSPECIFIED));
    }
    let mut gate_sockets = Vec::new();
    for &wildcard in &wildcards {
        for &port in &ports.tcp {
            gate_sockets.push(open_gate_socket(
                ListenerTransport::Tcp,
                SocketAddr::new(wildcard, port),
            )?);
        }
        for &port in &ports.udp {
            gate_sockets.push(open_gate_socket(
                ListenerTransport::Udp,
                SocketAddr::new(wildcard, port),
            )?);
        }
        let socket = closed_ports::open(wildcard, &ports.tcp)?;
        gate_sockets.push((
            ListenerTransport::Closed,
            SocketAddr::new(wildcard, 0),
            socket,
        ));
    }
    Ok(gate_sockets)
}

fn open_gate_socket(transport: ListenerTransport, address: SocketAddr) -> Result<GateSocket> {
    let kind = if transport == ListenerTransport::Tcp {
        SockType::Stream
    } else {
        SockType::Datagram
    };
    let family = if address.is_ipv4() {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let gate_socket = socket(family, kind, flags, None)?;
    if address.is_ipv6() {
        setsockopt(&gate_socket, sockopt::Ipv6V6Only, &true)?;
    }
    match (transport, address.is_ipv4()) {
        (ListenerTransport::Tcp, _) => setsockopt(&gate_socket, sockopt::ReuseAddr, &true)?,
        (_, true) => setsockopt(&gate_socket, sockopt::Ipv4PacketInfo, &true)?,
        (_, false) => {
            setsockopt(&gate_socket, sockopt::Ipv6RecvPacketInfo, &true)?;
            // With this option the gate can answer from an address that is local only by its route.
            set_ipv6_freebind(&gate_socket)?;
        }
    }
    bind(gate_socket.as_raw_fd(), &SockaddrStorage::from(address))?;
    if transport == ListenerTransport::Tcp {
        listen(&gate_socket, Backlog::new(1024)?)?;
    }
    Ok((transport, address, gate_socket))
}

fn set_ipv6_freebind(socket: &OwnedFd) -> Result<()> {
    const IPV6_FREEBIND: i32 = 78;
    let on: libc::c_int = 1;
    // SAFETY: the option takes an int; pointer and length are those of `on`.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_IPV6,
            IPV6_FREEBIND,
            (&raw const on).cast(),
            4,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error())
    }
}
