//! `--dirty`: the operator's uncommitted changes are copied as uncommitted changes.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use sandbox::git::error::GitError;
use sandbox::git::workspace::WorkspacePlan;
use sandbox::name::Slug;

use crate::repo::{Repo, SandboxFixture, fingerprint, git, write};

fn try_dirty(repo: &Repo, name: &str) -> Result<SandboxFixture, GitError> {
    let host_repository = repo.host_repository();
    let slug = Slug::from_name(name).unwrap();
    let plan = WorkspacePlan {
        commit: host_repository.head().unwrap().commit,
        depth: None,
        dirty: true,
    };
    host_repository
        .create_branch(&slug, plan.commit, "made")
        .unwrap();
    let dir: PathBuf = repo.temp.path().join(format!("workspace-{name}"));
    let made = repo
        .checkouts()
        .create_workspace(&host_repository, &plan, &slug, &dir, None);
    made.map(|manifest| SandboxFixture {
        host_repository,
        slug,
        dir,
        manifest,
    })
}

fn dirty(repo: &Repo, name: &str) -> SandboxFixture {
    try_dirty(repo, name).unwrap()
}

#[test]
fn every_kind_of_change_is_copied_as_uncommitted() {
    let repo = Repo::with_files();
    repo.write("dir/inner", "1\n");
    repo.write("file", "1\n");
    repo.commit("more");
    repo.write("README.md", "changed\n");
    std::fs::remove_file(repo.dir.join("src/lib.rs")).unwrap();
    repo.write("staged", "staged\n");
    git(&repo.dir, &["add", "staged"]);
    repo.write("deep/er/untracked", "new\n");
    repo.write("ignored.log", "secret\n");
    repo.write("forced.log", "forced\n");
    git(&repo.dir, &["add", "-f", "forced.log"]);
    std::os::unix::fs::symlink("/etc/passwd", repo.dir.join("out")).unwrap();
    let mode = std::fs::Permissions::from_mode(0o644);
    std::fs::set_permissions(repo.dir.join("run.sh"), mode).unwrap();
    // A directory becomes a link, a file becomes a directory.
    let kept = repo.temp.path().join("kept");
    std::fs::create_dir(&kept).unwrap();
    std::fs::write(kept.join("inner"), "mine").unwrap();
    std::fs::remove_dir_all(repo.dir.join("dir")).unwrap();
    std::os::unix::fs::symlink(&kept, repo.dir.join("dir")).unwrap();
    std::fs::remove_file(repo.dir.join("file")).unwrap();
    repo.write("file/below", "2\n");

    let shown = |dir| git(dir, &["status", "--porcelain", "-uall", "--no-renames"]);
    let before = fingerprint(&repo.dir);
    let mut fixture = dirty(&repo, "fix");
    let after = fingerprint(&repo.dir);
    for path in [".git/index", ".git/HEAD", "README.md", "dir", "staged"] {
        let path = std::path::Path::new(path);
        assert_eq!(before.get(path), after.get(path), "{path:?}");
    }
    assert_eq!(std::fs::read(kept.join("inner")).unwrap(), b"mine");
    let inside = shown(&fixture.dir);
    assert_eq!(
        inside,
        " M README.md\n D dir/inner\n D file\n M run.sh\n D src/lib.rs\n\
         ?? deep/er/untracked\n?? dir\n?? file/below\n?? out\n?? staged"
    );
    assert!(!fixture.dir.join("ignored.log").exists());
    assert!(fixture.dir.join("forced.log").exists());
    assert!(!fixture.dir.join("src/lib.rs").exists());
    let link = std::fs::read_link(fixture.dir.join("out")).unwrap();
    assert_eq!(link, std::path::Path::new("/etc/passwd"));
    assert_eq!(repo.rev("palisade/fix"), repo.rev("HEAD"));
    assert!(fixture.snapshot("work").moved);
    assert_eq!(
        git(&repo.dir, &["show", "palisade/fix:README.md"]),
        "changed"
    );
    git(&fixture.dir, &["fsck", "--strict"]);
}

