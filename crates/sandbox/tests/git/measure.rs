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
    let linked = repo.temp.path().join("linked");
    timed("git worktree add", &mut || {
        git(
            &repo.dir,
            &["worktree", "add", "-q", linked.to_str().unwrap()],
        );
    });
    timed("first checkout", &mut || {
        drop(checkouts.get(&home, plan.commit).unwrap());
    });
    let workspace = |name: &str| {
        let slug = Slug::from_name(name).unwrap();
        let dir = repo.temp.path().join(name);
        checkouts
            .create_workspace(&home, &slug, &plan, &dir)
            .unwrap();
    };
    timed("first workspace, with packing", &mut || workspace("w1"));
    timed("second workspace, by copy", &mut || workspace("w2"));
    timed("git clone --local --no-hardlinks", &mut || {
        let to = repo.temp.path().join("clone");
        git(
            &repo.dir,
            &["clone", "-q", "--no-hardlinks", ".", to.to_str().unwrap()],
        );
    });
    timed("preparing a spare", &mut || {
        checkouts.prepare_spare(&home, &plan).unwrap();
    });
    timed("third workspace, from the spare", &mut || workspace("w3"));

    let mut place = repo.sandbox("fix");
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
