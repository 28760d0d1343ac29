//! The owner of a connection is either certain or unknown.

use std::io::Read;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use policy::id::SandboxId;
use sandbox::contract::{
    ListenerTransport, SandboxBackend, SandboxCommand, SandboxError, TransferBounds,
};
use sandbox::namespace::client::RunningCommand;

use crate::fixture::{NamespaceFixture, until};

/// A documentation address for programs to connect to.
const DESTINATION: &str = "192.0.2.1:80";

/// A connection as the gate sees it, and the shell command that made it.
struct Call<'a> {
    fixture: &'a NamespaceFixture,
    id: &'a SandboxId,
    command: RunningCommand,
    stream: TcpStream,
}

impl<'a> Call<'a> {
    fn start(fixture: &'a NamespaceFixture, id: &'a SandboxId, line: &str) -> Self {
        Self::start_to(fixture, id, line, DESTINATION)
    }

    fn start_to(
        fixture: &'a NamespaceFixture,
        id: &'a SandboxId,
        line: &str,
        destination: &str,
    ) -> Self {
        let destination: SocketAddr = destination.parse().unwrap();
        let listeners = fixture.backend.listeners(id).unwrap();
        let mut listeners = listeners.into_iter().filter(|listener| {
            listener.transport == ListenerTransport::Tcp
                && listener.address.port() == destination.port()
                && listener.address.is_ipv4() == destination.is_ipv4()
        });
        let listener: TcpListener = listeners.next().unwrap().socket.into();
        let line = fixture
            .backend
            .start(id, &SandboxCommand::shell(line), None)
            .unwrap();
        let poll_fd = PollFd::new(std::os::fd::AsFd::as_fd(&listener), PollFlags::POLLIN);
        assert_eq!(
            poll(&mut [poll_fd], 10_000_u16).unwrap(),
            1,
            "no connection arrived"
        );
        let (stream, _) = listener.accept().unwrap();
        Self {
            fixture,
            id,
            command: line,
            stream,
        }
    }

    fn ends(&self) -> (SocketAddr, SocketAddr) {
        let (from, to) = (self.stream.peer_addr(), self.stream.local_addr());
        (from.unwrap(), to.unwrap())
    }

    fn query(&self) -> Result<Option<String>, SandboxError> {
        let (from, to) = self.ends();
        self.fixture.backend.socket_owner(self.id, from, to)
    }

    fn program(&self) -> Option<String> {
        self.query().unwrap()
    }

    fn is_owned_by(&self, program: &str) -> bool {
        self.program().as_deref() == Some(program)
    }
}

fn fixture() -> (NamespaceFixture, SandboxId) {
    let (fixture, id) = NamespaceFixture::with_sandbox();
    fixture.install_probe(&id);
    (fixture, id)
}

#[test]
fn connection_owner_is_the_program_that_opened_it() {
    let (fixture, id) = fixture();
    for destination in [DESTINATION, "[2001:db8::1]:443"] {
        let line = format!("/tmp/probe connect '{destination}'");
        let call = Call::start_to(&fixture, &id, &line, destination);
        assert_eq!(call.program().as_deref(), Some("/tmp/probe"));
        let (from, to) = call.ends();
        // The other end of the connection belongs to the gate, which is not in the sandbox.
        assert_eq!(fixture.backend.socket_owner(&id, to, from).unwrap(), None);
        let other = SocketAddr::new(to.ip(), to.port() + 1);
        assert_eq!(
            fixture.backend.socket_owner(&id, from, other).unwrap(),
            None
        );
        drop(call.stream);
        assert_eq!(call.command.wait().unwrap().code, 0);
        assert_eq!(fixture.backend.socket_owner(&id, from, to).unwrap(), None);
    }
}

#[test]
fn connections_of_another_sandbox_have_no_owner() {
    let (fixture, id) = fixture();
    let other = fixture.create("other", |_| {});
    let call = Call::start(&fixture, &id, &format!("/tmp/probe connect {DESTINATION}"));
    let (from, to) = call.ends();
    assert!(call.is_owned_by("/tmp/probe"));
    assert_eq!(
        fixture.backend.socket_owner(&other, from, to).unwrap(),
        None
    );
    let unknown = SandboxId::parse("never-made").unwrap();
    assert!(fixture.backend.socket_owner(&unknown, from, to).is_err());
}