#[test]
fn clean_worktree_copies_nothing_also_with_a_spare() {
    let repo = Repo::with_files();
    let host_repository = repo.host_repository();
    let plan = WorkspacePlan {
        commit: repo.rev("HEAD"),
        depth: None,
        dirty: false,
    };
    let clean = dirty(&repo, "clean");
    assert_eq!(git(&clean.dir, &["status", "--porcelain"]), "");
    repo.checkouts()
        .prepare_spare(&host_repository, &plan, None)
        .unwrap();
    repo.write("README.md", "changed\n");
    let fixture = dirty(&repo, "spare");
    assert_eq!(
        git(&fixture.dir, &["status", "--porcelain"]),
        " M README.md"
    );
}

#[test]
fn paths_hidden_from_git_are_not_copied() {
    let repo = Repo::with_files();
    let everywhere = repo.temp.path().join("everywhere");
    std::fs::write(&everywhere, ".env\n").unwrap();
    let everywhere = everywhere.to_str().unwrap();
    git(&repo.dir, &["config", "core.excludesFile", everywhere]);
    write(&repo.dir, ".git/info/exclude", "/private/\n");
    repo.write(".env", "KEY=secret\n");
    repo.write("sub/.env", "KEY=secret\n");
    repo.write("private/notes", "secret\n");
    // A path marked assume-unchanged.
    git(
        &repo.dir,
        &["update-index", "--assume-unchanged", "README.md"],
    );
    repo.write("README.md", "secret\n");
    git(
        &repo.dir,
        &["update-index", "--skip-worktree", "src/lib.rs"],
    );
    std::fs::remove_file(repo.dir.join("src/lib.rs")).unwrap();
    // A path that was tracked once and is ignored now.
    git(&repo.dir, &["rm", "-q", "--cached", "src/main.rs"]);
    repo.write("src/main.rs", "secret\n");
    repo.write(".gitignore", "src/main.rs\n");
    // A nested repository.
    std::fs::create_dir(repo.dir.join("other")).unwrap();
    git(&repo.dir.join("other"), &["init", "-q"]);
    repo.write("other/-before-dot-git", "secret\n");
    repo.write("other/zz", "secret\n");
    repo.write("visible", "x");
    let fixture = dirty(&repo, "fix");
    assert_eq!(
        git(&fixture.dir, &["status", "--porcelain", "-uall"]),
        " M .gitignore\n D src/main.rs\n?? visible"
    );
}

#[test]
fn changes_over_the_bound_are_refused_and_nothing_is_left() {
    let repo = Repo::with_files();
    let large = std::fs::File::create(repo.dir.join("large")).unwrap();
    large.set_len((64 << 20) + 1).unwrap();
    let error = try_dirty(&repo, "fix").err().unwrap();
    assert!(matches!(error, GitError::TooMuch { .. }), "{error}");
    assert!(!repo.temp.path().join("workspace-fix").exists());
}

#[test]
fn changes_in_submodule_and_linked_worktree_are_copied() {
    let library = Repo::with_files();
    let repo = Repo::with_files();
    let url = library.dir.to_str().unwrap();
    let add = [
        "-c",
        "protocol.file.allow=always",
        "submodule",
        "add",
        "-q",
        url,
        "lib",
    ];
    git(&repo.dir, &add);
    repo.commit("with a submodule");
    repo.write("lib/README.md", "changed in the submodule\n");
    repo.write("README.md", "changed\n");
    let fixture = dirty(&repo, "fix");
    assert_eq!(
        git(&fixture.dir, &["status", "--porcelain"]),
        " M README.md"
    );
    let linked = repo.temp.path().join("linked");
    git(
        &repo.dir,
        &["worktree", "add", "-q", linked.to_str().unwrap()],
    );
    write(&linked, "only-here", "x");
    let there = Repo {
        temp: tempfile::tempdir().unwrap(),
        dir: linked,
    };
    let fixture = dirty(&there, "other");
    assert_eq!(
        git(&fixture.dir, &["status", "--porcelain"]),
        "?? only-here"
    );
}
