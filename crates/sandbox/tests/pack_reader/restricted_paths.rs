//! Changes to restricted paths in a push.

use policy::push::{PushContext, RestrictedPathChange};
use sandbox::pack_reader::PackFile;

use crate::fixture::{Repo, id, pack_reader};

const WORKFLOW: &str = ".github/workflows/ci.yml";

async fn restricted_in(
    context: &PushContext,
    pack: PackFile,
    bases: Vec<PackFile>,
) -> RestrictedPathChange {
    let found = pack_reader().read(context, Some(pack), bases).await;
    found.unwrap().restricted
}

/// The upstream repository, with one commit that has a workflow.
fn upstream() -> (Repo, String) {
    let repo = Repo::new();
    repo.write(WORKFLOW, "on: push\n");
    repo.write("README.md", "x\n");
    let tip = repo.commit("upstream");
    (repo, tip)
}

/// The result of pushing HEAD as a new branch, with upstream's default branch at `tip` as a base.
async fn new_branch(repo: &Repo, tip: &str) -> RestrictedPathChange {
    let mut context = repo.context(&repo.rev("HEAD"));
    context.default_tip = Some(id(tip));
    let pack = repo.pack(&["HEAD", &format!("^{tip}")]);
    restricted_in(&context, pack, vec![repo.base(tip)]).await
}

#[tokio::test]
async fn change_to_other_files_leaves_paths_untouched() {
    let (repo, tip) = upstream();
    repo.write("README.md", "y\n");
    repo.write(".github/CODEOWNERS", "* @nobody\n");
    repo.commit("work");
    assert_eq!(
        new_branch(&repo, &tip).await,
        RestrictedPathChange::Untouched
    );
}

#[tokio::test]
async fn workflow_edit_addition_or_removal_is_a_change() {
    for (path, text) in [
        (WORKFLOW, Some("on: pull_request_target\n")),
        (".github/workflows/new.yml", Some("on: push\n")),
        (".github/actions/a/action.yml", Some("x\n")),
        (WORKFLOW, None),
        (".GitHub/workflows/new.yml", Some("x\n")),
        (".github/WORKFLOWS/new.yml", Some("x\n")),
        (".g\u{200c}ithub/workflows/x.yml", Some("x\n")),
        ("GITHUB~1/workflows/x.yml", Some("x\n")),
        (".github./actions/x/action.yml", Some("x\n")),
    ] {
        let (repo, tip) = upstream();
        match text {
            Some(text) => repo.write(path, text),
            None => std::fs::remove_file(repo.dir().join(path)).unwrap(),
        }
        repo.commit("work");
        assert_eq!(
            new_branch(&repo, &tip).await,
            RestrictedPathChange::Changed,
            "{path}"
        );
    }
    // The directory becomes a symbolic link to another.
    let (repo, tip) = upstream();
    std::fs::rename(repo.dir().join(".github"), repo.dir().join("elsewhere")).unwrap();
    std::os::unix::fs::symlink("elsewhere", repo.dir().join(".github")).unwrap();
    repo.commit("work");
    assert_eq!(new_branch(&repo, &tip).await, RestrictedPathChange::Changed);
}

#[tokio::test]
async fn change_reverted_within_the_push_is_a_change() {
    let (repo, tip) = upstream();
    repo.write(WORKFLOW, "on: evil\n");
    repo.commit("change");
    repo.write(WORKFLOW, "on: push\n");
    repo.commit("undo");
    assert_eq!(new_branch(&repo, &tip).await, RestrictedPathChange::Changed);
}

#[tokio::test]
async fn change_on_side_parent_or_unreachable_commit_is_a_change() {
    let (repo, tip) = upstream();
    repo.git(&["checkout", "-q", "-b", "side"]);
    repo.write(WORKFLOW, "on: evil\n");
    let evil = repo.commit("side");
    repo.git(&["checkout", "-q", "main"]);
    repo.write("README.md", "y\n");
    let work = repo.commit("work");
    let mut context = repo.context(&work);
    context.default_tip = Some(id(&tip));
    // The pack has the commit, but no ref of the push leads to it.
    let pack = repo.pack(&[&work, &evil, &format!("^{tip}")]);
    assert_eq!(
        restricted_in(&context, pack, vec![repo.base(&tip)]).await,
        RestrictedPathChange::Changed
    );
    // The commit is a parent of a merge that does not take its files.
    repo.git(&["merge", "-q", "-s", "ours", "-m", "merge", "side"]);
    assert_eq!(new_branch(&repo, &tip).await, RestrictedPathChange::Changed);
}