#[test]
fn connection_of_two_programs_has_no_owner_until_one_exits() {
    let (fixture, id) = fixture();
    let line = format!("/tmp/probe connect-and-spawn {DESTINATION} sleep 1000");
    let call = Call::start(&fixture, &id, &line);
    until("the sleeper", || fixture.sleepers(&id) == 1);
    until("two programs", || call.program().is_none());
    assert_eq!(fixture.sleepers(&id), 1);
    assert_eq!(call.program(), None);
    fixture.stdout_of(&id, "pkill -x sleep");
    until("one program", || call.is_owned_by("/tmp/probe"));
}

#[test]
fn processes_of_one_program_may_share_a_connection() {
    let (fixture, id) = fixture();
    let line = format!("/tmp/probe connect-and-spawn {DESTINATION} /tmp/probe wait");
    let call = Call::start(&fixture, &id, &line);
    let count = "cat /proc/[0-9]*/comm 2>/dev/null | grep -c '^probe' || true";
    until("two processes", || {
        fixture.stdout_of(&id, count).trim() == "2"
    });
    until("their common program", || call.is_owned_by("/tmp/probe"));
    // The same file under another path is another program.
    let line = format!(
        "ln /tmp/probe /tmp/twin && /tmp/probe connect-and-spawn {DESTINATION} /tmp/twin wait"
    );
    let call = Call::start(&fixture, &id, &line);
    until("two names", || call.program().is_none());
}

#[test]
fn connection_owner_follows_exec() {
    let (fixture, id) = fixture();
    let line = format!("/tmp/probe connect-and-exec {DESTINATION} sleep 1000");
    let call = Call::start(&fixture, &id, &line);
    until("the sleeper", || fixture.sleepers(&id) == 1);
    let sleep = fixture.stdout_of(&id, "readlink -f $(command -v sleep)");
    assert_eq!(call.program().as_deref(), Some(sleep.trim()));
}

#[test]
fn thread_with_its_own_descriptor_table_is_found() {
    let (fixture, id) = fixture();
    let call = Call::start(
        &fixture,
        &id,
        &format!("/tmp/probe connect-in-thread {DESTINATION}"),
    );
    assert!(call.is_owned_by("/tmp/probe"));
}

#[test]
fn deleted_executable_has_no_owner_even_if_replaced() {
    let (fixture, id) = fixture();
    let line = format!("cp /tmp/probe /tmp/gone && /tmp/gone connect {DESTINATION}");
    let call = Call::start(&fixture, &id, &line);
    assert!(call.is_owned_by("/tmp/gone"));
    for disguise in [
        "rm /tmp/gone",
        // The kernel's path of a deleted file, as a file name.
        "cp /tmp/probe '/tmp/gone (deleted)'",
        "ln -s /usr/bin/env /tmp/gone",
        "rm /tmp/gone; cp /tmp/probe /tmp/gone",
    ] {
        fixture.stdout_of(&id, disguise);
        assert_eq!(call.program(), None, "{disguise}");
    }
    // A program whose path really has this suffix is found.
    let line = format!("'/tmp/gone (deleted)' connect {DESTINATION}");
    let call = Call::start(&fixture, &id, &line);
    assert!(call.is_owned_by("/tmp/gone (deleted)"));
}

#[test]
fn program_path_that_is_not_utf8_has_no_owner() {
    let (fixture, id) = fixture();
    for name in [r"/tmp/a\nb/curl", r"/tmp/\033[2J/curl", r"/tmp/\377/curl"] {
        let line = format!(
            "name=$(printf '{name}') && mkdir \"$(dirname \"$name\")\" && \
             cp /tmp/probe \"$name\" && exec \"$name\" connect {DESTINATION}"
        );
        let call = Call::start(&fixture, &id, &line);
        assert_eq!(call.program(), None, "{name}");
    }
}

