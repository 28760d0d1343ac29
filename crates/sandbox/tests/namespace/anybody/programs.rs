//! Whose a connection is: certain, or nobody's.

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

use crate::bench::{Bench, until};

/// A documentation address for programs to mean.
const MEANT: &str = "192.0.2.1:80";

/// A connection as the gate has it, and the line of shell that made it.
struct Call<'a> {
    bench: &'a Bench,
    id: &'a SandboxId,
    line: RunningCommand,
    stream: TcpStream,
}

impl<'a> Call<'a> {
    fn of(bench: &'a Bench, id: &'a SandboxId, line: &str) -> Self {
        Self::to(bench, id, line, MEANT)
    }

    fn to(bench: &'a Bench, id: &'a SandboxId, line: &str, meant: &str) -> Self {
        let meant: SocketAddr = meant.parse().unwrap();
        let doors = bench.backend.listeners(id).unwrap();
        let mut doors = doors.into_iter().filter(|door| {
            door.transport == ListenerTransport::Tcp
                && door.address.port() == meant.port()
                && door.address.is_ipv4() == meant.is_ipv4()
        });
        let listener: TcpListener = doors.next().unwrap().socket.into();
        let line = bench
            .backend
            .start(id, &SandboxCommand::shell(line), None)
            .unwrap();
        let news = PollFd::new(std::os::fd::AsFd::as_fd(&listener), PollFlags::POLLIN);
        assert_eq!(poll(&mut [news], 10_000_u16).unwrap(), 1, "nobody came");
        let (stream, _) = listener.accept().unwrap();
        Self {
            bench,
            id,
            line,
            stream,
        }
    }

    fn ends(&self) -> (SocketAddr, SocketAddr) {
        let (from, to) = (self.stream.peer_addr(), self.stream.local_addr());
        (from.unwrap(), to.unwrap())
    }

    fn ask(&self) -> Result<Option<String>, SandboxError> {
        let (from, to) = self.ends();
        self.bench.backend.connected_by(self.id, from, to)
    }

    fn program(&self) -> Option<String> {
        self.ask().unwrap()
    }

    fn is(&self, program: &str) -> bool {
        self.program().as_deref() == Some(program)
    }
}

fn bench() -> (Bench, SandboxId) {
    let (bench, id) = Bench::with_sandbox();
    bench.bring_probe(&id);
    (bench, id)
}

#[test]
fn a_connection_belongs_to_the_program_that_made_it() {
    let (bench, id) = bench();
    for meant in [MEANT, "[2001:db8::1]:443"] {
        let line = format!("/tmp/probe connect '{meant}'");
        let call = Call::to(&bench, &id, &line, meant);
        assert_eq!(call.program().as_deref(), Some("/tmp/probe"));
        let (from, to) = call.ends();
        // The same connection seen from the other side is the gate's, who is not inside.
        assert_eq!(bench.backend.connected_by(&id, to, from).unwrap(), None);
        let other = SocketAddr::new(to.ip(), to.port() + 1);
        assert_eq!(bench.backend.connected_by(&id, from, other).unwrap(), None);
        drop(call.stream);
        assert_eq!(call.line.wait().unwrap().code, 0);
        assert_eq!(bench.backend.connected_by(&id, from, to).unwrap(), None);
    }
}

#[test]
fn another_sandboxs_connections_are_nobodys_here() {
    let (bench, id) = bench();
    let other = bench.create("other", |_| {});
    let call = Call::of(&bench, &id, &format!("/tmp/probe connect {MEANT}"));
    let (from, to) = call.ends();
    assert!(call.is("/tmp/probe"));
    assert_eq!(bench.backend.connected_by(&other, from, to).unwrap(), None);
    let nobody = SandboxId::parse("never-made").unwrap();
    assert!(bench.backend.connected_by(&nobody, from, to).is_err());
}

