use proptest::prelude::*;

use super::*;

const OLD: &str = "1111111111111111111111111111111111111111";
const NEW: &str = "2222222222222222222222222222222222222222";
const ZERO: &str = "0000000000000000000000000000000000000000";

fn id(hex: &str) -> ObjectId {
    ObjectId::parse(hex.as_bytes()).unwrap()
}

fn name(text: &str) -> RefName {
    RefName::parse(text.as_bytes()).unwrap_or_else(|why| panic!("{text:?}: {why}"))
}

fn update(text: &str, old: &str, new: &str) -> RefUpdate {
    RefUpdate {
        name: name(text),
        old: id(old),
        new: id(new),
    }
}

fn pattern(text: &str) -> RefPattern {
    RefPattern::parse(text).unwrap()
}

fn judge(rules: &RefRules, update: &RefUpdate, facts: RefFacts) -> Option<(Reason, String)> {
    let denial = rules.judge(update, facts).err()?;
    assert!(denial.message.ends_with('.') && !denial.message.contains('\n'));
    Some((denial.reason, denial.rule.as_str().to_owned()))
}

/// A ref that this sandbox has created upstream.
const FACTS_OF_OWN_REF: RefFacts = RefFacts {
    exists_upstream: Some(true),
    made_by_this_sandbox: true,
    is_fast_forward: None,
};
/// A ref that was not looked up upstream.
const FACTS_NOT_LOOKED_UP: RefFacts = RefFacts {
    exists_upstream: None,
    made_by_this_sandbox: false,
    is_fast_forward: None,
};

#[test]
fn ref_name_is_validated_as_in_git() {
    for good in [
        "refs/heads/main",
        "refs/heads/a/b.c",
        "refs/heads/@",
        "refs/heads/a@b",
        "refs/heads/-a",
        "refs/heads/lock",
        "refs/heads/é",
        "refs/stash",
    ] {
        assert_eq!(name(good).to_string(), good);
    }
    for (bad, why) in [
        ("main", BadRef::NotARef),
        ("heads/main", BadRef::NotARef),
        ("HEAD", BadRef::NotARef),
        ("Refs/heads/main", BadRef::NotARef),
        ("refs/", BadRef::EmptyComponent),
        ("refs//heads/a", BadRef::EmptyComponent),
        ("refs/heads/", BadRef::EmptyComponent),
        ("refs/heads/a//b", BadRef::EmptyComponent),
        ("refs/heads/.a", BadRef::Dot),
        ("refs/heads/a.", BadRef::Dot),
        ("refs/heads/a..b", BadRef::Dot),
        ("refs/heads/../tags/a", BadRef::Dot),
        ("refs/heads/a.lock", BadRef::Lock),
        ("refs/heads/a.lock/b", BadRef::Lock),
        ("refs/heads/a@{1}", BadRef::Reflog),
        ("refs/heads/a b", BadRef::Forbidden),
        ("refs/heads/a\nb", BadRef::Forbidden),
        ("refs/heads/a\0b", BadRef::Forbidden),
        ("refs/heads/a\x7f", BadRef::Forbidden),
        ("refs/heads/a~1", BadRef::Forbidden),
        ("refs/heads/a^", BadRef::Forbidden),
        ("refs/heads/a:b", BadRef::Forbidden),
        ("refs/heads/a?", BadRef::Forbidden),
        ("refs/heads/*", BadRef::Forbidden),
        ("refs/heads/a[b", BadRef::Forbidden),
        ("refs/heads/a\\b", BadRef::Forbidden),
    ] {
        assert_eq!(RefName::parse(bad.as_bytes()), Err(why), "{bad:?}");
    }
}

