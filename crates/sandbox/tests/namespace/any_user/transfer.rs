//! Uploads, downloads and connections to ports.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use sandbox::contract::{SandboxBackend, SandboxCommand, SandboxError, TransferBounds};
use sandbox::transfer::{MemberRefusal, TransferError, UnpackRules, pack, unpack};

use crate::fixture::{NamespaceFixture, until};

const LARGE_BOUNDS: TransferBounds = TransferBounds {
    bytes: 64 << 20,
    entries: 1000,
};

fn packed(source: &Path) -> Vec<u8> {
    let mut archive = Vec::new();
    pack(source, &mut archive, &mut |_| {}).unwrap();
    archive
}

#[test]
fn uploaded_tree_belongs_to_the_agent_and_downloads_unchanged() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    let host = tempfile::tempdir().unwrap();
    let source = host.path().join("tree");
    std::fs::create_dir_all(source.join("deep/er")).unwrap();
    std::fs::write(source.join("deep/er/big"), vec![7; 3 << 20]).unwrap();
    std::fs::write(source.join("tool"), "#!/bin/sh\necho ran\n").unwrap();
    std::fs::set_permissions(source.join("tool"), PermissionsExt::from_mode(0o755)).unwrap();
    symlink("deep/er/big", source.join("link")).unwrap();
    let up = fixture
        .backend
        .upload(
            &id,
            Path::new("in"),
            &mut packed(&source).as_slice(),
            &LARGE_BOUNDS,
        )
        .unwrap();
    assert_eq!((up.files, up.bytes), (3, (3 << 20) + 19));
    assert_eq!(
        fixture.stdout_of(
            &id,
            "cd /workspace/in/tree && ./tool && readlink link && stat -c %u:%g tool deep && \
             find /workspace -name '.palisade*'"
        ),
        "ran\ndeep/er/big\n1000:1000\n1000:1000\n"
    );
    let mut archive = Vec::new();
    let down = fixture
        .backend
        .download(&id, Path::new("/src/in/tree"), &mut archive, &LARGE_BOUNDS)
        .unwrap();
    assert_eq!(down, up);
    let target = host.path().join("back");
    unpack(
        &mut archive.as_slice(),
        &target,
        &LARGE_BOUNDS,
        &UnpackRules::FOR_HOST,
    )
    .unwrap();
    assert_eq!(packed(&target.join("tree")), packed(&source));
}

#[test]
fn refused_upload_changes_nothing_and_names_the_reason() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    let host = tempfile::tempdir().unwrap();
    std::fs::write(host.path().join("file"), "12345").unwrap();
    let archive = packed(&host.path().join("file"));
    let upload = |to: &str, archive: &[u8], bounds| {
        fixture
            .backend
            .upload(&id, Path::new(to), &mut &archive[..], &bounds)
            .unwrap_err()
    };
    let small = TransferBounds {
        bytes: 4,
        entries: 9,
    };
    let error = upload("new", &archive, small);
    assert!(
        matches!(error, SandboxError::Transfer(TransferError::TooLarge(4))),
        "{error}"
    );
    let error = upload("new", &archive[..600], LARGE_BOUNDS);
    assert!(
        matches!(error, SandboxError::Transfer(TransferError::Malformed(_))),
        "{error}"
    );
    let error = upload("/proc/nowhere", &archive, LARGE_BOUNDS);
    assert!(error.to_string().contains("/proc/nowhere"), "{error}");
    fixture.stdout_of(&id, "mkdir file");
    let error = upload(".", &archive, LARGE_BOUNDS);
    assert!(
        matches!(
            error,
            SandboxError::Transfer(TransferError::Refused {
                reason: MemberRefusal::OtherKind,
                ..
            })
        ),
        "{error}"
    );
    assert_eq!(
        fixture.stdout_of(&id, "ls -A /workspace /workspace/file"),
        "/workspace:\nfile\n\n/workspace/file:\n"
    );
}

#[test]
fn download_over_its_bounds_names_the_missing_files() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    fixture.stdout_of(
        &id,
        "truncate -s 1T hole; mkfifo fifo; echo x > closed; chmod 0 closed",
    );
    let download = |from: &str| {
        let mut archive = Vec::new();
        let moved = fixture
            .backend
            .download(&id, Path::new(from), &mut archive, &LARGE_BOUNDS);
        (moved, archive.len())
    };
    let (moved, length) = download("hole");
    assert!(
        matches!(
            moved,
            Err(SandboxError::Transfer(TransferError::TooLarge(_)))
        ),
        "{moved:?}"
    );
    assert!(length < 1 << 20);
    let (moved, _) = download("nothing");
    assert_eq!(moved.unwrap_err().to_string(), "'nothing' does not exist");
    fixture.stdout_of(&id, "rm hole");
    let (moved, _) = download(".");
    let moved = moved.unwrap();
    assert_eq!(moved.files, 0);
    assert_eq!(
        moved.left_out,
        [
            "closed: Permission denied",
            "fifo: a socket, FIFO or device"
        ]
    );
}

