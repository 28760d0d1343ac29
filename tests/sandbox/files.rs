//! Files in and out, without a branch in between.

use testkit::said;

use crate::bench::{Bench, told};

for_every_operator!(a_download_leaves_repositories_behind_and_names_what_steers);

fn a_download_leaves_repositories_behind_and_names_what_steers(bench: &Bench) {
    bench.create("fix");
    bench.says(
        "fix",
        "mkdir -p out/.git/hooks out/sub/.Git; echo '[core] fsmonitor = x' > out/.git/config; \
         echo x > out/sub/.Git/config; echo x > out/.envrc; echo hi > out/new.txt",
    );
    let output = bench.run(&["download", "fix", "out"]);
    assert!(output.status.success(), "{}", told(&output));
    let said = said::err(&output);
    for named in ["out/.git: ", "out/sub/.Git: ", "out/.envrc: "] {
        assert!(said.contains(named), "{said}");
    }
    assert!(!said.contains("new.txt"), "{said}");
    assert_eq!(bench.repo.read("out/new.txt"), "hi\n");
    assert_eq!(bench.repo.read("out/.envrc"), "x\n");
    for gone in ["out/.git", "out/sub/.Git"] {
        assert!(!bench.repo.path(gone).exists(), "{gone}");
    }
    // Not even by its own name, and never over the operator's.
    let before = bench.repo.fingerprint();
    bench.ok(&["download", "--overwrite", "fix", ".git"]);
    let changed = bench.repo.fingerprint().differences(&before);
    assert!(changed.is_empty(), "{changed:?}");
}