#[test]
fn a_connection_that_two_programs_hold_is_nobodys_until_one_is_left() {
    let (bench, id) = bench();
    let line = format!("/tmp/probe share {MEANT} sleep 1000");
    let call = Call::of(&bench, &id, &line);
    until("the sleeper", || bench.sleepers(&id) == 1);
    until("two programs", || call.program().is_none());
    assert_eq!(bench.sleepers(&id), 1);
    assert_eq!(call.program(), None);
    bench.says(&id, "pkill -x sleep");
    until("one program", || call.is("/tmp/probe"));
}

#[test]
fn processes_of_one_program_may_share_a_connection() {
    let (bench, id) = bench();
    let line = format!("/tmp/probe share {MEANT} /tmp/probe wait");
    let call = Call::of(&bench, &id, &line);
    let count = "cat /proc/[0-9]*/comm 2>/dev/null | grep -c '^probe' || true";
    until("two processes", || bench.says(&id, count).trim() == "2");
    until("their program", || call.is("/tmp/probe"));
    // The same file by another name is another program.
    let line = format!("ln /tmp/probe /tmp/twin && /tmp/probe share {MEANT} /tmp/twin wait");
    let call = Call::of(&bench, &id, &line);
    until("two names", || call.program().is_none());
}

#[test]
fn who_becomes_another_program_takes_its_connections_along() {
    let (bench, id) = bench();
    let line = format!("/tmp/probe become {MEANT} sleep 1000");
    let call = Call::of(&bench, &id, &line);
    until("the sleeper", || bench.sleepers(&id) == 1);
    let sleep = bench.says(&id, "readlink -f $(command -v sleep)");
    assert_eq!(call.program().as_deref(), Some(sleep.trim()));
}

#[test]
fn a_thread_with_descriptors_of_its_own_is_found() {
    let (bench, id) = bench();
    let call = Call::of(&bench, &id, &format!("/tmp/probe apart {MEANT}"));
    assert!(call.is("/tmp/probe"));
}

#[test]
fn an_executable_without_a_name_is_nobody_whatever_stands_in_its_place() {
    let (bench, id) = bench();
    let line = format!("cp /tmp/probe /tmp/gone && /tmp/gone connect {MEANT}");
    let call = Call::of(&bench, &id, &line);
    assert!(call.is("/tmp/gone"));
    for disguise in [
        "rm /tmp/gone",
        // What the kernel says of a deleted file, as a name.
        "cp /tmp/probe '/tmp/gone (deleted)'",
        "ln -s /usr/bin/env /tmp/gone",
        "rm /tmp/gone; cp /tmp/probe /tmp/gone",
    ] {
        bench.says(&id, disguise);
        assert_eq!(call.program(), None, "{disguise}");
    }
    // A program that is really called so is called so.
    let line = format!("'/tmp/gone (deleted)' connect {MEANT}");
    let call = Call::of(&bench, &id, &line);
    assert!(call.is("/tmp/gone (deleted)"));
}

#[test]
fn a_name_that_is_no_line_of_text_is_nobodys() {
    let (bench, id) = bench();
    for name in [r"/tmp/a\nb/curl", r"/tmp/\033[2J/curl", r"/tmp/\377/curl"] {
        let line = format!(
            "name=$(printf '{name}') && mkdir \"$(dirname \"$name\")\" && \
             cp /tmp/probe \"$name\" && exec \"$name\" connect {MEANT}"
        );
        let call = Call::of(&bench, &id, &line);
        assert_eq!(call.program(), None, "{name}");
    }
}

#[test]
fn who_has_too_much_to_look_at_is_nobody_and_keeps_nobody_waiting() {
    let (bench, id) = bench();
    let call = Call::of(&bench, &id, &format!("/tmp/probe crowd {MEANT} 20"));
    let begun = Instant::now();
    assert_eq!(call.program(), None);
    assert!(
        begun.elapsed() < Duration::from_secs(5),
        "{:?}",
        begun.elapsed()
    );
    assert_eq!(bench.says(&id, "echo well"), "well\n");
    drop(call);
    // And when they have gone the next one is found again.
    let call = Call::of(&bench, &id, &format!("/tmp/probe connect {MEANT}"));
    until("the program", || call.is("/tmp/probe"));
}

