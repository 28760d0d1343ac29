//! A crash in the middle of a landing, and what the next one makes of it.

use std::path::Path;
use std::process::{Command, Stdio};

use sandbox::git::error::GitError;
use sandbox::git::home::Home;
use sandbox::git::merge::Manner;
use sandbox::name::Slug;

use crate::repo::{Place, Repo, git};

const FILES: usize = 240;

/// Not a test of its own: the process that is killed.
#[test]
fn landing_in_a_process_of_its_own() {
    let Some(dir) = std::env::var_os("PALISADE_LAND_IN") else {
        return;
    };
    let home = Home::discover(Path::new(&dir)).unwrap();
    let slug = Slug::from_name("fix").unwrap();
    match std::env::var("PALISADE_LAND").unwrap().as_str() {
        "merge" => drop(home.merge(&slug, Manner::Merge, None).unwrap()),
        "apply" => drop(home.apply(&slug).unwrap()),
        _ => drop(home.checkout(&slug).unwrap()),
    }
}

fn worked() -> (Repo, Place) {
    let repo = Repo::with_files();
    for number in 0..FILES {
        repo.write(&format!("d{}/f{number}", number % 40), "old\n");
    }
    repo.commit("many");
    let mut place = repo.sandbox("fix");
    for number in 0..FILES {
        match number % 3 {
            0 => place.write(&format!("d{}/f{number}", number % 40), "new\n"),
            1 => place.write(&format!("n{}/f{number}", number % 40), "new\n"),
            _ => {
                std::fs::remove_file(place.dir.join(format!("d{}/f{number}", number % 40)))
                    .unwrap();
            }
        }
    }
    place.snapshot("work");
    (repo, place)
}

fn stages(repo: &Repo) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(&repo.dir).unwrap();
    entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            let name = path.file_name().unwrap().to_string_lossy();
            name.starts_with(".palisade-landing-")
        })
        .collect()
}

fn journals(repo: &Repo) -> usize {
    let entries = std::fs::read_dir(repo.dir.join(".git")).unwrap();
    entries
        .filter(|entry| {
            let name = entry.as_ref().unwrap().file_name();
            name.to_string_lossy().starts_with("palisade-")
        })
        .count()
}

/// Whether every file is as the sandbox has it.
fn has_arrived(repo: &Repo) -> bool {
    let read = |path: String| std::fs::read_to_string(repo.dir.join(path)).ok();
    (0..FILES).all(|number| {
        let changed = read(format!("d{}/f{number}", number % 40));
        let added = read(format!("n{}/f{number}", number % 40));
        match number % 3 {
            0 => changed.as_deref() == Some("new\n"),
            1 => added.as_deref() == Some("new\n"),
            _ => changed.is_none(),
        }
    })
}

/// Starts a landing and kills it when `seen` is in its stage. Whether it was killed in time.
fn crash(repo: &Repo, how: &str, seen: &str) -> bool {
    // Slower than its killer, where both want the processor.
    let mut child = Command::new("nice")
        .args(["-n", "19"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "recovery::landing_in_a_process_of_its_own"])
        .env("PALISADE_LAND_IN", &repo.dir)
        .env("PALISADE_LAND", how)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    loop {
        let here = stages(repo)
            .iter()
            .any(|stage| stage.join(seen).symlink_metadata().is_ok());
        if here {
            child.kill().unwrap();
            child.wait().unwrap();
            return !stages(repo).is_empty();
        }
        if child.try_wait().unwrap().is_some() {
            return false;
        }
    }
}

