//! Measurements for a person, without assertions on time. `PALISADE_ROUNDS=200` and a release build
//! give meaningful results; the tests take fewer rounds.

use std::path::Path;
use std::time::{Duration, Instant};

use sandbox::contract::{Force, SandboxBackend, SandboxCommand, TransferBounds};

use crate::fixture::{NamespaceFixture, config};

#[test]
fn create_run_and_transfer_measured() {
    let rounds = std::env::var("PALISADE_ROUNDS").ok();
    let rounds: usize = rounds.map_or(3, |rounds| rounds.parse().unwrap());
    let (fixture, id) = NamespaceFixture::with_sandbox();
    let backend = &fixture.backend;
    let true_command = SandboxCommand::new(["/bin/true"]);
    let time = |what: &str, rounds: usize, work: &mut dyn FnMut(usize)| {
        let mut times: Vec<Duration> = (0..rounds)
            .map(|round| {
                let start = Instant::now();
                work(round);
                start.elapsed()
            })
            .collect();
        times.sort();
        let percentile = |part: usize| times[(rounds - 1) * part / 100].as_secs_f64() * 1000.0;
        println!(
            "{what}: median {:.2} ms, 90 % {:.2} ms, best {:.2} ms",
            percentile(50),
            percentile(90),
            percentile(0)
        );
    };
    time("/bin/true on the host", rounds, &mut |_| {
        std::process::Command::new("/bin/true").status().unwrap();
    });
    time("exec of /bin/true", rounds, &mut |_| {
        assert_eq!(backend.exec(&id, &true_command).unwrap().exit_code, 0);
    });
    time("status", rounds, &mut |_| {
        backend.status(&id);
    });
    time("pause and resume", rounds, &mut |_| {
        backend.pause(&id).unwrap();
        backend.resume(&id).unwrap();
    });
    let few = rounds.div_ceil(4);
    let each = |round: usize| config(&format!("n{round}"));
    time("create", few, &mut |round| {
        backend.create(&each(round)).unwrap();
    });
    time("first exec", few, &mut |round| {
        backend.exec(&each(round).id, &true_command).unwrap();
    });
    time("delete", few, &mut |round| {
        backend.delete(&each(round).id, Force::Yes).unwrap();
    });
    let bounds = TransferBounds::default();
    let host = tempfile::tempdir().unwrap();
    std::fs::write(host.path().join("file"), vec![7; 64 << 20]).unwrap();
    let mut archive = Vec::new();
    sandbox::transfer::pack(&host.path().join("file"), &mut archive, &mut |_| {}).unwrap();
    time("upload of 64 MB", 3, &mut |_| {
        let mut archive = archive.as_slice();
        backend
            .upload(&id, Path::new("."), &mut archive, &bounds)
            .unwrap();
    });
    time("download of 64 MB", 3, &mut |_| {
        let mut back = Vec::with_capacity(archive.len());
        backend
            .download(&id, Path::new("file"), &mut back, &bounds)
            .unwrap();
    });
    time("exec that prints 60 MB", 3, &mut |_| {
        let printed = backend
            .exec(&id, &SandboxCommand::shell("head -c 60000000 file"))
            .unwrap();
        assert_eq!(printed.stdout.len(), 60_000_000);
    });
}
