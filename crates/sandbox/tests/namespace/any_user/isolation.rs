//! Isolation from the host and from other sandboxes.

use std::net::{TcpListener, UdpSocket};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use sandbox::contract::{SandboxBackend, SandboxCommand};

use crate::fixture::{NamespaceFixture, config, until};

#[test]
fn every_namespace_is_the_sandboxs_own() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    for kind in ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup", "time"] {
        let path = format!("/proc/self/ns/{kind}");
        let Ok(hosts) = std::fs::read_link(&path) else {
            continue;
        };
        let inside = fixture.stdout_of(&id, &format!("readlink {path}"));
        assert_ne!(inside.trim(), hosts.to_str().unwrap());
        assert!(inside.starts_with(kind), "{inside}");
    }
}

#[test]
fn host_sockets_are_unreachable_by_path_and_name() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    fixture.install_probe(&id);
    let path = fixture.directory.path().join("control.sock");
    let _control = UnixListener::bind(&path).unwrap();
    let init_socket = fixture.directory.path().join("sandboxes/one/init.sock");
    for path in [&path, &init_socket] {
        assert!(path.exists());
        let printed = fixture.stdout_of(&id, &format!("/tmp/probe reach {}", path.display()));
        assert_eq!(printed, "ENOENT\n");
    }
    let name = format!("palisade-test-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let _listener = UnixListener::bind_addr(&address).unwrap();
    let printed = fixture.stdout_of(&id, &format!("/tmp/probe reach-abstract {name}"));
    assert_eq!(printed, "ECONNREFUSED\n");
}

#[test]
fn host_listeners_receive_nothing() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    fixture.install_probe(&id);
    for any in ["127.0.0.1:0", "[::1]:0"] {
        let Ok(tcp) = TcpListener::bind(any) else {
            continue;
        };
        let udp = UdpSocket::bind(any).unwrap();
        tcp.set_nonblocking(true).unwrap();
        udp.set_nonblocking(true).unwrap();
        let mut addresses = vec![tcp.local_addr().unwrap().ip().to_string()];
        // The addresses of both ends of the link.
        addresses.extend(match any {
            "127.0.0.1:0" => ["192.0.0.1", "192.0.0.2"].map(str::to_owned),
            _ => ["fd70:616c:6973::1", "fd70:616c:6973::2"].map(str::to_owned),
        });
        for address in addresses {
            let shown = if address.contains(':') {
                format!("[{address}]")
            } else {
                address
            };
            let port = tcp.local_addr().unwrap().port();
            let printed = fixture.stdout_of(&id, &format!("/tmp/probe connect '{shown}:{port}'"));
            assert!(printed.contains("refused"), "{shown}: {printed}");
            let port = udp.local_addr().unwrap().port();
            fixture.stdout_of(&id, &format!("/tmp/probe send '{shown}:{port}'"));
        }
        assert!(tcp.accept().is_err());
        assert!(udp.recv(&mut [0; 8]).is_err());
    }
}

#[test]
fn two_sandboxes_share_no_network_name_process_or_file() {
    let (fixture, one) = NamespaceFixture::with_sandbox();
    let two = config("two");
    fixture.backend.create(&two).unwrap();
    fixture.install_probe(&one);
    fixture.install_probe(&two.id);
    // Each command listens in the first sandbox until it is dropped.
    let start_listener = |line: &str| {
        let command = SandboxCommand::new(["/bin/sh", "-c", line]);
        let running = fixture.backend.start(&one, &command, None).unwrap();
        let mut word = [0; 10];
        let printed = running.stdio().get(1).unwrap();
        let mut received = 0;
        while received < word.len() {
            received += nix::unistd::read(printed, &mut word[received..]).unwrap();
        }
        assert_eq!(&word, b"listening\n");
        running
    };
    let _name = start_listener("/tmp/probe listen-abstract shared");
    let _port = start_listener("/tmp/probe accept 0.0.0.0:9000");
    let stdout_of = |line: &str| fixture.stdout_of(&two.id, line);
    assert_eq!(
        fixture.stdout_of(&one, "/tmp/probe reach-abstract shared"),
        "done\n"
    );
    assert_eq!(
        stdout_of("/tmp/probe reach-abstract shared"),
        "ECONNREFUSED\n"
    );
    for address in ["192.0.0.2:9000", "192.0.0.1:9000", "127.0.0.1:9000"] {
        let printed = stdout_of(&format!("/tmp/probe connect {address}"));
        assert!(printed.contains("refused"), "{address}: {printed}");
    }
    // A process of an earlier command may not be reaped yet.
    until("the second sandbox to show only its own processes", || {
        stdout_of("ls /proc > /tmp/seen; grep -c '^[0-9]' /tmp/seen") == "2\n"
    });
    let other = fixture.directory.path().join("sandboxes/one");
    let line = format!("ls {} 2>/dev/null || echo hidden", other.display());
    assert_eq!(stdout_of(&line), "hidden\n");
    // Also not through descriptors that every process has.
    let line = "cat /proc/self/root/../../etc/hostname; ls /proc/self/cwd/../../home";
    assert_eq!(stdout_of(line), "two\nagent\n");
}

#[test]
fn command_descriptors_are_created_in_the_sandbox() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    let held = fixture.stdout_of(&id, "for i in /proc/self/fd/*; do readlink $i || :; done");
    for line in held.lines() {
        // The listing itself is one of the processes.
        let known = line.starts_with("pipe:") || line.starts_with("/proc/");
        assert!(known, "{held}");
    }
    // The read end is a pipe of this command only, and writing to it is harmless.
    let tried = fixture.shell(&id, "echo x > /proc/self/fd/0; echo still here");
    assert_eq!(tried.stdout, b"still here\n");
    assert_eq!(fixture.stdout_of(&id, "echo well"), "well\n");
}

#[test]
fn setuid_files_give_no_rights() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    let mounts = fixture.stdout_of(&id, "cat /proc/self/mountinfo");
    for line in mounts.lines() {
        let mut fields = line.split(' ').skip(4);
        let (path, options) = (fields.next().unwrap(), fields.next().unwrap());
        // Devices and masks are single files that the agent cannot change.
        let is_single_file = path.starts_with("/dev/") || path.starts_with("/proc/");
        let is_nosuid = options.split(',').any(|option| option == "nosuid");
        assert!(is_nosuid || is_single_file, "{line}");
    }
    let line = "cp /usr/bin/id /tmp/id && chmod 6755 /tmp/id && /tmp/id -u";
    assert_eq!(fixture.stdout_of(&id, line), "1000\n");
    // A setuid program of the host.
    let tried = fixture.shell(&id, "/usr/bin/su -c 'id -u' < /dev/null");
    assert_ne!(tried.stdout, b"0\n");
}
