//! Nothing of the host and nothing of another sandbox can be reached.

use std::net::{TcpListener, UdpSocket};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use sandbox::contract::{SandboxBackend, SandboxCommand};

use crate::bench::{Bench, config, until};

#[test]
fn every_namespace_is_the_sandboxs_own() {
    let (bench, id) = Bench::with_sandbox();
    for kind in ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup", "time"] {
        let path = format!("/proc/self/ns/{kind}");
        let Ok(hosts) = std::fs::read_link(&path) else {
            continue;
        };
        let inside = bench.says(&id, &format!("readlink {path}"));
        assert_ne!(inside.trim(), hosts.to_str().unwrap());
        assert!(inside.starts_with(kind), "{inside}");
    }
}

#[test]
fn no_socket_of_the_host_is_there_by_path_or_by_name() {
    let (bench, id) = Bench::with_sandbox();
    bench.bring_probe(&id);
    let path = bench.directory.path().join("control.sock");
    let _control = UnixListener::bind(&path).unwrap();
    let door = bench.directory.path().join("sandboxes/one/init.sock");
    for path in [&path, &door] {
        assert!(path.exists());
        let said = bench.says(&id, &format!("/tmp/probe reach {}", path.display()));
        assert_eq!(said, "ENOENT\n");
    }
    let name = format!("palisade-test-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let _listener = UnixListener::bind_addr(&address).unwrap();
    let said = bench.says(&id, &format!("/tmp/probe reach-abstract {name}"));
    assert_eq!(said, "ECONNREFUSED\n");
}

#[test]
fn what_listens_on_the_host_hears_nothing() {
    let (bench, id) = Bench::with_sandbox();
    bench.bring_probe(&id);
    for any in ["127.0.0.1:0", "[::1]:0"] {
        let Ok(tcp) = TcpListener::bind(any) else {
            continue;
        };
        let udp = UdpSocket::bind(any).unwrap();
        tcp.set_nonblocking(true).unwrap();
        udp.set_nonblocking(true).unwrap();
        let mut addresses = vec![tcp.local_addr().unwrap().ip().to_string()];
        // The two ends of the link as well.
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
            let said = bench.says(&id, &format!("/tmp/probe connect '{shown}:{port}'"));
            assert!(said.contains("refused"), "{shown}: {said}");
            let port = udp.local_addr().unwrap().port();
            bench.says(&id, &format!("/tmp/probe send '{shown}:{port}'"));
        }
        assert!(tcp.accept().is_err());
        assert!(udp.recv(&mut [0; 8]).is_err());
    }
}

#[test]
fn two_sandboxes_share_no_network_name_process_or_file() {
    let (bench, one) = Bench::with_sandbox();
    let two = config("two");
    bench.backend.create(&two).unwrap();
    bench.bring_probe(&one);
    bench.bring_probe(&two.id);
    // Both listen in the first one, for as long as this test keeps them.
    let waiting = |line: &str| {
        let command = SandboxCommand::new(["/bin/sh", "-c", line]);
        let running = bench.backend.start(&one, &command, None).unwrap();
        let mut word = [0; 10];
        let said = running.ends().get(1).unwrap();
        let mut heard = 0;
        while heard < word.len() {
            heard += nix::unistd::read(said, &mut word[heard..]).unwrap();
        }
        assert_eq!(&word, b"listening\n");
        running
    };
    let _name = waiting("/tmp/probe keep-abstract shared");
    let _port = waiting("/tmp/probe accept 0.0.0.0:9000");
    let says = |line: &str| bench.says(&two.id, line);
    assert_eq!(
        bench.says(&one, "/tmp/probe reach-abstract shared"),
        "done\n"
    );
    assert_eq!(says("/tmp/probe reach-abstract shared"), "ECONNREFUSED\n");
    for address in ["192.0.0.2:9000", "192.0.0.1:9000", "127.0.0.1:9000"] {
        let said = says(&format!("/tmp/probe connect {address}"));
        assert!(said.contains("refused"), "{address}: {said}");
    }
    // Of what ran before, somebody may not have been taken in yet.
    until("only its own", || {
        says("ls /proc > /tmp/seen; grep -c '^[0-9]' /tmp/seen") == "2\n"
    });
    let other = bench.directory.path().join("sandboxes/one");
    let line = format!("ls {} 2>/dev/null || echo hidden", other.display());
    assert_eq!(says(&line), "hidden\n");
    // Nor by way of what every process has.
    let line = "cat /proc/self/root/../../etc/hostname; ls /proc/self/cwd/../../home";
    assert_eq!(says(line), "two\nagent\n");
}

#[test]
fn what_a_command_holds_was_made_inside() {
    let (bench, id) = Bench::with_sandbox();
    let held = bench.says(&id, "for i in /proc/self/fd/*; do readlink $i || :; done");
    for line in held.lines() {
        // The listing itself is one of them.
        let known = line.starts_with("pipe:") || line.starts_with("/proc/");
        assert!(known, "{held}");
    }
    // The end one reads from is a pipe of this command alone, and writing there is harmless.
    let tried = bench.shell(&id, "echo x > /proc/self/fd/0; echo still here");
    assert_eq!(tried.stdout, b"still here\n");
    assert_eq!(bench.says(&id, "echo well"), "well\n");
}

#[test]
fn no_file_gives_anybody_more_rights() {
    let (bench, id) = Bench::with_sandbox();
    let mounts = bench.says(&id, "cat /proc/self/mountinfo");
    for line in mounts.lines() {
        let mut fields = line.split(' ').skip(4);
        let (place, options) = (fields.next().unwrap(), fields.next().unwrap());
        // Devices and masks are single nodes, which nobody inside can change.
        let single = place.starts_with("/dev/") || place.starts_with("/proc/");
        let quiet = options.split(',').any(|option| option == "nosuid");
        assert!(quiet || single, "{line}");
    }
    let line = "cp /usr/bin/id /tmp/id && chmod 6755 /tmp/id && /tmp/id -u";
    assert_eq!(bench.says(&id, line), "1000\n");
    // One of the host's that has the bit.
    let tried = bench.shell(&id, "/usr/bin/su -c 'id -u' < /dev/null");
    assert_ne!(tried.stdout, b"0\n");
}
