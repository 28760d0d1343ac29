//! Traffic to any address arrives at the gate's sockets. Only documentation addresses are used.

use std::io::Write;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::AsRawFd;

use nix::cmsg_space;
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, sendmsg,
};
use policy::id::SandboxId;
use sandbox::contract::{ListenerTransport, SandboxBackend, SandboxListener};

use crate::fixture::NamespaceFixture;

fn take_listener(
    fixture: &NamespaceFixture,
    id: &SandboxId,
    kind: ListenerTransport,
    port: u16,
    family_of: &str,
) -> SandboxListener {
    let v4 = family_of.parse::<IpAddr>().unwrap().is_ipv4();
    let mut all = fixture.backend.listeners(id).unwrap();
    let index = all
        .iter()
        .position(|one| {
            one.transport == kind && one.address.port() == port && one.address.is_ipv4() == v4
        })
        .unwrap();
    all.swap_remove(index)
}

#[test]
fn connection_to_any_address_arrives_with_its_destination() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    fixture.install_probe(&id);
    for (address, port) in [
        ("192.0.2.1", 80),
        ("203.0.113.77", 443),
        ("198.51.100.53", 53),
        ("2001:db8::1", 80),
        ("2001:db8:ffff::9", 443),
    ] {
        let listener: TcpListener =
            take_listener(&fixture, &id, ListenerTransport::Tcp, port, address)
                .socket
                .into();
        listener.set_nonblocking(false).unwrap();
        let destination = SocketAddr::new(address.parse().unwrap(), port);
        let gate = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let received = stream.local_addr().unwrap();
            stream.write_all(received.to_string().as_bytes()).unwrap();
        });
        let printed = fixture.stdout_of(&id, &format!("/tmp/probe connect '{destination}'"));
        assert_eq!(printed.trim(), destination.to_string());
        gate.join().unwrap();
    }
}

#[test]
fn query_to_any_resolver_is_answered_from_its_address() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    fixture.install_probe(&id);
    for address in ["198.51.100.53", "2001:db8::53"] {
        let socket = take_listener(&fixture, &id, ListenerTransport::Udp, 53, address).socket;
        let destination = SocketAddr::new(address.parse().unwrap(), 53);
        let gate = std::thread::spawn(move || answer_one(&socket));
        let printed = fixture.stdout_of(&id, &format!("/tmp/probe query '{destination}'"));
        assert_eq!(gate.join().unwrap(), destination.ip());
        assert_eq!(printed.trim(), "reply");
    }
}

/// Receives a datagram, answers from its destination address, and returns that address.
fn answer_one(socket: &std::os::fd::OwnedFd) -> IpAddr {
    let mut end = [nix::poll::PollFd::new(
        std::os::fd::AsFd::as_fd(socket),
        nix::poll::PollFlags::POLLIN,
    )];
    assert_eq!(nix::poll::poll(&mut end, 5000_u16).unwrap(), 1);
    let mut buffer = [0; 512];
    let mut parts = [std::io::IoSliceMut::new(&mut buffer)];
    let mut space = cmsg_space!(libc::in6_pktinfo, libc::in_pktinfo);
    let received = recvmsg::<SockaddrStorage>(
        socket.as_raw_fd(),
        &mut parts,
        Some(&mut space),
        MsgFlags::empty(),
    )
    .unwrap();
    let client = received.address.unwrap();
    let answer = [std::io::IoSlice::new(b"reply")];
    let send = |control: &[ControlMessage<'_>]| {
        sendmsg(
            socket.as_raw_fd(),
            &answer,
            control,
            MsgFlags::empty(),
            Some(&client),
        )
        .unwrap();
    };
    for message in received.cmsgs().unwrap() {
        match message {
            ControlMessageOwned::Ipv4PacketInfo(mut info) => {
                info.ipi_ifindex = 0;
                info.ipi_spec_dst = info.ipi_addr;
                send(&[ControlMessage::Ipv4PacketInfo(&info)]);
                return IpAddr::V4(u32::from_be(info.ipi_addr.s_addr).into());
            }
            ControlMessageOwned::Ipv6PacketInfo(info) => {
                send(&[ControlMessage::Ipv6PacketInfo(&info)]);
                return IpAddr::V6(info.ipi6_addr.s6_addr.into());
            }
            _ => {}
        }
    }
    panic!("the datagram has no destination address");
}

#[test]
fn localhost_is_private_also_on_the_gates_ports() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    fixture.install_probe(&id);
    for address in [
        "127.0.0.1:80",
        "[::1]:443",
        "127.0.0.1:8080",
        "127.0.0.53:53",
    ] {
        let printed = fixture.stdout_of(&id, &format!("/tmp/probe serve '{address}'"));
        assert_eq!(printed, "own\n", "{address}");
    }
}

#[test]
fn connection_to_a_closed_port_is_refused_and_reported() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    fixture.install_probe(&id);
    for address in ["192.0.2.1:22", "192.0.0.1:22", "[2001:db8::1]:25"] {
        let printed = fixture.stdout_of(&id, &format!("/tmp/probe connect '{address}'"));
        assert!(printed.contains("refused"), "{address}: {printed}");
    }
    let cards = fixture.stdout_of(&id, "ls /proc/sys/net/ipv4/conf");
    assert_eq!(cards, "all\ndefault\neth0\nlo\n");
}

#[test]
fn listeners_are_the_same_sockets_at_every_call() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    let inodes = |list: &[SandboxListener]| {
        list.iter()
            .map(|one| nix::sys::stat::fstat(&one.socket).unwrap().st_ino)
            .collect::<Vec<_>>()
    };
    let first = inodes(&fixture.backend.listeners(&id).unwrap());
    let again = crate::fixture::backend(fixture.directory.path().join("sandboxes"));
    let list = again.listeners(&id).unwrap();
    assert_eq!(inodes(&list), first);
    let shown: Vec<_> = list
        .iter()
        .filter(|one| one.address.is_ipv4())
        .map(|one| (one.transport, one.address.port()))
        .collect();
    assert_eq!(
        shown,
        [
            (ListenerTransport::Tcp, 80),
            (ListenerTransport::Tcp, 443),
            (ListenerTransport::Tcp, 8080),
            (ListenerTransport::Tcp, 9418),
            (ListenerTransport::Tcp, 53),
            (ListenerTransport::Udp, 53),
            (ListenerTransport::Closed, 0)
        ]
    );
}
