//! A `.git` is skipped, and sensitive files are reported.

use super::*;

#[test]
fn repository_is_skipped_in_every_spelling_and_noted_once() {
    for name in [
        ".git",
        ".GIT",
        ".git.",
        ".git ",
        "git~1",
        "GIT~1",
        ".g\u{200c}it",
        ".git::$INDEX_ALLOCATION",
    ] {
        let (_place, target) = target_fixture();
        let summary = ArchiveBuilder::default()
            .directory(&format!("a/{name}/"))
            .file(&format!("a/{name}/config"), "[core]\n")
            .file(&format!("a/{name}/hooks/post-checkout"), "#!/bin/sh\n")
            .hard_link("a/another", &format!("a/{name}/config"))
            .file("a/file", "x")
            .unpack(&target)
            .unwrap();
        assert_eq!(list(&target.join("a")), ["file"], "{name}");
        assert_eq!(summary.files, 1, "{name}");
        assert_eq!(summary.left_out.len(), 2, "{name}: {:?}", summary.left_out);
        assert!(summary.left_out[0].contains("a '.git'"), "{name}");
        assert!(summary.left_out[1].starts_with("a/another"), "{name}");
    }
    // As a file or a link it points to a repository.
    let (_place, target) = target_fixture();
    let summary = ArchiveBuilder::default()
        .file(".git", "gitdir: elsewhere\n")
        .link("sub/.git", "../elsewhere")
        .unpack(&target)
        .unwrap();
    assert_eq!(
        (summary.files, summary.left_out.len()),
        (0, 2),
        "{summary:?}"
    );
    assert_eq!(list(&target), ["there"]);
}

#[test]
fn skipped_repositories_count_towards_bounds() {
    let (_place, target) = target_fixture();
    let large = "x".repeat(600 << 10);
    let error = ArchiveBuilder::default()
        .file(".git/one", &large)
        .file(".git/two", &large)
        .unpack(&target);
    assert_eq!(error, Err(TransferError::TooLarge(1 << 20)));
}

#[test]
fn sensitive_files_are_unpacked_and_reported() {
    let (_place, target) = target_fixture();
    let summary = ArchiveBuilder::default()
        .directory(".vscode/")
        .file(".vscode/tasks.json", "{}")
        .file("sub/.envrc", "x")
        .file("sub/AGENTS.md", "x")
        .file("sub/plain", "x")
        .unpack(&target)
        .unwrap();
    assert_eq!((summary.files, summary.left_out.len()), (4, 0));
    let named: Vec<_> = summary
        .sensitive
        .iter()
        .filter_map(|note| note.split(": ").next())
        .collect();
    assert_eq!(named, [".vscode/tasks.json", "sub/.envrc", "sub/AGENTS.md"]);
}

#[test]
fn operators_repository_is_uploaded_completely() {
    let (_place, target) = target_fixture();
    let archive = ArchiveBuilder::default()
        .file(".git/config", "[core]\n")
        .end();
    let summary = unpack(
        &mut archive.as_slice(),
        &target,
        &LARGE_BOUNDS,
        &UnpackRules::FOR_SANDBOX,
    )
    .unwrap();
    assert_eq!((summary.files, summary.left_out.len()), (1, 0));
    assert!(target.join(".git/config").exists());
}