#[test]
fn a_landing_that_was_killed_is_taken_back_or_is_complete() {
    let mut caught = 0;
    for (how, seen) in [
        ("merge", "old-10"),
        ("apply", "old-10"),
        ("checkout", "old-10"),
        ("merge", "new-3"),
    ] {
        let (repo, place) = worked();
        let head = repo.rev("HEAD");
        if !crash(&repo, how, seen) {
            // It was quicker than we, and is complete but for its journal at most.
            place.home.recover().unwrap();
            assert!(has_arrived(&repo), "{how}");
            assert_eq!(journals(&repo), 0, "{how}");
            continue;
        }
        caught += 1;
        let said = place.home.recover().unwrap();
        assert!(said.len() <= 1, "{said:?}");
        assert_eq!((stages(&repo).len(), journals(&repo)), (0, 0), "{how}");
        assert!(!repo.dir.join(".git/index.lock").exists(), "{how}");
        let taken_back = match said.first() {
            Some(said) => said.contains("as they were"),
            // Nothing had moved, or only the cleaning was left: the repository says which.
            None => {
                repo.rev("HEAD") == head && git(&repo.dir, &["status", "--porcelain"]).is_empty()
            }
        };
        assert!(taken_back || has_arrived(&repo), "{how} {said:?}");
        if taken_back {
            assert_eq!(repo.rev("HEAD"), head);
            assert_eq!(
                git(&repo.dir, &["status", "--porcelain"]),
                "",
                "{how} {said:?}"
            );
            assert!(
                place
                    .home
                    .merge(&place.slug, Manner::Auto, None)
                    .unwrap()
                    .moved
            );
        }
        if how != "apply" || taken_back {
            assert_eq!(
                git(&repo.dir, &["status", "--porcelain"]),
                "",
                "{how} {said:?}"
            );
        }
        assert_eq!(place.home.recover().unwrap(), [""; 0]);
        println!("{how} killed at {seen}: {said:?}");
    }
    assert!(caught > 0, "every landing was quicker than its killer");
}

#[test]
fn what_the_operator_changed_since_is_not_overwritten() {
    let (repo, place) = worked();
    if !crash(&repo, "merge", "old-20") {
        return;
    }
    let stage = stages(&repo).remove(0);
    // A file that had been moved away is there again, with other words. One that the sandbox
    // has too, and so is only gone for a moment.
    let gone = (0..FILES)
        .step_by(3)
        .map(|number| format!("d{}/f{number}", number % 40))
        .find(|path| !repo.dir.join(path).exists());
    let Some(gone) = gone else {
        return;
    };
    repo.write(&gone, "the operator's own\n");
    let error = place
        .home
        .merge(&place.slug, Manner::Auto, None)
        .unwrap_err();
    assert!(matches!(error, GitError::Interrupted { .. }), "{error}");
    assert!(
        error.to_string().contains(&stage.display().to_string()),
        "{error}"
    );
    let text = std::fs::read_to_string(repo.dir.join(&gone)).unwrap();
    assert_eq!(text, "the operator's own\n");
    std::fs::remove_file(repo.dir.join(&gone)).unwrap();
    assert!(
        place
            .home
            .merge(&place.slug, Manner::Auto, None)
            .unwrap()
            .moved
    );
    assert_eq!(git(&repo.dir, &["status", "--porcelain"]), "");
}

#[test]
fn a_lock_and_a_directory_that_are_not_ours_are_left_alone() {
    let (repo, place) = worked();
    let lock = repo.dir.join(".git/index.lock");
    std::fs::write(&lock, "").unwrap();
    let error = place
        .home
        .merge(&place.slug, Manner::Auto, None)
        .unwrap_err();
    let said = error.to_string();
    assert!(
        said.contains("if none is running") && said.contains("index.lock"),
        "{said}"
    );
    assert!(lock.exists());
    assert_eq!(git(&repo.dir, &["diff", "--stat"]), "");
    std::fs::remove_file(&lock).unwrap();
    // As an agent could have committed it.
    repo.write(".palisade-landing-1-1/old-0", "mine");
    repo.write(".palisade-landing-1-1/ready", "");
    assert!(
        place
            .home
            .merge(&place.slug, Manner::Auto, None)
            .unwrap()
            .moved
    );
    assert!(repo.dir.join(".palisade-landing-1-1/old-0").exists());
}