#[test]
fn transfer_never_follows_links_out_of_the_sandbox() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    let host = tempfile::tempdir().unwrap();
    let secret = host.path().join("secret");
    std::fs::write(&secret, "the operator's").unwrap();
    let path = secret.to_str().unwrap();
    fixture.stdout_of(
        &id,
        &format!("ln -s {path} leak; ln -s {path} leak2; ln -s / root"),
    );
    let mut archive = Vec::new();
    let error = fixture
        .backend
        .download(&id, Path::new("leak"), &mut archive, &LARGE_BOUNDS)
        .unwrap_err();
    assert_eq!(error.to_string(), "'leak' does not exist");
    // The agent's root, and its `/etc`.
    let mut archive = Vec::new();
    fixture
        .backend
        .download(
            &id,
            Path::new("root/etc/passwd"),
            &mut archive,
            &LARGE_BOUNDS,
        )
        .unwrap();
    let target = host.path().join("back");
    unpack(
        &mut archive.as_slice(),
        &target,
        &LARGE_BOUNDS,
        &UnpackRules::FOR_HOST,
    )
    .unwrap();
    let passwd = std::fs::read_to_string(target.join("passwd")).unwrap();
    assert!(passwd.contains("/home/agent"), "{passwd}");
    // An upload replaces the link, and does not write through it.
    let new = host.path().join("leak2");
    std::fs::write(&new, "new").unwrap();
    fixture
        .backend
        .upload(
            &id,
            Path::new("."),
            &mut packed(&new).as_slice(),
            &LARGE_BOUNDS,
        )
        .unwrap();
    assert_eq!(fixture.stdout_of(&id, "cat leak2"), "new");
    assert_eq!(std::fs::read_to_string(&secret).unwrap(), "the operator's");
}

#[test]
fn upload_with_failing_source_leaves_nothing() {
    struct Broken(usize);
    impl Read for Broken {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            if self.0 == 0 {
                return Err(std::io::Error::other("gone"));
            }
            let length = self.0.min(buffer.len());
            self.0 -= length;
            buffer[..length].fill(b'x');
            Ok(length)
        }
    }
    let (fixture, id) = NamespaceFixture::with_sandbox();
    let host = tempfile::tempdir().unwrap();
    std::fs::write(host.path().join("file"), vec![b'x'; 1 << 20]).unwrap();
    let archive = packed(&host.path().join("file"));
    let mut broken = archive[..512].chain(Broken(1000));
    let error = fixture
        .backend
        .upload(&id, Path::new("."), &mut broken, &LARGE_BOUNDS)
        .unwrap_err();
    assert!(error.to_string().contains("gone"), "{error}");
    assert_eq!(fixture.stdout_of(&id, "ls -A"), "");
}

#[test]
fn port_on_the_sandbox_localhost_is_reachable_from_the_host() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    fixture.install_probe(&id);
    for address in ["127.0.0.1:8080", "[::1]:9090", "0.0.0.0:80"] {
        let port = address.rsplit(':').next().unwrap().parse().unwrap();
        let running = fixture
            .backend
            .start(
                &id,
                &SandboxCommand::new(["/tmp/probe", "echo", address]),
                None,
            )
            .unwrap();
        until("a listener", || {
            fixture.backend.open_ports(&id).unwrap() == [port]
        });
        let socket = fixture.backend.connect(&id, port).unwrap();
        let mut stream = TcpStream::from(socket);
        stream.set_nonblocking(false).unwrap();
        stream.write_all(b"who?").unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, "who?", "{address}");
        assert_eq!(running.wait().unwrap().code, 0);
    }
}

#[test]
fn port_without_listener_is_refused_at_once() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    assert_eq!(fixture.backend.open_ports(&id).unwrap(), [0_u16; 0]);
    for port in [1, 80, 8080, 40_000, 0] {
        let error = fixture.backend.connect(&id, port).unwrap_err();
        assert!(matches!(error, SandboxError::Connect { .. }), "{error}");
        assert!(
            error
                .to_string()
                .starts_with(&format!("port {port} in the sandbox: ")),
            "{error}"
        );
    }
    assert_eq!(fixture.stdout_of(&id, "echo alive"), "alive\n");
}

#[test]
fn listener_that_accepts_nothing_delays_no_other_request() {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    fixture.install_probe(&id);
    let _running = fixture
        .backend
        .start(
            &id,
            &SandboxCommand::new(["/tmp/probe", "listen-without-accept", "127.0.0.1:7000"]),
            None,
        )
        .unwrap();
    until("a listener", || {
        fixture.backend.open_ports(&id).unwrap() == [7000]
    });
    // The listener's backlog is short, so a connection is eventually neither accepted nor refused.
    let mut connections = Vec::new();
    let timeout_error = std::thread::scope(|scope| {
        for _ in 0..8 {
            let dialling = scope.spawn(|| fixture.backend.connect(&id, 7000));
            assert_eq!(fixture.stdout_of(&id, "echo alive"), "alive\n");
            match dialling.join().unwrap() {
                Ok(socket) => connections.push(socket),
                Err(error) => return Some(error),
            }
        }
        None
    });
    let error = timeout_error.expect("the queue was never full");
    assert!(matches!(error, SandboxError::NotResponding(_)), "{error}");
}