#[test]
fn owner_search_over_budget_is_unknown_and_fast() {
    let (fixture, id) = fixture();
    let call = Call::start(
        &fixture,
        &id,
        &format!("/tmp/probe connect-with-many-descriptors {DESTINATION} 20"),
    );
    let start = Instant::now();
    assert_eq!(call.program(), None);
    assert!(
        start.elapsed() < Duration::from_secs(5),
        "{:?}",
        start.elapsed()
    );
    assert_eq!(fixture.stdout_of(&id, "echo well"), "well\n");
    drop(call);
    // After the processes have exited the next owner is found again.
    let call = Call::start(&fixture, &id, &format!("/tmp/probe connect {DESTINATION}"));
    until("the program", || call.is_owned_by("/tmp/probe"));
}

#[test]
fn starting_commands_do_not_hide_the_owner() {
    let (fixture, id) = fixture();
    let call = Call::start(&fixture, &id, &format!("/tmp/probe connect {DESTINATION}"));
    std::thread::scope(|scope| {
        let commands = scope.spawn(|| {
            for _ in 0..50 {
                let backend = crate::fixture::backend(fixture.directory.path().join("sandboxes"));
                backend.exec(&id, &SandboxCommand::shell("true")).unwrap();
            }
        });
        let mut requested = 0;
        while !commands.is_finished() || requested == 0 {
            assert_eq!(
                call.program().as_deref(),
                Some("/tmp/probe"),
                "after {requested}"
            );
            requested += 1;
        }
    });
}

#[test]
fn unreaped_processes_do_not_hide_the_owner() {
    let (fixture, id) = fixture();
    let line = format!("true & exec /tmp/probe connect {DESTINATION}");
    let call = Call::start(&fixture, &id, &line);
    let count = "cat /proc/[0-9]*/stat 2>/dev/null | grep -c '(true) Z\\|(sh) Z' || true";
    until("an exited process", || {
        fixture.stdout_of(&id, count).trim() == "1"
    });
    assert_eq!(call.program().as_deref(), Some("/tmp/probe"));
}

/// An archive that runs a query while it is read.
struct QueryingArchive<'a> {
    call: &'a Call<'a>,
    answers: Vec<Option<String>>,
}

impl Read for QueryingArchive<'_> {
    fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
        self.answers.push(self.call.program());
        Ok(0)
    }
}

#[test]
fn running_upload_does_not_hide_the_owner() {
    let (fixture, id) = fixture();
    let call = Call::start(&fixture, &id, &format!("/tmp/probe connect {DESTINATION}"));
    let mut archive = QueryingArchive {
        call: &call,
        answers: Vec::new(),
    };
    let bounds = TransferBounds {
        bytes: 1,
        entries: 1,
    };
    // The result does not matter here.
    let _ = fixture
        .backend
        .upload(&id, Path::new("in"), &mut archive, &bounds);
    let found = archive.answers.first().unwrap();
    assert_eq!(found.as_deref(), Some("/tmp/probe"));
}

#[test]
fn stopped_init_does_not_delay_the_lookup() {
    let (fixture, id) = fixture();
    let call = Call::start(&fixture, &id, &format!("/tmp/probe connect {DESTINATION}"));
    let record = fixture.directory.path().join("sandboxes/one/record.json");
    let record: serde_json::Value =
        serde_json::from_slice(&std::fs::read(record).unwrap()).unwrap();
    let init = Pid::from_raw(record["init"]["pid"].as_i64().unwrap().try_into().unwrap());
    kill(init, Signal::SIGSTOP).unwrap();
    let start = Instant::now();
    // More connections than the backlog allows.
    let backends: Vec<_> = (0..100)
        .map(|_| crate::fixture::backend(fixture.directory.path().join("sandboxes")))
        .collect();
    let ends = call.ends();
    let answers: Vec<_> = std::thread::scope(|scope| {
        let id = &id;
        let requested: Vec<_> = backends
            .iter()
            .map(|backend| scope.spawn(move || backend.socket_owner(id, ends.0, ends.1).is_ok()))
            .collect();
        requested
            .into_iter()
            .map(|one| one.join().unwrap())
            .collect()
    });
    let took = start.elapsed();
    kill(init, Signal::SIGCONT).unwrap();
    assert!(answers.iter().all(|answered| !answered));
    assert!(took < Duration::from_secs(15), "{took:?}");
    until(
        "its answer",
        || matches!(call.query(), Ok(Some(name)) if name == "/tmp/probe"),
    );
}