#[test]
fn object_id_has_forty_or_sixty_four_digits() {
    assert_eq!(id(OLD).to_string(), OLD);
    assert_eq!(id(&"AB".repeat(32)).to_string(), "ab".repeat(32));
    assert!(id(ZERO).is_zero() && id(&"0".repeat(64)).is_zero() && !id(OLD).is_zero());
    for bad in [
        "",
        "0",
        &"0".repeat(39),
        &"0".repeat(41),
        &"g".repeat(40),
        &"+1".repeat(20),
    ] {
        assert_eq!(ObjectId::parse(bad.as_bytes()), Err(BadObjectId), "{bad}");
    }
}

#[test]
fn protecting_pattern_matches_more_loosely_than_allowing_one() {
    for (text, given, covers, touches) in [
        ("main", "refs/heads/main", true, true),
        ("main", "refs/heads/Main", false, true),
        ("main", "refs/heads/maın", false, true),
        ("main", "refs/heads/MAİN", false, true),
        ("master", "refs/heads/maſter", false, true),
        ("release/*", "refs/heads/releaſe/1", false, true),
        ("kernel", "refs/heads/\u{212a}ernel", false, true),
        ("straße", "refs/heads/STRASSE", false, true),
        ("Übung", "refs/heads/übung", false, true),
        ("σας", "refs/heads/ΣΑΣ", false, true),
        ("main", "refs/heads/mainline", false, false),
        ("main", "refs/heads/x/main", false, false),
        ("main", "refs/tags/main", false, false),
        ("release/*", "refs/heads/release/1", true, true),
        ("release/*", "refs/heads/release/1/hotfix", false, true),
        ("release/*", "refs/heads/RELEASE/1", false, true),
        ("release/*", "refs/heads/release", false, false),
        ("release/**", "refs/heads/release", true, true),
        ("release/**", "refs/heads/release/1/2", true, true),
        ("release/**", "refs/heads/releases", false, false),
        ("rel*", "refs/heads/release", true, true),
        ("**", "refs/heads/a/b", true, true),
        ("**", "refs/tags/a", false, false),
        ("refs/tags/v*", "refs/tags/v1", true, true),
        ("refs/tags/v*", "refs/heads/v1", false, false),
    ] {
        let (pattern, name) = (pattern(text), name(given));
        assert_eq!(pattern.covers(&name), covers, "{text} {given}");
        assert_eq!(pattern.touches(&name), touches, "{text} {given}");
    }
    assert_eq!(
        RefPattern::parse("a**"),
        Err(BadRefPattern::DoubleStarPlace)
    );
    for bad in ["", "a b", "/a", "a/", "a..b", "refs/"] {
        assert!(RefPattern::parse(bad).is_err(), "{bad:?}");
    }
}

#[test]
fn ref_name_with_invisible_characters_is_malformed() {
    let rules = RefRules::new(AuthMode::User);
    for hidden in [
        "ma\u{ad}in",
        "main\u{200c}",
        "main\u{200d}",
        "\u{feff}main",
        "main\u{fe0f}",
        "a\u{202e}b",
        "a\u{2066}b",
        "a\u{61c}b",
        "a\u{2028}b",
        "a\u{34f}b",
        "a\u{3164}b",
        "a\u{e0041}b",
        "a\u{9b}b",
        "a\u{fff9}b",
    ] {
        let update = update(&format!("refs/heads/{hidden}"), ZERO, NEW);
        let judged = judge(&rules, &update, FACTS_NOT_LOOKED_UP);
        assert_eq!(
            judged,
            Some((Reason::GitMalformed, "git:form".to_owned())),
            "{hidden:?}"
        );
    }
    for plain in ["é", "日本語", "a\u{301}", "😀"] {
        let update = update(&format!("refs/heads/{plain}"), ZERO, NEW);
        assert_eq!(
            judge(&rules, &update, FACTS_NOT_LOOKED_UP),
            None,
            "{plain:?}"
        );
    }
}

