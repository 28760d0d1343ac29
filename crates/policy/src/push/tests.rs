use super::*;
use crate::refs::RefName;
use crate::registration::{AuthMode, RepoName};

fn id(digit: char) -> ObjectId {
    ObjectId::parse(digit.to_string().repeat(40).as_bytes()).unwrap()
}

fn update(old: char, new: char, name: &str) -> RefUpdate {
    RefUpdate {
        name: RefName::parse(name.as_bytes()).unwrap(),
        old: id(old),
        new: id(new),
    }
}

fn case(updates: Vec<RefUpdate>) -> PushContext {
    PushContext {
        format: ObjectFormat::Sha1,
        updates,
        options: Vec::new(),
        default_tip: None,
        restricted: vec![".github/workflows".to_owned()],
        scan: true,
    }
}

fn rules() -> PushRules {
    PushRules {
        refs: RefRules::new(AuthMode::User),
        secrets: SecretAction::Deny,
    }
}

fn finding(place: SecretLocation) -> SecretFinding {
    SecretFinding {
        rule: "some-key".to_owned(),
        place,
    }
}

fn reason<T>(judged: Result<T, Denial>) -> Result<(), Reason> {
    judged.map(drop).map_err(|denied| denied.reason)
}

#[test]
fn push_that_breaks_no_rule_passes() {
    let case = case(vec![update('0', '1', "refs/heads/new")]);
    let clean = Findings::default();
    assert_eq!(judge(&rules(), &case, &[], Some(&clean)), Ok(vec![]));
    assert_eq!(rules().judge_refs(&case, &[]), Ok(()));
}

#[test]
fn push_without_required_check_is_refused() {
    let mut case = case(vec![update('0', '1', "refs/heads/new")]);
    let judged = judge(&rules(), &case, &[], None);
    assert_eq!(reason(judged), Err(Reason::Internal));
    case.scan = false;
    assert!(rules().wants_findings(&case), "paths are restricted");
    case.restricted.clear();
    assert!(!rules().wants_findings(&case));
    assert_eq!(judge(&rules(), &case, &[], None), Ok(vec![]));

    let mut careful = rules();
    careful.refs.deny_force_push = true;
    assert!(
        !careful.wants_findings(&case),
        "a new branch rewrites nothing"
    );
    case.updates = vec![update('1', '2', "refs/heads/mine")];
    assert!(careful.wants_findings(&case));
    let facts = [RefFacts {
        made_by_this_sandbox: true,
        ..RefFacts::default()
    }];
    assert_eq!(careful.judge_refs(&case, &facts), Ok(()), "not known yet");
    for (forward, expected) in [
        (Some(true), Ok(())),
        (Some(false), Err(Reason::GitProtected)),
        (None, Err(Reason::GitProtected)),
    ] {
        let findings = Findings {
            fast_forward: vec![forward],
            ..Findings::default()
        };
        let judged = judge(&careful, &case, &facts, Some(&findings));
        assert_eq!(reason(judged), expected);
    }
    let short = Findings::default();
    let judged = judge(&careful, &case, &facts, Some(&short));
    assert_eq!(reason(judged), Err(Reason::GitProtected));
}

#[test]
fn ref_rules_apply_before_findings() {
    let case = case(vec![
        update('0', '1', "refs/heads/new"),
        update('1', '0', "refs/heads/gone"),
    ]);
    let findings = Findings {
        secrets: vec![finding(SecretLocation::Commit(id('1')))],
        ..Findings::default()
    };
    let denied = judge(&rules(), &case, &[], Some(&findings)).unwrap_err();
    assert_eq!(denied.reason, Reason::GitDelete);
    assert_eq!(denied.refs().len(), 1);
    assert_eq!(denied.refs()[0].name, b"refs/heads/gone");
}

#[test]
fn refusal_of_restricted_path_does_not_name_it() {
    let mut case = case(vec![update('0', '1', "refs/heads/new")]);
    for restricted in [RestrictedPathChange::Changed, RestrictedPathChange::Unknown] {
        let findings = Findings {
            restricted,
            ..Findings::default()
        };
        let denied = judge(&rules(), &case, &[], Some(&findings)).unwrap_err();
        assert_eq!(denied.reason, Reason::GitPath);
        assert!(!denied.message.contains(".github"));
    }
    case.restricted.clear();
    let findings = Findings {
        restricted: RestrictedPathChange::Changed,
        ..Findings::default()
    };
    assert_eq!(judge(&rules(), &case, &[], Some(&findings)), Ok(vec![]));
}

#[test]
fn refusal_of_secret_names_rule_and_hides_location() {
    let case = case(vec![update('0', '1', "refs/heads/new")]);
    let findings = Findings {
        secrets: vec![
            finding(SecretLocation::Commit(id('7'))),
            SecretFinding {
                rule: "npm-token".to_owned(),
                place: SecretLocation::Ref(0),
            },
            finding(SecretLocation::Blob {
                id: id('a'),
                path: Some("a\u{202e}b".to_owned()),
            }),
        ],
        ..Findings::default()
    };
    let denial = judge(&rules(), &case, &[], Some(&findings)).unwrap_err();
    assert_eq!(denial.reason, Reason::SecretFound);
    assert_eq!(denial.rule.as_str(), "secret:some-key");
    assert!(denial.message.contains("(some-key)"), "{}", denial.message);
    assert!(!denial.message.contains("7777"), "{}", denial.message);
    let evidence = denial.evidence.unwrap();
    assert!(evidence.starts_with("commit 7777"), "{evidence}");
    assert!(evidence.contains("'a\\u{202e}b' (blob aaaa"), "{evidence}");
    let rules: Vec<_> = findings
        .secret_denials()
        .into_iter()
        .map(|d| d.rule)
        .collect();
    let rules: Vec<_> = rules.iter().map(|rule| rule.as_str()).collect();
    assert_eq!(rules, ["secret:some-key", "secret:npm-token"]);
}

#[test]
fn secret_is_handled_by_configured_action() {
    let case = case(vec![update('0', '1', "refs/heads/new")]);
    let findings = Findings {
        secrets: vec![finding(SecretLocation::Tag(id('1')))],
        ..Findings::default()
    };
    for (secrets, expected) in [
        (SecretAction::Deny, Err(Reason::SecretFound)),
        (SecretAction::Ask, Ok(1)),
        (SecretAction::Note, Ok(0)),
        (SecretAction::Off, Ok(0)),
    ] {
        let rules = PushRules { secrets, ..rules() };
        let judged = judge(&rules, &case, &[], Some(&findings));
        let questions = judged.map(|questions| questions.len());
        assert_eq!(questions.map_err(|denial| denial.reason), expected);
    }
}

#[test]
fn repository_size_limit_is_capped() {
    let repo = |max_receive_pack_bytes| Repo {
        name: RepoName::parse("o/r").unwrap(),
        max_receive_pack_bytes,
    };
    assert_eq!(size_limit(&repo(None), 100), 100);
    assert_eq!(size_limit(&repo(Some(200)), 100), 200);
    assert_eq!(size_limit(&repo(Some(u64::MAX)), 100), 500 << 20);
    assert_eq!(size_limit(&repo(None), u64::MAX), 500 << 20);
}