#[tokio::test]
async fn branch_from_older_upstream_or_merge_of_newer_is_untouched() {
    let (repo, old) = upstream();
    repo.git(&["checkout", "-q", "-b", "work"]);
    repo.write("README.md", "work\n");
    repo.commit("work");
    repo.git(&["checkout", "-q", "main"]);
    repo.write(WORKFLOW, "on: newer\n");
    let newer = repo.commit("upstream changes its workflow");
    repo.git(&["checkout", "-q", "work"]);
    // The older commit is in upstream's history, which the base pack has.
    assert_eq!(
        new_branch(&repo, &newer).await,
        RestrictedPathChange::Untouched
    );
    repo.git(&["merge", "-q", "-m", "merge", "main"]);
    assert_eq!(
        new_branch(&repo, &newer).await,
        RestrictedPathChange::Untouched
    );
    // A merge that keeps the older side's workflow undoes upstream's change.
    repo.git(&["reset", "-q", "--hard", "HEAD~1"]);
    repo.git(&["merge", "-q", "-s", "ours", "-m", "merge", "main"]);
    assert_eq!(
        new_branch(&repo, &newer).await,
        RestrictedPathChange::Changed
    );
    // Copying upstream's newer version without merging changes nothing.
    repo.git(&["reset", "-q", "--hard", &old]);
    repo.write(WORKFLOW, "on: newer\n");
    repo.commit("as upstream");
    assert_eq!(
        new_branch(&repo, &newer).await,
        RestrictedPathChange::Untouched
    );
}

#[tokio::test]
async fn restricted_path_without_upstreams_trees_is_unknown() {
    let (repo, tip) = upstream();
    repo.write("README.md", "y\n");
    let work = repo.commit("work");
    let pack = || repo.pack(&[&work, &format!("^{tip}")]);
    let context = repo.context_from(&tip, &work);
    assert_eq!(
        restricted_in(&context, pack(), Vec::new()).await,
        RestrictedPathChange::Unknown
    );
    assert_eq!(
        restricted_in(&context, pack(), vec![repo.base(&tip)]).await,
        RestrictedPathChange::Untouched
    );
    let mut free = context.clone();
    free.restricted = Vec::new();
    assert_eq!(
        restricted_in(&free, pack(), Vec::new()).await,
        RestrictedPathChange::Untouched
    );
    // A push of a whole new repository with a workflow.
    let context = repo.context(&tip);
    assert_eq!(
        restricted_in(&context, repo.pack(&[&tip]), Vec::new()).await,
        RestrictedPathChange::Unknown
    );
}

#[tokio::test]
async fn push_without_restricted_paths_needs_no_bases() {
    let repo = Repo::new();
    let first = repo.commit("first");
    repo.write("a", "x");
    let second = repo.commit("second");
    let pack = repo.pack(&[&second, &format!("^{first}")]);
    let context = repo.context_from(&first, &second);
    assert_eq!(
        restricted_in(&context, pack, Vec::new()).await,
        RestrictedPathChange::Untouched
    );
}

#[tokio::test]
async fn commit_that_is_in_no_pack_is_unknown() {
    let (repo, tip) = upstream();
    repo.write(WORKFLOW, "on: evil\n");
    let elsewhere = repo.commit("of a fork that shares the forge's store");
    let empty = || repo.pack(&["HEAD", "^HEAD"]);
    let mut context = repo.context(&elsewhere);
    context.default_tip = Some(id(&tip));
    let bases = || vec![repo.base(&tip)];
    assert_eq!(
        restricted_in(&context, empty(), bases()).await,
        RestrictedPathChange::Unknown
    );
    // Upstream's own tip is untouched, even without its trees.
    let mut context = repo.context(&tip);
    context.default_tip = Some(id(&tip));
    assert_eq!(
        restricted_in(&context, empty(), bases()).await,
        RestrictedPathChange::Untouched
    );
    assert_eq!(
        restricted_in(&context, empty(), Vec::new()).await,
        RestrictedPathChange::Untouched
    );
    // An `old` id that comes with the push's own pack is not upstream's.
    repo.git(&["commit", "-q", "--amend", "-m", "evil"]);
    let evil = repo.rev("HEAD");
    let context = repo.context_from(&evil, &evil);
    let pack = repo.pack(&[&evil, &format!("^{tip}")]);
    assert_eq!(
        restricted_in(&context, pack, bases()).await,
        RestrictedPathChange::Changed
    );
}

#[tokio::test]
async fn tag_is_compared_by_its_target() {
    let (repo, tip) = upstream();
    repo.write("README.md", "y\n");
    repo.commit("work");
    repo.git(&["tag", "-a", "-m", "x", "v1"]);
    repo.git(&["tag", "-a", "-m", "y", "v2", "v1"]);
    let mut context = repo.context(&repo.rev("v2"));
    context.default_tip = Some(id(&tip));
    let pack = repo.pack(&["v2", &format!("^{tip}")]);
    assert_eq!(
        restricted_in(&context, pack, vec![repo.base(&tip)]).await,
        RestrictedPathChange::Untouched
    );
}
