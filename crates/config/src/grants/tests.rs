use super::*;

fn change(action: GrantAction, host: &str, ports: &[u16], sandbox: Option<&str>) -> GrantChange {
    GrantChange {
        action,
        host: HostPattern::parse(host).unwrap(),
        ports: ports.to_vec(),
        sandbox: sandbox.map(str::to_owned),
    }
}

/// The file after a change; None if the change is in it already.
fn edited(text: Option<&str>, change: &GrantChange) -> Result<Option<String>, GrantsError> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(FILE_NAME);
    if let Some(text) = text {
        std::fs::write(&path, text).unwrap();
    }
    let Some(edited) = edit(&path, change)? else {
        return Ok(None);
    };
    edited.write().unwrap();
    Ok(Some(std::fs::read_to_string(&path).unwrap()))
}

use GrantAction::{Allow, Deny};

#[test]
fn changes_keep_comments_and_other_entries() {
    let commented = "# mine\nversion: 1\n\n# hosts\ndomains:\n  # first\n  - a.example # why\n\n  # second\n  - host: b.example\n    methods: [GET]\n  # - c.example\n";
    for (before, change, after) in [
        (
            None,
            change(Allow, "a.example", &[], None),
            format!("{NEW_FILE}domains:\n  - a.example\n"),
        ),
        (
            None,
            change(Allow, "*.a.example", &[8443], Some("fix-01")),
            format!(
                "{NEW_FILE}sandboxes:\n  fix-01:\n    domains:\n      - {{host: \"*.a.example\", ports: [8443]}}\n"
            ),
        ),
        (
            Some(commented),
            change(Allow, "d.example", &[], None),
            commented.replace("  # - c.example\n", "  - d.example\n  # - c.example\n"),
        ),
        (
            Some(commented),
            change(Deny, "a.example", &[], None),
            commented
                .replace("  - a.example # why\n", "")
                .replace("  # - c.example\n", "  - {host: a.example, deny: [{}]}\n  # - c.example\n"),
        ),
        (
            Some("version: 1\ndomains: [] # none\nsandboxes:\n  x:\n    domains: [y.example]\n"),
            change(Allow, "192.0.2.1", &[], None),
            "version: 1\ndomains: # none\n  - \"192.0.2.1\"\nsandboxes:\n  x:\n    domains: [y.example]\n".to_owned(),
        ),
        (
            Some("domains:\n- {host: a.example, deny: [{}]}\n- b.example\nversion: 1\n"),
            change(Allow, "a.example", &[], None),
            "domains:\n- b.example\n- a.example\nversion: 1\n".to_owned(),
        ),
        (
            Some("version: 1\nsandboxes:\n  one:\n    domains:\n      - a.example\n  two:\n    domains:\n      - b.example\ndomains:\n  - c.example\n"),
            change(Allow, "d.example", &[], Some("one")),
            "version: 1\nsandboxes:\n  one:\n    domains:\n      - a.example\n      - d.example\n  two:\n    domains:\n      - b.example\ndomains:\n  - c.example\n".to_owned(),
        ),
        (
            Some("version: 1\nsandboxes:\n  one:\n    domains:\n      - a.example\n"),
            change(Allow, "d.example", &[], Some("two")),
            "version: 1\nsandboxes:\n  one:\n    domains:\n      - a.example\n  two:\n    domains:\n      - d.example\n".to_owned(),
        ),
        (
            Some("version: 1\ndomains:\n"),
            change(Allow, "localhost", &[], None),
            "version: 1\ndomains:\n  - \"localhost\"\n".to_owned(),
        ),
    ] {
        assert_eq!(edited(before, &change).unwrap(), Some(after), "{change:?}");
    }
}

#[test]
fn change_that_is_in_the_file_changes_nothing() {
    let text = "domains:\n  - a.example\n  - {host: b.example, deny: [{}]}\n";
    for change in [
        change(Allow, "a.example", &[], None),
        change(Deny, "b.example", &[], None),
    ] {
        assert_eq!(edited(Some(text), &change).unwrap(), None, "{change:?}");
    }
}

#[test]
fn files_in_other_forms_are_refused_with_the_entry_to_add() {
    for text in [
        "{version: 1, domains: [a.example]}\n",
        "domains: [a.example]\n",
        "domains: [a.example,\n  b.example]\n",
        "sandboxes: {x: {domains: []}}\n",
    ] {
        let change = change(
            Allow,
            "new.example",
            &[],
            (text.contains("sandboxes")).then_some("x"),
        );
        let error = edited(Some(text), &change).unwrap_err().to_string();
        assert!(
            error.contains("cannot be edited automatically"),
            "{text}: {error}"
        );
        assert!(error.ends_with("domains: new.example"), "{error}");
    }
    let change = change(Allow, "new.example", &[], None);
    let error = edited(Some("domain: []\n"), &change)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("grants.yaml:1:1") && error.contains("correct the file"),
        "{error}"
    );
}

#[test]
fn file_keeps_its_mode_and_a_new_one_is_private() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(FILE_NAME);
    let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
    let allow = |host: &str| {
        edit(&path, &change(Allow, host, &[], None))
            .unwrap()
            .unwrap()
    };
    let first = allow("a.example");
    assert_eq!(
        first.changed_lines(),
        [
            "+ # Written by palisade allow and palisade deny. You may edit it.",
            "+ version: \"1.0\"",
            "+ domains:",
            "+   - a.example",
        ]
    );
    first.write().unwrap();
    assert_eq!(mode(), 0o600);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
    let second = allow("b.example");
    assert_eq!(second.changed_lines(), ["+   - b.example"]);
    second.write().unwrap();
    assert_eq!(mode(), 0o640);
    // A change of the file in between is not lost.
    let third = allow("c.example");
    allow("d.example").write().unwrap();
    assert!(matches!(third.write(), Err(GrantsError::Changed { .. })));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}
