//! The files of an upload.

use std::os::unix::fs::symlink;

use testkit::output;

use crate::sandbox_fixture::{SandboxFixture, describe};

for_every_operator!(upload_skips_palisades_state_directory);

fn upload_skips_palisades_state_directory(fixture: &SandboxFixture) {
    fixture.create("fix");
    // The operator's home has the repository, the configuration and the gate's state directory.
    let home = fixture.gate_dir.path();
    let output = fixture.run(&["upload", "fix", home.to_str().unwrap(), "home"]);
    assert!(output.status.success(), "{}", describe(&output));
    let name = home.file_name().unwrap().to_str().unwrap();
    let note = format!("{name}/state: palisade's own state directory");
    assert!(
        output::stderr(&output).contains(&note),
        "{}",
        describe(&output)
    );
    let there = fixture.stdout_of("fix", "ls home/*");
    assert!(
        there.contains("palisade.yaml") && there.contains("project"),
        "{there}"
    );
    assert!(!there.contains("state"), "{there}");
    // Paths below the state directory are refused under any name.
    let link = home.join("other-name");
    symlink(fixture.gate_dir.state(), &link).unwrap();
    for source in [
        fixture.gate_dir.state(),
        fixture.gate_dir.state().join("sandboxes"),
        fixture.gate_dir.state().join("rows"),
        link.join("sandboxes"),
        link,
    ] {
        let complaint = fixture.fails(1, &["upload", "fix", source.to_str().unwrap(), "again"]);
        assert!(complaint.contains("own state directory"), "{complaint}");
    }
    assert_eq!(
        fixture.stdout_of("fix", "test -e again || echo none"),
        "none"
    );
}