#[test]
fn update_is_decided_by_default_rules() {
    use Reason as R;
    let user = RefRules::new(AuthMode::User);
    let bot = RefRules::new(AuthMode::Bot);
    assert_eq!(user.protected.len(), DEFAULT_PROTECTED.len());
    let new = RefFacts {
        exists_upstream: Some(false),
        ..FACTS_NOT_LOOKED_UP
    };
    let foreign = RefFacts {
        exists_upstream: Some(true),
        ..FACTS_NOT_LOOKED_UP
    };
    for (rules, ref_name, old, new_id, facts, expected) in [
        (&user, "refs/heads/a", ZERO, NEW, new, None),
        (&user, "refs/heads/a", ZERO, NEW, FACTS_NOT_LOOKED_UP, None),
        (&user, "refs/heads/a", OLD, NEW, FACTS_OF_OWN_REF, None),
        (
            &user,
            "refs/heads/a",
            OLD,
            NEW,
            foreign,
            Some((R::GitProtected, "git:own-branches")),
        ),
        (
            &user,
            "refs/heads/a",
            OLD,
            NEW,
            FACTS_NOT_LOOKED_UP,
            Some((R::GitProtected, "git:own-branches")),
        ),
        (
            &user,
            "refs/heads/a",
            ZERO,
            NEW,
            foreign,
            Some((R::GitProtected, "git:own-branches")),
        ),
        (
            &user,
            "refs/heads/a",
            OLD,
            ZERO,
            FACTS_OF_OWN_REF,
            Some((R::GitDelete, "git:deletion")),
        ),
        (
            &user,
            "refs/tags/a",
            OLD,
            ZERO,
            FACTS_OF_OWN_REF,
            Some((R::GitDelete, "git:deletion")),
        ),
        (
            &user,
            "refs/heads/main",
            ZERO,
            NEW,
            new,
            Some((R::GitProtected, "git:protected:main")),
        ),
        (
            &user,
            "refs/heads/MAIN",
            OLD,
            NEW,
            FACTS_OF_OWN_REF,
            Some((R::GitProtected, "git:protected:main")),
        ),
        (
            &user,
            "refs/heads/release/1/x",
            ZERO,
            NEW,
            new,
            Some((R::GitProtected, "git:protected:release/*")),
        ),
        (&user, "refs/tags/v1", ZERO, NEW, new, None),
        (
            &user,
            "refs/tags/v1",
            OLD,
            NEW,
            FACTS_OF_OWN_REF,
            Some((R::GitProtected, "git:existing-tag")),
        ),
        (
            &user,
            "refs/tags/v1",
            ZERO,
            NEW,
            foreign,
            Some((R::GitProtected, "git:existing-tag")),
        ),
        (
            &user,
            "refs/notes/x",
            ZERO,
            NEW,
            new,
            Some((R::GitNamespace, "git:namespace")),
        ),
        (
            &user,
            "refs/replace/x",
            ZERO,
            NEW,
            new,
            Some((R::GitNamespace, "git:namespace")),
        ),
        (
            &user,
            "refs/pull/1/head",
            ZERO,
            NEW,
            new,
            Some((R::GitNamespace, "git:namespace")),
        ),
        (
            &user,
            "refs/headsx/a",
            ZERO,
            NEW,
            new,
            Some((R::GitNamespace, "git:namespace")),
        ),
        (
            &user,
            "refs/heads",
            ZERO,
            NEW,
            new,
            Some((R::GitNamespace, "git:namespace")),
        ),
        (&bot, "refs/heads/sandbox/a", ZERO, NEW, new, None),
        (&bot, "refs/heads/palisade/a/b", OLD, NEW, foreign, None),
        (
            &bot,
            "refs/heads/sandbox",
            ZERO,
            NEW,
            new,
            Some((R::GitNamespace, "git:bot-namespace")),
        ),
        (
            &bot,
            "refs/heads/sandboxes/a",
            ZERO,
            NEW,
            new,
            Some((R::GitNamespace, "git:bot-namespace")),
        ),
        (
            &bot,
            "refs/heads/Sandbox/a",
            ZERO,
            NEW,
            new,
            Some((R::GitNamespace, "git:bot-namespace")),
        ),
        (
            &bot,
            "refs/heads/main",
            OLD,
            NEW,
            FACTS_OF_OWN_REF,
            Some((R::GitNamespace, "git:bot-namespace")),
        ),
        (
            &bot,
            "refs/tags/v1",
            ZERO,
            NEW,
            new,
            Some((R::GitNamespace, "git:bot-namespace")),
        ),
        (
            &bot,
            "refs/heads/sandbox/a",
            OLD,
            ZERO,
            FACTS_OF_OWN_REF,
            Some((R::GitDelete, "git:deletion")),
        ),
        (
            &user,
            "refs/heads/a",
            ZERO,
            ZERO,
            new,
            Some((R::GitMalformed, "git:form")),
        ),
        (
            &user,
            "refs/heads/a\u{9b}2J",
            ZERO,
            NEW,
            new,
            Some((R::GitMalformed, "git:form")),
        ),
    ] {
        let expected = expected.map(|(reason, rule)| (reason, rule.to_owned()));
        assert_eq!(
            judge(rules, &update(ref_name, old, new_id), facts),
            expected,
            "{ref_name} {facts:?}"
        );
    }
}

