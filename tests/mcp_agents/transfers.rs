//! Files between the operator's worktree and a sandbox.

use std::os::unix::fs::symlink;

use crate::agent_fixture::AgentFixture;

#[test]
fn transfers_refuse_symlinks_out_of_the_repository_and_existing_files() {
    let fixture = AgentFixture::new();
    let repo = &fixture.repo;
    repo.write("untracked/a.bin", [0, 255, 10, 0]);
    repo.write("untracked/deep/b", "b");
    repo.write("untracked/deep/.git/config", "secret");
    repo.write("big.log", "ignored\n");
    let outside = fixture.gate_dir.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    std::fs::write(outside.join("a"), "outside").unwrap();
    symlink(outside.join("a"), repo.path("link")).unwrap();
    symlink(&outside, repo.path("linked")).unwrap();
    let readme = repo.read("README.md");
    fixture.run_client(
        "transfers",
        "auto",
        &["upload escapes", "upload", "download escapes", "download"],
    );
    assert_eq!(repo.read("README.md"), readme);
    assert_eq!(repo.read("results/here/made/a.txt"), "made\n");
    assert!(!repo.path("results/here/made/.git").exists());
    assert!(
        repo.path("results/here/made/etc")
            .symlink_metadata()
            .is_err()
    );
    assert!(!repo.path(".vscode").exists());
    let entries: Vec<_> = std::fs::read_dir(&outside).unwrap().collect();
    assert_eq!(entries.len(), 1, "{entries:?}");
    assert_eq!(
        fixture.commit_messages("palisade/files")[0],
        "upload: untracked"
    );
}
