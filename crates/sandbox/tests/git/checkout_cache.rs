//! The checkout cache, spare workspaces and the workspace's own repository.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use sandbox::git::checkout_cache::CheckoutCache;
use sandbox::git::error::GitError;
use sandbox::git::workspace::WorkspacePlan;
use sandbox::name::Slug;

use crate::repo::{Repo, fingerprint, git};

#[test]
fn a_workspace_is_a_clean_clone_on_its_branch() {
    let repo = Repo::with_files();
    git(
        &repo.dir,
        &[
            "remote",
            "add",
            "origin",
            "https://me:secret@git.example/a/b.git",
        ],
    );
    git(&repo.dir, &["branch", "private"]);
    let before = fingerprint(&repo.dir);
    let fixture = repo.sandbox("fix");
    assert_eq!(git(&fixture.dir, &["status", "--porcelain"]), "");
    assert_eq!(
        git(&fixture.dir, &["branch", "--show-current"]),
        "palisade/fix"
    );
    assert_eq!(git(&fixture.dir, &["rev-list", "--count", "HEAD"]), "2");
    assert_eq!(
        git(&fixture.dir, &["remote", "get-url", "origin"]),
        "https://git.example/a/b.git"
    );
    assert_eq!(
        git(&fixture.dir, &["for-each-ref", "--format=%(refname)"]),
        "refs/heads/palisade/fix"
    );
    git(&fixture.dir, &["fsck", "--strict", "--full"]);
    let link = std::fs::read_link(fixture.dir.join("link")).unwrap();
    assert_eq!(link, Path::new("README.md"));
    let mode = |path: &str| std::fs::metadata(fixture.dir.join(path)).unwrap().mode() & 0o111;
    assert_eq!((mode("run.sh"), mode("README.md")), (0o111, 0));
    for (path, bytes) in before {
        if path.ends_with("heads") || path.ends_with("refs") {
            continue;
        }
        assert_eq!(fingerprint(&repo.dir).get(&path), Some(&bytes), "{path:?}");
    }
}

#[test]
fn a_workspace_shares_no_inode_with_host_or_cache() {
    let repo = Repo::with_files();
    let fixture = repo.sandbox("fix");
    let mut inodes = std::collections::BTreeSet::new();
    let mut count = 0;
    for root in [&repo.dir, &repo.state(), &fixture.dir] {
        visit(root, &mut |metadata| {
            inodes.insert((metadata.dev(), metadata.ino()));
            count += 1;
            assert_eq!(metadata.nlink(), 1);
        });
    }
    assert_eq!(inodes.len(), count);
}

fn visit(dir: &Path, call: &mut dyn FnMut(&std::fs::Metadata)) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let metadata = std::fs::symlink_metadata(entry.path()).unwrap();
        if metadata.is_dir() {
            visit(&entry.path(), call);
        } else {
            call(&metadata);
        }
    }
}

#[test]
fn depth_limits_history() {
    let repo = Repo::with_files();
    let host_repository = repo.host_repository();
    let slug = Slug::from_name("shallow").unwrap();
    let plan = WorkspacePlan {
        commit: host_repository.head().unwrap().commit,
        depth: Some(1),
        dirty: false,
    };
    let dir = repo.temp.path().join("shallow");
    repo.checkouts()
        .create_workspace(&host_repository, &plan, &slug, &dir, None)
        .unwrap();
    assert_eq!(git(&dir, &["rev-list", "--count", "HEAD"]), "1");
    assert_eq!(git(&dir, &["status", "--porcelain"]), "");
    git(&dir, &["fsck", "--strict", "--full"]);
}

#[test]
fn spare_checkout_is_renamed_and_used_once() {
    let repo = Repo::with_files();
    let host_repository = repo.host_repository();
    let checkouts = repo.checkouts();
    let plan = WorkspacePlan {
        commit: host_repository.head().unwrap().commit,
        depth: None,
        dirty: false,
    };
    checkouts
        .prepare_spare(&host_repository, &plan, None)
        .unwrap();
    checkouts
        .prepare_spare(&host_repository, &plan, None)
        .unwrap();
    let spare = repo.state().join("spares").join(plan.commit.to_string());
    let inode = std::fs::metadata(spare.join("workspace/README.md"))
        .unwrap()
        .ino();
    for (name, from_spare) in [("one", true), ("two", false)] {
        let slug = Slug::from_name(name).unwrap();
        let dir = repo.temp.path().join(name);
        let manifest = checkouts
            .create_workspace(&host_repository, &plan, &slug, &dir, None)
            .unwrap();
        let seen = std::fs::metadata(dir.join("README.md")).unwrap().ino();
        assert_eq!(seen == inode, from_spare);
        assert_eq!(
            manifest.entries.get(b"README.md".as_slice()).unwrap().ino,
            seen
        );
        assert_eq!(git(&dir, &["status", "--porcelain"]), "");
        assert_eq!(
            git(&dir, &["branch", "--show-current"]),
            format!("palisade/{name}")
        );
        assert!(!spare.exists());
    }
}