#[test]
fn non_utf8_name_or_mixed_ids_are_malformed() {
    let rules = RefRules::new(AuthMode::User);
    let odd = RefUpdate {
        name: RefName::parse(b"refs/heads/\xff").unwrap(),
        old: id(ZERO),
        new: id(NEW),
    };
    let mixed = update("refs/heads/a", ZERO, &"2".repeat(64));
    for update in [odd, mixed] {
        let (reason, _) = judge(&rules, &update, FACTS_NOT_LOOKED_UP).unwrap();
        assert_eq!(reason, Reason::GitMalformed);
    }
}

#[test]
fn allowed_deletion_excludes_tags_protected_and_foreign_branches() {
    let rules = RefRules {
        allow_deletion: true,
        deny_force_push: true,
        ..RefRules::new(AuthMode::User)
    };
    let delete = |text, facts| judge(&rules, &update(text, OLD, ZERO), facts).map(|(r, _)| r);
    assert_eq!(delete("refs/heads/a", FACTS_OF_OWN_REF), None);
    assert_eq!(
        delete("refs/heads/main", FACTS_OF_OWN_REF),
        Some(Reason::GitProtected)
    );
    assert_eq!(
        delete("refs/heads/a", FACTS_NOT_LOOKED_UP),
        Some(Reason::GitProtected)
    );
    assert_eq!(
        delete("refs/tags/a", FACTS_OF_OWN_REF),
        Some(Reason::GitDelete)
    );
}

#[test]
fn listed_branch_is_allowed_in_user_mode_by_exact_match() {
    let rules = RefRules {
        pushable: vec![pattern("develop"), pattern("team/*")],
        ..RefRules::new(AuthMode::User)
    };
    for (text, open) in [
        ("refs/heads/develop", true),
        ("refs/heads/Develop", false),
        ("refs/heads/team/a", true),
        ("refs/heads/team/a/b", false),
    ] {
        let denied = judge(&rules, &update(text, OLD, NEW), FACTS_NOT_LOOKED_UP);
        assert_eq!(denied.is_none(), open, "{text}");
    }
}

#[test]
fn denied_force_push_includes_unknown_history() {
    let loose = RefRules::new(AuthMode::User);
    let strict = RefRules {
        deny_force_push: true,
        ..loose.clone()
    };
    for (fast_forward, passes) in [(Some(true), true), (Some(false), false), (None, false)] {
        let facts = RefFacts {
            is_fast_forward: fast_forward,
            ..FACTS_OF_OWN_REF
        };
        let push = update("refs/heads/a", OLD, NEW);
        assert_eq!(judge(&loose, &push, facts), None);
        assert_eq!(judge(&strict, &push, facts).is_none(), passes);
    }
    let fresh = update("refs/heads/a", ZERO, NEW);
    assert_eq!(judge(&strict, &fresh, FACTS_NOT_LOOKED_UP), None);
}

