//! Measurements for a person, without assertions on time. `just measure-pack-reader` takes a push
//! of 90 MiB and an optimised build; the tests take a smaller one.

use std::fmt::Write;
use std::time::{Duration, Instant};

use policy::push::RestrictedPathChange;
use sandbox::pack_reader::PackReaderLimits;

use crate::fixture::{Repo, file, pack_reader};

/// The peak memory of a child of this process in bytes, from its status file.
fn peak_of_child() -> Option<u64> {
    let own = std::process::id().to_string();
    let processes = std::fs::read_dir("/proc").ok()?;
    processes.flatten().find_map(|process| {
        let status = std::fs::read_to_string(process.path().join("status")).ok()?;
        let field = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name))?;
            line.split_whitespace().nth(1)
        };
        let is_pack_reader = field("Name:")?.starts_with("sandbox-pack");
        (is_pack_reader && field("PPid:")? == own)
            .then(|| field("VmHWM:")?.parse::<u64>().ok())
            .flatten()
            .map(|kilobytes| kilobytes << 10)
    })
}

/// Creates a pack of incompressible data and of source files in many versions.
fn push_of(repo: &Repo, mib: usize) -> Vec<u8> {
    let mut seed = 1_u64;
    let mut random_bytes = |length: usize| -> Vec<u8> {
        std::iter::repeat_with(|| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33).to_le_bytes()[0]
        })
        .take(length)
        .collect()
    };
    for number in 0..mib * 19 / 20 {
        repo.write(&format!("data/{number}/x"), "");
        let path = repo.dir().join(format!("data/{number}/noise"));
        std::fs::write(path, random_bytes(1 << 20)).unwrap();
    }
    for version in 0..20 {
        for number in 0..mib {
            let mut text = String::new();
            for line in random_bytes(500) {
                writeln!(
                    text,
                    "let value_{line} = call(\"https://example.com/{version}\", {line});"
                )
                .unwrap();
            }
            repo.write(&format!("src/{}/file-{number}.rs", number % 7), &text);
        }
        repo.commit("version");
    }
    repo.pack_bytes(&["HEAD"], &["--delta-base-offset"])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_push_measured() {
    let mib = std::env::var("PALISADE_PUSH_MIB").ok();
    let mib: usize = mib.map_or(3, |mib| mib.parse().unwrap());
    let repo = Repo::new();
    let bytes = push_of(&repo, mib);
    let context = repo.context(&repo.rev("HEAD"));
    let pack = file(&bytes);
    let (sender, receiver) = tokio::sync::watch::channel(0);
    tokio::spawn(async move {
        let mut pause = tokio::time::interval(Duration::from_millis(2));
        while !sender.is_closed() {
            pause.tick().await;
            let peak = peak_of_child().unwrap_or_default();
            sender.send_modify(|max| *max = peak.max(*max));
        }
    });
    let began = Instant::now();
    // Without optimisation the read takes longer than the default limits.
    let reader = pack_reader().with_limits(PackReaderLimits {
        processor: 900,
        seconds: 900,
        ..PackReaderLimits::default()
    });
    let found = reader.read(&context, Some(pack), Vec::new()).await.unwrap();
    let took = began.elapsed();
    let peak = *receiver.borrow();
    assert_eq!(
        (found.secrets.len(), found.restricted),
        (0, RestrictedPathChange::Untouched)
    );
    println!(
        "a push of {:.1} MiB, {} objects: {took:.2?}, at most {:.1} MiB of memory",
        bytes.len() as f64 / 1_048_576.0,
        found.objects,
        peak as f64 / 1_048_576.0
    );
    assert!(peak > 0 && peak < 96 << 20, "{peak}");
}