#[test]
fn commands_that_begin_do_not_make_it_uncertain() {
    let (bench, id) = bench();
    let call = Call::of(&bench, &id, &format!("/tmp/probe connect {MEANT}"));
    std::thread::scope(|scope| {
        let busy = scope.spawn(|| {
            for _ in 0..50 {
                let backend = crate::bench::backend(bench.directory.path().join("sandboxes"));
                backend.exec(&id, &SandboxCommand::shell("true")).unwrap();
            }
        });
        let mut asked = 0;
        while !busy.is_finished() || asked == 0 {
            assert_eq!(
                call.program().as_deref(),
                Some("/tmp/probe"),
                "after {asked}"
            );
            asked += 1;
        }
    });
}

#[test]
fn processes_that_nobody_takes_in_do_not_make_it_uncertain() {
    let (bench, id) = bench();
    let line = format!("true & exec /tmp/probe connect {MEANT}");
    let call = Call::of(&bench, &id, &line);
    let count = "cat /proc/[0-9]*/stat 2>/dev/null | grep -c '(true) Z\\|(sh) Z' || true";
    until("one that has ended", || {
        bench.says(&id, count).trim() == "1"
    });
    assert_eq!(call.program().as_deref(), Some("/tmp/probe"));
}

/// An archive during whose reading a question is asked.
struct Asking<'a> {
    call: &'a Call<'a>,
    answers: Vec<Option<String>>,
}

impl Read for Asking<'_> {
    fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
        self.answers.push(self.call.program());
        Ok(0)
    }
}

#[test]
fn an_upload_under_way_does_not_make_it_uncertain() {
    let (bench, id) = bench();
    let call = Call::of(&bench, &id, &format!("/tmp/probe connect {MEANT}"));
    let mut archive = Asking {
        call: &call,
        answers: Vec::new(),
    };
    let bounds = TransferBounds {
        bytes: 1,
        entries: 1,
    };
    // What comes of it is not the question.
    let _ = bench
        .backend
        .upload(&id, Path::new("in"), &mut archive, &bounds);
    let found = archive.answers.first().unwrap();
    assert_eq!(found.as_deref(), Some("/tmp/probe"));
}

#[test]
fn an_init_that_stands_still_is_not_waited_for() {
    let (bench, id) = bench();
    let call = Call::of(&bench, &id, &format!("/tmp/probe connect {MEANT}"));
    let record = bench.directory.path().join("sandboxes/one/record.json");
    let record: serde_json::Value =
        serde_json::from_slice(&std::fs::read(record).unwrap()).unwrap();
    let init = Pid::from_raw(record["init"]["pid"].as_i64().unwrap().try_into().unwrap());
    kill(init, Signal::SIGSTOP).unwrap();
    let begun = Instant::now();
    // More than have room in its queue.
    let backends: Vec<_> = (0..100)
        .map(|_| crate::bench::backend(bench.directory.path().join("sandboxes")))
        .collect();
    let ends = call.ends();
    let answers: Vec<_> = std::thread::scope(|scope| {
        let id = &id;
        let asked: Vec<_> = backends
            .iter()
            .map(|backend| scope.spawn(move || backend.connected_by(id, ends.0, ends.1).is_ok()))
            .collect();
        asked.into_iter().map(|one| one.join().unwrap()).collect()
    });
    let took = begun.elapsed();
    kill(init, Signal::SIGCONT).unwrap();
    assert!(answers.iter().all(|answered| !answered));
    assert!(took < Duration::from_secs(15), "{took:?}");
    until(
        "its answer",
        || matches!(call.ask(), Ok(Some(name)) if name == "/tmp/probe"),
    );
}