#[test]
fn one_refused_ref_refuses_push_and_all_are_reported() {
    let rules = RefRules::new(AuthMode::User);
    let push = [
        (update("refs/heads/a", ZERO, NEW), FACTS_NOT_LOOKED_UP),
        (update("refs/heads/main", OLD, NEW), FACTS_NOT_LOOKED_UP),
        (update("refs/heads/b", OLD, ZERO), FACTS_OF_OWN_REF),
        (update("refs/heads/a", ZERO, OLD), FACTS_NOT_LOOKED_UP),
    ];
    let denied = rules.judge_push(&push).unwrap_err();
    assert_eq!(denied.reason, Reason::GitProtected);
    let reported: Vec<(String, Reason)> = denied
        .refs()
        .iter()
        .map(|one| {
            (
                String::from_utf8_lossy(&one.name).into_owned(),
                one.denial.reason,
            )
        })
        .collect();
    assert_eq!(
        reported,
        [
            ("refs/heads/main".to_owned(), Reason::GitProtected),
            ("refs/heads/b".to_owned(), Reason::GitDelete),
            ("refs/heads/a".to_owned(), Reason::GitMalformed),
        ]
    );
    assert_eq!(rules.judge_push(&push[..1]), Ok(()));
    assert_eq!(rules.judge_push(&[]), Ok(()));
}

proptest! {
    #[test]
    fn parsing_ref_never_panics_and_keeps_bytes(tail in proptest::collection::vec(any::<u8>(), 0..30)) {
        let text = [b"refs/heads/".as_slice(), &tail].concat();
        if let Ok(name) = RefName::parse(&text) {
            prop_assert_eq!(name.as_bytes(), text.as_slice());
        }
    }

    #[test]
    fn covered_ref_is_also_touched(text in "[ab*/]{1,8}", given in "[abAB/]{1,8}") {
        let parsed = (RefPattern::parse(&text), RefName::parse(format!("refs/heads/{given}").as_bytes()));
        if let (Ok(pattern), Ok(name)) = parsed {
            prop_assert!(!pattern.covers(&name) || pattern.touches(&name));
        }
    }

    #[test]
    fn protected_branch_in_any_case_is_refused(upper in proptest::collection::vec(any::<bool>(), 4), made: bool, bot: bool) {
        let text: String = "main".chars().zip(&upper)
            .map(|(c, up)| if *up { c.to_ascii_uppercase() } else { c }).collect();
        let rules = RefRules {
            allow_deletion: true,
            pushable: vec![pattern("**")],
            ..RefRules::new(if bot { AuthMode::Bot } else { AuthMode::User })
        };
        let facts = RefFacts { made_by_this_sandbox: made, ..RefFacts::default() };
        for (old, new) in [(ZERO, NEW), (OLD, NEW), (OLD, ZERO)] {
            let update = update(&format!("refs/heads/{text}"), old, new);
            prop_assert!(rules.judge(&update, facts).is_err());
        }
    }
}

#[test]
fn update_with_non_utf8_name_round_trips_through_json() {
    let update = RefUpdate {
        name: RefName::parse(b"refs/heads/\xff\xfe").unwrap(),
        old: id(ZERO),
        new: id(&"ab".repeat(32)),
    };
    let written = serde_json::to_value(&update).unwrap();
    assert_eq!(
        serde_json::from_value::<RefUpdate>(written.clone()).unwrap(),
        update
    );
    for (field, bad) in [
        ("name", serde_json::json!(b"refs/heads/a b")),
        ("new", serde_json::json!("abc")),
        ("more", serde_json::json!(1)),
    ] {
        let mut changed = written.clone();
        changed[field] = bad;
        assert!(
            serde_json::from_value::<RefUpdate>(changed).is_err(),
            "{field}"
        );
    }
}
