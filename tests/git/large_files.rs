//! Large files with git-lfs.

use std::path::{Path, PathBuf};

use testkit::output;

use crate::git_fixture::{APP, FixtureOptions, GitFixture};

/// A working copy in which git-lfs tracks `*.bin`.
fn working_copy_with_lfs(fixture: &GitFixture, name: &str) -> PathBuf {
    fixture.git_in(&fixture.path(""), &["lfs", "install", "--skip-repo"]);
    let dir = fixture.working_copy(name);
    fixture.git_in(&dir, &["lfs", "install", "--local"]);
    fixture.git_in(&dir, &["lfs", "track", "*.bin"]);
    dir
}

/// The SHA-256 in the committed LFS pointer of `file`.
fn lfs_pointer_id(fixture: &GitFixture, dir: &Path, file: &str) -> String {
    let pointer = fixture.git_in(dir, &["show", &format!("HEAD:{file}")]);
    let oid = pointer
        .lines()
        .find_map(|line| line.strip_prefix("oid sha256:"));
    oid.unwrap_or_else(|| panic!("no pointer: {pointer}"))
        .to_owned()
}

#[test]
fn lfs_file_is_uploaded_and_downloaded() {
    let fixture = GitFixture::with_options(FixtureOptions {
        checked: true,
        ..FixtureOptions::default()
    });
    let first = working_copy_with_lfs(&fixture, "first");
    let other_host = "elsewhere.example";
    for (round, host) in [None, Some(other_host)].into_iter().enumerate() {
        if let Some(host) = host {
            fixture.forge.store_large_files_at(host);
        }
        let file = format!("picture-{round}.bin");
        let content = format!("{round} ").repeat(1_500_000);
        let before = fixture.forge.requests().len();
        fixture.commit(&first, &file, &content);
        fixture.git_in(&first, &["push", "-q", "origin", "HEAD:refs/heads/feature"]);
        let stored = fixture
            .forge
            .large_file(&lfs_pointer_id(&fixture, &first, &file));
        assert_eq!(stored.as_deref(), Some(content.as_bytes()));
        let second = format!("second-{round}");
        let clone = ["clone", "-q", "--branch", "feature", APP, &second];
        fixture.git_in(&fixture.path(""), &clone);
        let downloaded = std::fs::read(fixture.path(&second).join(&file)).unwrap();
        assert_eq!(downloaded, content.as_bytes());
        // The file was uploaded to this host.
        let seen = fixture.forge.requests().split_off(before);
        let put = seen.iter().find(|request| request.method == "PUT").unwrap();
        let at = put.headers["host"].to_str().unwrap();
        assert_eq!(at, host.unwrap_or("forge.example"));
        assert_eq!(put.length, content.len() as u64);
    }
    let lfs = fixture.records().into_iter();
    let lfs: Vec<_> = lfs.filter(|record| record["operation"] == "lfs").collect();
    assert!(!lfs.is_empty());
    for record in lfs {
        assert_eq!(record["verdict"], "allow", "{record}");
        assert_eq!(record["repo"], "acme/app", "{record}");
    }
}

#[test]
fn lfs_files_of_another_repository_are_refused() {
    let fixture = GitFixture::new();
    let first = working_copy_with_lfs(&fixture, "first");
    fixture.commit(&first, "picture.bin", "not so large");
    let other = "https://forge.example/acme/other";
    fixture.create_bare("acme/other", &[]);
    let output = fixture.try_git(&first, &["lfs", "push", other, "HEAD"]);
    assert!(!output.status.success());
    let printed = output::stderr(&output) + &output::stdout(&output);
    assert!(
        printed.contains("Repo not authorized: acme/other"),
        "{printed}"
    );
    let oid = lfs_pointer_id(&fixture, &first, "picture.bin");
    assert_eq!(fixture.forge.large_file(&oid), None);
}

#[test]
fn lfs_upload_to_an_unlisted_host_is_refused() {
    let fixture = GitFixture::new();
    fixture.forge.store_large_files_at("nowhere.example");
    let first = working_copy_with_lfs(&fixture, "first");
    fixture.commit(&first, "picture.bin", "not so large");
    // git-lfs treats the refusal like an expired token, and would retry eight times.
    fixture.git_in(&first, &["config", "lfs.transfer.maxretries", "1"]);
    let push = ["push", "origin", "HEAD:refs/heads/feature"];
    let output = fixture.try_git(&first, &push);
    assert!(!output.status.success());
    let printed = output::stderr(&output) + &output::stdout(&output);
    assert!(printed.contains("nowhere.example"), "{printed}");
    let mut records = fixture.records().into_iter();
    let record = records.find(|record| record["host"] == "nowhere.example");
    assert_eq!(record.expect("a record")["reason"], "host_denied");
    assert!(!fixture.refs("acme/app").contains("feature"));
}
