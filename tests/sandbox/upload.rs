//! What an upload takes along.

use std::os::unix::fs::symlink;

use testkit::said;

use crate::bench::{Bench, told};

for_every_operator!(an_upload_leaves_our_own_state_out);

fn an_upload_leaves_our_own_state_out(bench: &Bench) {
    bench.create("fix");
    // The operator's home: the repository, the configuration and our state directory.
    let home = bench.place.path();
    let output = bench.run(&["upload", "fix", home.to_str().unwrap(), "home"]);
    assert!(output.status.success(), "{}", told(&output));
    let name = home.file_name().unwrap().to_str().unwrap();
    let note = format!("{name}/state: palisade's own state directory");
    assert!(said::err(&output).contains(&note), "{}", told(&output));
    let there = bench.says("fix", "ls home/*");
    assert!(
        there.contains("palisade.yaml") && there.contains("project"),
        "{there}"
    );
    assert!(!there.contains("state"), "{there}");
    // What lies within it is refused, by whatever name.
    let link = home.join("other-name");
    symlink(bench.place.state(), &link).unwrap();
    for source in [
        bench.place.state(),
        bench.place.state().join("sandboxes"),
        bench.place.state().join("rows"),
        link.join("sandboxes"),
        link,
    ] {
        let complaint = bench.fails(1, &["upload", "fix", source.to_str().unwrap(), "again"]);
        assert!(complaint.contains("own state directory"), "{complaint}");
    }
    assert_eq!(bench.says("fix", "test -e again || echo none"), "none");
}
