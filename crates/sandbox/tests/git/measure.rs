//! Figures for a person; no assertion on time. Best with optimisation:
//! `cargo nextest run -p sandbox --cargo-profile release --no-capture measure`.

use std::time::Instant;

use sandbox::git::workspace::Plan;
use sandbox::name::Slug;

use crate::repo::{Repo, git};

#[test]
fn ten_thousand_files_measured() {
    let repo = Repo::empty();
    for number in 0..10_000 {
        let text = format!("file {number}\n").repeat(1 + number % 60);
        repo.write(
            &format!("d{}/e{}/f{number}.txt", number % 10, number % 100),
            &text,
        );
    }
    repo.commit("many");
    let home = repo.home();
    let checkouts = repo.checkouts();
    let plan = Plan {
        commit: home.head().unwrap().commit,
        depth: None,
    };
    let timed = |what: &str, work: &mut dyn FnMut()| {
        let start = Instant::now();
        work();
        println!("{what}: {:.1} ms", start.elapsed().as_secs_f64() * 1000.0);
    };
    timed("first checkout", &mut || {
        drop(checkouts.get(&home, plan.commit).unwrap());
    });
    timed("first workspace, packing and copying", &mut || {
        let slug = Slug::from_name("first").unwrap();
        let dir = repo.temp.path().join("first");
        checkouts
            .create_workspace(&home, &slug, &plan, &dir)
            .unwrap();
    });
    timed("preparing a spare, copying", &mut || {
        checkouts.prepare_spare(&home, &plan).unwrap();
    });
    let mut sandbox = None;
    timed("branch and workspace from the spare", &mut || {
        sandbox = Some(repo.sandbox("fix"));
    });
    let mut place = sandbox.unwrap();
    for round in 0..3 {
        timed("snapshot, nothing changed", &mut || {
            drop(place.snapshot("none"));
        });
        for number in 0..22 {
            let number = number * 450;
            let path = format!("d{}/e{}/f{number}.txt", number % 10, number % 100);
            place.write(&path, &format!("changed {round}\n"));
        }
        timed("snapshot, 22 of 10000 changed", &mut || {
            assert!(place.snapshot("some").moved);
        });
    }
    timed("diff", &mut || {
        drop(place.home.diff(&place.slug, usize::MAX).unwrap());
    });
    timed("merge", &mut || {
        let merged = place
            .home
            .merge(&place.slug, sandbox::git::merge::Manner::Auto, None);
        assert!(merged.unwrap().moved);
    });
    assert_eq!(git(&repo.dir, &["status", "--porcelain"]), "");
}
