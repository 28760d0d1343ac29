//! Files in and out, without a branch in between.

use testkit::output;

use crate::sandbox_fixture::{SandboxFixture, describe};

for_every_operator!(a_download_leaves_repositories_behind_and_names_what_steers);

fn a_download_leaves_repositories_behind_and_names_what_steers(fixture: &SandboxFixture) {
    fixture.create("fix");
    fixture.stdout_of(
        "fix",
        "mkdir -p out/.git/hooks out/sub/.Git; echo '[core] fsmonitor = x' > out/.git/config; \
         echo x > out/sub/.Git/config; echo x > out/.envrc; echo hi > out/new.txt",
    );
    let output = fixture.run(&["download", "fix", "out"]);
    assert!(output.status.success(), "{}", describe(&output));
    let said = output::stderr(&output);
    for named in ["out/.git: ", "out/sub/.Git: ", "out/.envrc: "] {
        assert!(said.contains(named), "{said}");
    }
    assert!(!said.contains("new.txt"), "{said}");
    assert_eq!(fixture.repo.read("out/new.txt"), "hi\n");
    assert_eq!(fixture.repo.read("out/.envrc"), "x\n");
    for gone in ["out/.git", "out/sub/.Git"] {
        assert!(!fixture.repo.path(gone).exists(), "{gone}");
    }
    // Not even by its own name, and never over the operator's.
    let before = fixture.repo.fingerprint();
    fixture.ok(&["download", "--overwrite", "fix", ".git"]);
    let changed = fixture.repo.fingerprint().differences(&before);
    assert!(changed.is_empty(), "{changed:?}");
}
