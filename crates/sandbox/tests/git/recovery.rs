//! Recovery from a crash in the middle of a merge, an apply or a checkout.

use std::path::Path;
use std::process::{Command, Stdio};

use sandbox::git::error::GitError;
use sandbox::git::host_repository::HostRepository;
use sandbox::git::merge::MergeMode;
use sandbox::name::Slug;

use crate::repo::{Repo, SandboxFixture, git};

const FILES: usize = 240;

/// Not a test: this is the process that is killed.
#[test]
fn worktree_update_in_a_child_process() {
    let Some(dir) = std::env::var_os("PALISADE_LAND_IN") else {
        return;
    };
    let host_repository = HostRepository::discover(Path::new(&dir)).unwrap();
    let slug = Slug::from_name("fix").unwrap();
    match std::env::var("PALISADE_LAND").unwrap().as_str() {
        "merge" => drop(
            host_repository
                .merge(&slug, MergeMode::Merge, None)
                .unwrap(),
        ),
        "apply" => drop(host_repository.apply(&slug).unwrap()),
        _ => drop(host_repository.checkout(&slug).unwrap()),
    }
}

fn repository_with_work() -> (Repo, SandboxFixture) {
    let repo = Repo::with_files();
    for number in 0..FILES {
        repo.write(&format!("d{}/f{number}", number % 40), "old\n");
    }
    repo.commit("many");
    let mut fixture = repo.sandbox("fix");
    for number in 0..FILES {
        match number % 3 {
            0 => fixture.write(&format!("d{}/f{number}", number % 40), "new\n"),
            1 => fixture.write(&format!("n{}/f{number}", number % 40), "new\n"),
            _ => {
                std::fs::remove_file(fixture.dir.join(format!("d{}/f{number}", number % 40)))
                    .unwrap();
            }
        }
    }
    fixture.snapshot("work");
    (repo, fixture)
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

/// Whether every file is as in the sandbox.
fn is_complete(repo: &Repo) -> bool {
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

/// Starts an update and kills it when `trigger` appears in its staging directory. Returns whether
/// it was killed in time.
fn kill_during_update(repo: &Repo, operation: &str, trigger: &str) -> bool {
    // The child gets a lower priority than this process.
    let mut child = Command::new("nice")
        .args(["-n", "19"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "recovery::worktree_update_in_a_child_process"])
        .env("PALISADE_LAND_IN", &repo.dir)
        .env("PALISADE_LAND", operation)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    loop {
        let has_trigger = stages(repo)
            .iter()
            .any(|stage| stage.join(trigger).symlink_metadata().is_ok());
        if has_trigger {
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
fn killed_update_is_rolled_back_or_complete() {
    let mut killed = 0;
    for (operation, trigger) in [
        ("merge", "old-10"),
        ("apply", "old-10"),
        ("checkout", "old-10"),
        ("merge", "new-3"),
    ] {
        let (repo, fixture) = repository_with_work();
        let head = repo.rev("HEAD");
        if !kill_during_update(&repo, operation, trigger) {
            // The update finished before the kill; at most its journal is left.
            fixture.host_repository.recover().unwrap();
            assert!(is_complete(&repo), "{operation}");
            assert_eq!(journals(&repo), 0, "{operation}");
            continue;
        }
        killed += 1;
        let printed = fixture.host_repository.recover().unwrap();
        assert!(printed.len() <= 1, "{printed:?}");
        assert_eq!(
            (stages(&repo).len(), journals(&repo)),
            (0, 0),
            "{operation}"
        );
        assert!(!repo.dir.join(".git/index.lock").exists(), "{operation}");
        let rolled_back = match printed.first() {
            Some(printed) => printed.contains("as they were"),
            // No file had moved, or only the clean-up was left: the repository shows which.
            None => {
                repo.rev("HEAD") == head && git(&repo.dir, &["status", "--porcelain"]).is_empty()
            }
        };
        assert!(rolled_back || is_complete(&repo), "{operation} {printed:?}");
        if rolled_back {
            assert_eq!(repo.rev("HEAD"), head);
            assert_eq!(
                git(&repo.dir, &["status", "--porcelain"]),
                "",
                "{operation} {printed:?}"
            );
            assert!(
                fixture
                    .host_repository
                    .merge(&fixture.slug, MergeMode::Auto, None)
                    .unwrap()
                    .moved
            );
        }
        if operation != "apply" || rolled_back {
            assert_eq!(
                git(&repo.dir, &["status", "--porcelain"]),
                "",
                "{operation} {printed:?}"
            );
        }
        assert_eq!(fixture.host_repository.recover().unwrap(), [""; 0]);
        println!("{operation} killed at {trigger}: {printed:?}");
    }
    assert!(killed > 0, "every update finished before it was killed");
}

#[test]
fn recovery_keeps_changes_made_after_the_crash() {
    let (repo, fixture) = repository_with_work();
    if !kill_during_update(&repo, "merge", "old-20") {
        return;
    }
    let stage = stages(&repo).remove(0);
    // The operator writes a file again that the update had moved away, one that exists in the
    // sandbox too.
    let gone = (0..FILES)
        .step_by(3)
        .map(|number| format!("d{}/f{number}", number % 40))
        .find(|path| !repo.dir.join(path).exists());
    let Some(gone) = gone else {
        return;
    };
    repo.write(&gone, "the operator's own\n");
    let error = fixture
        .host_repository
        .merge(&fixture.slug, MergeMode::Auto, None)
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
        fixture
            .host_repository
            .merge(&fixture.slug, MergeMode::Auto, None)
            .unwrap()
            .moved
    );
    assert_eq!(git(&repo.dir, &["status", "--porcelain"]), "");
}

#[test]
fn foreign_lock_and_staging_directory_are_left_alone() {
    let (repo, fixture) = repository_with_work();
    let lock = repo.dir.join(".git/index.lock");
    std::fs::write(&lock, "").unwrap();
    let error = fixture
        .host_repository
        .merge(&fixture.slug, MergeMode::Auto, None)
        .unwrap_err();
    let printed = error.to_string();
    assert!(
        printed.contains("if none is running") && printed.contains("index.lock"),
        "{printed}"
    );
    assert!(lock.exists());
    assert_eq!(git(&repo.dir, &["diff", "--stat"]), "");
    std::fs::remove_file(&lock).unwrap();
    // A directory that an agent could have committed.
    repo.write(".palisade-landing-1-1/old-0", "mine");
    repo.write(".palisade-landing-1-1/ready", "");
    assert!(
        fixture
            .host_repository
            .merge(&fixture.slug, MergeMode::Auto, None)
            .unwrap()
            .moved
    );
    assert!(repo.dir.join(".palisade-landing-1-1/old-0").exists());
}
