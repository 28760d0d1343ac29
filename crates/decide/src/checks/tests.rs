use super::*;

#[test]
fn docs_checks_md_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/checks.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, document()).unwrap();
    }
    let written = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        written == document(),
        "docs/checks.md is outdated: run 'just docs'"
    );
}

#[test]
fn every_subject_passes_a_check_and_every_check_has_a_subject() {
    let required = |subject, check| requirement(subject, check) == Requirement::Required;
    for subject in SubjectKind::ALL {
        let mut checks = Check::ALL.into_iter();
        assert!(checks.any(|check| required(subject, check)), "{subject:?}");
    }
    for check in Check::ALL {
        let mut subjects = SubjectKind::ALL.into_iter();
        assert!(
            subjects.any(|subject| required(subject, check)),
            "{check:?}"
        );
    }
}
