//! Measurements for a person, without assertions on time. `just measure-git` takes 10 000 files and
//! an optimised build; the tests take fewer.

use std::time::Instant;

use sandbox::git::workspace::WorkspacePlan;
use sandbox::name::Slug;

use crate::repo::{Repo, git};

/// Processor time of this process and its workers in milliseconds, which is more stable than wall
/// time on a busy machine.
fn processor() -> f64 {
    use nix::sys::resource::{UsageWho, getrusage};
    [UsageWho::RUSAGE_SELF, UsageWho::RUSAGE_CHILDREN]
        .map(|name| {
            let usage = getrusage(name).unwrap();
            let seconds = |time: nix::sys::time::TimeVal| {
                time.tv_sec() as f64 * 1000.0 + time.tv_usec() as f64 / 1000.0
            };
            seconds(usage.user_time()) + seconds(usage.system_time())
        })
        .iter()
        .sum()
}

#[test]
fn repository_of_many_files_round_trip_measured() {
    let files = std::env::var("PALISADE_FILES").ok();
    let files: usize = files.map_or(1_000, |files| files.parse().unwrap());
    let repo = Repo::empty();
    for number in 0..files {
        let text = format!("file {number}\n").repeat(1 + number % 60);
        repo.write(
            &format!("d{}/e{}/f{number}.txt", number % 10, number % 100),
            &text,
        );
    }
    repo.commit("many");
    let host_repository = repo.host_repository();
    let checkouts = repo.checkouts();
    let plan = WorkspacePlan {
        commit: host_repository.head().unwrap().commit,
        depth: None,
        dirty: false,
    };
    let timed = |what: &str, work: &mut dyn FnMut()| {
        let (start, used) = (Instant::now(), processor());
        work();
        let (wall, used) = (start.elapsed().as_secs_f64() * 1000.0, processor() - used);
        println!("{what}: {wall:.1} ms ({used:.1} ms of processor time)");
    };
    timed("first checkout", &mut || {
        drop(checkouts.get(&host_repository, plan.commit).unwrap());
    });
    timed("first workspace, packing and copying", &mut || {
        let slug = Slug::from_name("first").unwrap();
        let dir = repo.temp.path().join("first");
        checkouts
            .create_workspace(&host_repository, &plan, &slug, &dir, None)
            .unwrap();
    });
    timed("preparing a spare, copying", &mut || {
        checkouts
            .prepare_spare(&host_repository, &plan, None)
            .unwrap();
    });
    if std::os::unix::fs::MetadataExt::uid(&std::fs::metadata(&repo.dir).unwrap()) == 0 {
        let owner = Some((1_073_742_824, 1_073_742_824));
        let slug = Slug::from_name("owned").unwrap();
        for (what, dir) in [
            (
                "workspace from the spare, with a changed owner",
                "changed-owner",
            ),
            ("workspace copied for an owner", "copied"),
        ] {
            let dir = repo.temp.path().join(dir);
            timed(what, &mut || {
                checkouts
                    .create_workspace(&host_repository, &plan, &slug, &dir, owner)
                    .unwrap();
            });
        }
        checkouts
            .prepare_spare(&host_repository, &plan, None)
            .unwrap();
    }
    let mut sandbox = None;
    timed("branch and workspace from the spare", &mut || {
        sandbox = Some(repo.sandbox("fix"));
    });
    let mut fixture = sandbox.unwrap();
    let change = |fixture: &crate::repo::SandboxFixture, text: &str| {
        for number in 0..22 {
            let number = number * (files / 22);
            let path = format!("d{}/e{}/f{number}.txt", number % 10, number % 100);
            fixture.write(&path, text);
        }
    };
    for round in 0..3 {
        timed("snapshot, nothing changed", &mut || {
            drop(fixture.snapshot("none"));
        });
        change(&fixture, &format!("changed {round}\n"));
        timed(&format!("snapshot, 22 of {files} changed"), &mut || {
            assert!(fixture.snapshot("some").moved);
        });
    }
    for round in 0..5 {
        timed("snapshot by the worker, nothing changed", &mut || {
            assert!(!crate::worker::snapshot(&repo, &fixture, None).moved);
        });
        change(&fixture, &format!("changed by the worker {round}\n"));
        timed(
            &format!("snapshot by the worker, 22 of {files} changed"),
            &mut || {
                assert!(crate::worker::snapshot(&repo, &fixture, None).moved);
            },
        );
    }
    timed("diff", &mut || {
        drop(
            fixture
                .host_repository
                .diff(&fixture.slug, usize::MAX)
                .unwrap(),
        );
    });
    timed("merge", &mut || {
        let merged = fixture.host_repository.merge(
            &fixture.slug,
            sandbox::git::merge::MergeMode::Auto,
            None,
        );
        assert!(merged.unwrap().moved);
    });
    assert_eq!(git(&repo.dir, &["status", "--porcelain"]), "");
}