#[test]
fn least_recently_used_checkout_is_evicted_first() {
    let repo = Repo::empty();
    let commits: Vec<_> = (0..3)
        .map(|number| {
            repo.write("file", &format!("{number}").repeat(1000));
            repo.commit("one more")
        })
        .collect();
    let host_repository = repo.host_repository();
    let checkouts = CheckoutCache::open(&repo.state(), 2500).unwrap();
    let kept = || {
        let dir = repo.state().join("checkouts");
        commits
            .iter()
            .map(|commit| dir.join(commit.to_string()).exists())
            .collect::<Vec<_>>()
    };
    let set_last_use = |commit: usize, seconds| {
        let used = repo
            .state()
            .join("checkouts")
            .join(commits[commit].to_string())
            .join("used");
        let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
        std::fs::File::options()
            .write(true)
            .open(used)
            .unwrap()
            .set_modified(time)
            .unwrap();
    };
    checkouts.get(&host_repository, commits[0]).unwrap();
    checkouts.get(&host_repository, commits[1]).unwrap();
    set_last_use(0, 2000);
    set_last_use(1, 1000);
    checkouts.get(&host_repository, commits[2]).unwrap();
    assert_eq!(kept(), [true, false, true]);
}

#[test]
fn unfinished_directories_are_removed_after_crash_or_failure() {
    let repo = Repo::with_files();
    let left = repo.state().join("checkouts/.unfinished-1-1/tree");
    std::fs::create_dir_all(&left).unwrap();
    let checkouts = repo.checkouts();
    assert!(!left.exists());
    let host_repository = repo.host_repository();
    let slug = Slug::from_name("x").unwrap();
    let missing = git2::Oid::from_str(&"1".repeat(40)).unwrap();
    let plan = WorkspacePlan {
        commit: missing,
        depth: None,
        dirty: false,
    };
    let dir = repo.temp.path().join("never");
    assert!(
        checkouts
            .create_workspace(&host_repository, &plan, &slug, &dir, None)
            .is_err()
    );
    assert!(!dir.exists());
    let plan = WorkspacePlan {
        commit: host_repository.head().unwrap().commit,
        depth: None,
        dirty: false,
    };
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join("mine"), "x").unwrap();
    let error = checkouts
        .create_workspace(&host_repository, &plan, &slug, &dir, None)
        .unwrap_err();
    assert!(matches!(error, GitError::Io { .. }), "{error}");
    assert!(dir.join("mine").exists(), "an unrelated directory is kept");
}

#[test]
fn checkout_applies_no_filters_or_line_endings() {
    let repo = Repo::with_files();
    let canary = repo.temp.path().join("canary");
    let command = format!("touch {}; cat", canary.display());
    repo.write("crlf.txt", "a\nb\n");
    repo.write("plain.txt", "$Id$\n");
    repo.commit("text");
    repo.write(".gitattributes", "*.txt text eol=crlf filter=evil ident\n");
    git(&repo.dir, &["add", ".gitattributes"]);
    git(&repo.dir, &["commit", "-q", "-m", "attributes"]);
    git(&repo.dir, &["config", "filter.evil.smudge", &command]);
    git(&repo.dir, &["config", "filter.evil.clean", &command]);
    let fixture = repo.sandbox("fix");
    let text = std::fs::read_to_string(fixture.dir.join("crlf.txt")).unwrap();
    assert_eq!(text, "a\nb\n");
    let text = std::fs::read_to_string(fixture.dir.join("plain.txt")).unwrap();
    assert_eq!(text, "$Id$\n");
    assert!(!canary.exists());
}

#[test]
fn only_a_few_spares_are_kept() {
    let repo = Repo::empty();
    let checkouts = repo.checkouts();
    let host_repository = repo.host_repository();
    for number in 0..5 {
        repo.write("file", &number.to_string());
        let plan = WorkspacePlan {
            commit: repo.commit("one more"),
            depth: None,
            dirty: false,
        };
        checkouts
            .prepare_spare(&host_repository, &plan, None)
            .unwrap();
        assert!(
            repo.state()
                .join("spares")
                .join(plan.commit.to_string())
                .exists()
        );
    }
    assert_eq!(
        std::fs::read_dir(repo.state().join("spares"))
            .unwrap()
            .count(),
        3
    );
}

#[test]
fn workspace_is_created_only_in_an_empty_directory() {
    let repo = Repo::with_files();
    let host_repository = repo.host_repository();
    let plan = WorkspacePlan {
        commit: repo.rev("HEAD"),
        depth: None,
        dirty: false,
    };
    let slug = Slug::from_name("fix").unwrap();
    let checkouts = repo.checkouts();
    for (name, spare) in [("copied", false), ("renamed", true)] {
        if spare {
            checkouts
                .prepare_spare(&host_repository, &plan, None)
                .unwrap();
        }
        let dir = repo.temp.path().join(name);
        std::fs::create_dir(&dir).unwrap();
        checkouts
            .create_workspace(&host_repository, &plan, &slug, &dir, None)
            .unwrap();
        assert_eq!(git(&dir, &["status", "--porcelain"]), "", "{name}");
        assert_eq!(std::fs::metadata(&dir).unwrap().mode() & 0o777, 0o755);
    }
    let full = repo.temp.path().join("full");
    std::fs::create_dir(&full).unwrap();
    std::fs::write(full.join("mine"), "x").unwrap();
    let error = checkouts.create_workspace(&host_repository, &plan, &slug, &full, None);
    assert!(matches!(error, Err(GitError::Io { .. })), "{error:?}");
    assert_eq!(std::fs::read(full.join("mine")).unwrap(), b"x");
    let link = repo.temp.path().join("a-link");
    std::os::unix::fs::symlink(repo.temp.path().join("elsewhere"), &link).unwrap();
    let error = checkouts.create_workspace(&host_repository, &plan, &slug, &link, None);
    assert!(matches!(error, Err(GitError::Io { .. })), "{error:?}");
}
