//! Clone and push of a large repository. `just measure-git-traffic` measures the time
//! with and without the gate.

use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::git_fixture::{APP, FixtureOptions, GitFixture, describe};

/// The size of the repository in MiB and the number of rounds: small, unless a benchmark sets the
/// variable.
fn size() -> (usize, usize) {
    let setting = std::env::var("PALISADE_GIT_MIB");
    setting.map_or((6, 1), |text| (text.parse().unwrap(), 3))
}

/// Commits incompressible files of 1 MiB each.
fn fill(fixture: &GitFixture, dir: &Path, name: &str, files: usize) {
    let mut noise = std::fs::File::open("/dev/urandom").unwrap();
    for number in 0..files {
        let mut bytes = vec![0; 1 << 20];
        noise.read_exact(&mut bytes).unwrap();
        std::fs::write(dir.join(format!("{name}-{number}")), bytes).unwrap();
    }
    fixture.git_in(dir, &["add", "-A"]);
    fixture.git_in(dir, &["commit", "-q", "-m", name]);
}

/// Runs git directly against the forge.
fn git_without_gate(fixture: &GitFixture, dir: &Path, args: &[&str]) {
    let at = fixture.forge.address();
    let resolve = format!(
        "http.curloptResolve=forge.example:{}:{}",
        at.port(),
        at.ip()
    );
    let args = [&["-c", &resolve, "-c", "http.postBuffer=1048576"], args].concat();
    let mut command = fixture.command(dir, &args);
    let output = command
        .env_remove("https_proxy")
        .env("GIT_SSL_CAINFO", fixture.path("root.pem"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{args:?}: {}", describe(&output));
}

fn timed(work: impl FnOnce()) -> Duration {
    let started = Instant::now();
    work();
    started.elapsed()
}

#[test]
fn large_repository_is_cloned_and_pushed_completely() {
    let (mib, rounds) = size();
    let fixture = GitFixture::with_options(FixtureOptions {
        checked: true,
        ..FixtureOptions::default()
    });
    let dir = fixture.working_copy("work");
    fill(&fixture, &dir, "old", mib);
    let upstream = fixture.upstream("acme/app");
    let path = upstream.to_str().unwrap();
    fixture.git_in(&dir, &["push", "-q", path, "HEAD:refs/heads/main"]);
    let main = fixture.git_in(&dir, &["rev-parse", "HEAD"]);
    fixture.git_in(&dir, &["fetch", "-q", "origin"]);
    let home = fixture.path("");
    let direct = format!(
        "https://forge.example:{}/acme/app",
        fixture.forge.address().port()
    );
    for round in 0..rounds {
        let (ours, theirs) = (format!("ours-{round}"), format!("theirs-{round}"));
        let direct_time =
            timed(|| git_without_gate(&fixture, &home, &["clone", "-q", &direct, &theirs]));
        let gate_time = timed(|| drop(fixture.git_in(&home, &["clone", "-q", APP, &ours])));
        let ratio = direct_time.as_secs_f64() / gate_time.as_secs_f64();
        eprintln!(
            "clone of {mib} MiB: direct {direct_time:.2?}, with the gate {gate_time:.2?}, {ratio:.2}"
        );
        let clone = fixture.path(&ours);
        assert_eq!(fixture.git_in(&clone, &["rev-parse", "HEAD"]), main);
        fixture.git_in(&clone, &["fsck", "--strict"]);

        fill(&fixture, &dir, &format!("new-{round}"), mib.min(80) / 2);
        let branch = |name: &str| format!("HEAD:refs/heads/{name}-{round}");
        let (mine, other) = (branch("mine"), branch("other"));
        let post = "http.postBuffer=1048576";
        let push = ["-c", post, "push", "-q", "origin", &mine];
        let gate_time = timed(|| drop(fixture.git_in(&dir, &push)));
        // Upstream deletes the objects, so that the direct push sends the same data again.
        let head = fixture.git_in(&dir, &["rev-parse", "HEAD"]);
        assert!(fixture.refs("acme/app").contains(&head));
        let pushed_ref = format!("refs/heads/mine-{round}");
        fixture.git_in(&upstream, &["update-ref", "-d", &pushed_ref]);
        fixture.git_in(&upstream, &["reflog", "expire", "--expire=now", "--all"]);
        fixture.git_in(&upstream, &["prune", "--expire=now"]);
        fixture.git_in(&upstream, &["repack", "-q", "-a", "-d"]);
        let direct_time =
            timed(|| git_without_gate(&fixture, &dir, &["push", "-q", &direct, &other]));
        let ratio = direct_time.as_secs_f64() / gate_time.as_secs_f64();
        eprintln!(
            "push: direct {direct_time:.2?}, with the gate and its checks {gate_time:.2?}, {ratio:.2}"
        );
        assert!(
            fixture
                .refs("acme/app")
                .contains(&format!("other-{round} {head}"))
        );
        let other_ref = format!("refs/heads/other-{round}");
        fixture.git_in(&upstream, &["update-ref", "-d", &other_ref]);
        fixture.git_in(&dir, &["reset", "-q", "--hard", &main]);
    }
}
