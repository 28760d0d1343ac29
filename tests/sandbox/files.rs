//! Files in and out, without a branch in between.

use testkit::output;

use crate::sandbox_fixture::{SandboxFixture, describe};

for_every_operator!(download_skips_repositories_and_lists_sensitive_files);

fn download_skips_repositories_and_lists_sensitive_files(fixture: &SandboxFixture) {
    fixture.create("fix");
    fixture.stdout_of(
        "fix",
        "mkdir -p out/.git/hooks out/sub/.Git; echo '[core] fsmonitor = x' > out/.git/config; \
         echo x > out/sub/.Git/config; echo x > out/.envrc; echo hi > out/new.txt",
    );
    let output = fixture.run(&["download", "fix", "out"]);
    assert!(output.status.success(), "{}", describe(&output));
    let printed = output::stderr(&output);
    for named in ["out/.git: ", "out/sub/.Git: ", "out/.envrc: "] {
        assert!(printed.contains(named), "{printed}");
    }
    assert!(!printed.contains("new.txt"), "{printed}");
    assert_eq!(fixture.repo.read("out/new.txt"), "hi\n");
    assert_eq!(fixture.repo.read("out/.envrc"), "x\n");
    for gone in ["out/.git", "out/sub/.Git"] {
        assert!(!fixture.repo.path(gone).exists(), "{gone}");
    }
    // The agent's `.git` is not downloaded under its own name either, and never replaces the
    // operator's.
    let before = fixture.repo.fingerprint();
    fixture.ok(&["download", "--overwrite", "fix", ".git"]);
    let changed = fixture.repo.fingerprint().differences(&before);
    assert!(changed.is_empty(), "{changed:?}");
}
