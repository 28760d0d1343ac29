use proptest::prelude::*;

use super::*;

fn pattern(text: &str) -> PathPattern {
    PathPattern::parse(text).unwrap_or_else(|why| panic!("{text:?}: {why}"))
}

fn path(text: &str) -> CleanPath {
    CleanPath::parse(text).unwrap_or_else(|why| panic!("{text:?}: {why}"))
}

fn method(text: &str) -> Method {
    Method::parse(text).unwrap()
}

fn rule(methods: &[&str], paths: &[&str]) -> EndpointRule {
    EndpointRule {
        methods: MethodSet::parse(methods.iter().copied()).unwrap(),
        paths: paths.iter().map(|text| pattern(text)).collect(),
    }
}

fn check_covers(pattern_text: &str, yes: &[&str], no: &[&str]) {
    for text in yes {
        assert!(
            pattern(pattern_text).covers(&path(text)),
            "{pattern_text} {text}"
        );
        assert!(pattern(pattern_text).touches(&path(text)));
    }
    for text in no {
        assert!(
            !pattern(pattern_text).covers(&path(text)),
            "{pattern_text} {text}"
        );
    }
}

#[test]
fn star_matches_one_segment_and_double_star_any_number() {
    check_covers("/*", &["/a", "/.a", "/*"], &["/", "/a/", "/a/b"]);
    check_covers("/**", &["/", "/a", "/a/", "/a/b", "/a/b/c/"], &[]);
    check_covers("/", &["/"], &["/a"]);
    check_covers(
        "/a/**",
        &["/a", "/a/", "/a/b", "/a/b/c"],
        &["/", "/ab", "/b/a"],
    );
    check_covers("/a/*", &["/a/b"], &["/a", "/a/", "/a/b/c"]);
    check_covers("/**/b", &["/b", "/a/b", "/b/b"], &["/", "/b/a", "/ab"]);
    check_covers(
        "/a/**/b/*/c",
        &["/a/b/x/c", "/a/b/b/x/c", "/a/b/x/b/y/c"],
        &["/a/b/c", "/a/b/x/c/d"],
    );
    check_covers("/**/**", &["/", "/a", "/a/b"], &[]);
    check_covers("/**/a/**", &["/a", "/x/a/y"], &["/", "/x"]);
}

#[test]
fn star_inside_segment_matches_any_run_of_characters() {
    check_covers(
        "/v*/x",
        &["/v1/x", "/v/x", "/v123/x"],
        &["/w1/x", "/v1/2/x"],
    );
    check_covers("/*.git", &["/a.git", "/.git"], &["/a.gitx", "/a/b.git"]);
    check_covers("/a*b*c", &["/abc", "/axbxc", "/abbcc"], &["/ab", "/abcd"]);
    check_covers("/%2A", &["/*"], &["/a"]);
    check_covers("/*é*", &["/xéy"], &["/xey"]);
    check_covers("/a%20b", &["/a%20b"], &["/a+b"]);
}

#[test]
fn trailing_slash_is_literal_for_allow_and_ignored_for_deny() {
    check_covers("/a", &["/a"], &["/a/"]);
    check_covers("/a/", &["/a/"], &["/a"]);
    check_covers("/a/**/", &["/a/", "/a/b/"], &["/a", "/a/b"]);
    assert!(pattern("/a").touches(&path("/a/")));
    assert!(pattern("/a/").touches(&path("/a")));
}

#[test]
fn encoded_slash_is_allowed_in_both_readings_and_denied_in_either() {
    let scoped = path("/@s%2Fp");
    for (text, covers, touches) in [
        ("/@s%2Fp", true, true),
        ("/@s%2f*", true, true),
        ("/*%2F*", true, true),
        ("/**", true, true),
        ("/*", false, true),
        ("/*/*", false, true),
        ("/@s/p", false, true),
        ("/@s/**", false, true),
        ("/x%2Fp", false, false),
    ] {
        assert_eq!(pattern(text).covers(&scoped), covers, "{text}");
        assert_eq!(pattern(text).touches(&scoped), touches, "{text}");
    }
    let plain = path("/@s/p");
    assert!(!pattern("/@s%2Fp").covers(&plain));
    assert!(pattern("/@s%2Fp").touches(&plain));
    check_covers(
        "/projects/**/issues",
        &["/projects/g%2Fp/issues", "/projects/g%2Fh%2Fp/issues"],
        &["/projects/g%2Fp"],
    );
}

#[test]
fn path_parameter_does_not_bypass_deny() {
    assert!(pattern("/admin/**").touches(&path("/admin;x=1/users")));
    assert!(pattern("/admin").touches(&path("/admin%3Bx")));
    assert!(pattern("/a/b").touches(&path("/a%2Fb;y")));
    // Servers that drop parameters before they split read these differently from others.
    for hidden in ["/admin;x%2Fb/users%2Fdelete", "/a;x%2Fb;y", "/a;x/b%3Bc"] {
        assert!(CleanPath::parse(hidden).is_err(), "{hidden}");
    }
    assert!(!pattern("/admin").covers(&path("/admin;x=1")));
    check_covers("/a;v=1", &["/a;v=1"], &["/a", "/a;v=2"]);
    check_covers("/*", &["/a;v=1"], &[]);
    assert!(!pattern("/a;v=1").touches(&path("/a")));
    assert!(!pattern("/a;v=1").touches(&path("/a;v=2")));
}

#[test]
fn malformed_pattern_is_rejected_with_reason() {
    use BadPattern as B;
    for (text, why) in [
        ("", B::NotAbsolute),
        ("a", B::NotAbsolute),
        ("*", B::NotAbsolute),
        ("https://a/b", B::NotAbsolute),
        ("/a**", B::DoubleStarPlace),
        ("/**a", B::DoubleStarPlace),
        ("/***", B::DoubleStarPlace),
        ("/a/**b/c", B::DoubleStarPlace),
        ("/**%2Fa", B::DoubleStarPlace),
        ("//", B::EmptySegment),
        ("/a//b", B::EmptySegment),
        ("/a//", B::EmptySegment),
        ("/.", B::DotSegment),
        ("/a/../b", B::DotSegment),
        ("/%2e%2e", B::DotSegment),
        ("/a?b", B::Query),
        ("/a#b", B::Path(BadPath::Fragment)),
        ("/a b", B::Path(BadPath::Whitespace)),
        ("/a%", B::Path(BadPath::BadPercent)),
        ("/a%2541", B::Path(BadPath::DoubleEncoded)),
        ("/a\\b", B::Path(BadPath::Backslash)),
        ("/a%00", B::Path(BadPath::Control)),
        ("/%ff", B::Path(BadPath::NotUtf8)),
        ("/a%2F..", B::Path(BadPath::EncodedSlash)),
        ("/..;a", B::Path(BadPath::HiddenSegment)),
        ("/a;x%2Fb", B::Path(BadPath::EncodedSlash)),
        ("/a%3B*%2Fb", B::Path(BadPath::EncodedSlash)),
        ("/a;x/b%3Bc", B::Path(BadPath::MixedParameters)),
    ] {
        assert_eq!(PathPattern::parse(text), Err(why), "{text:?}");
    }
}

#[test]
fn methods_are_compared_exactly() {
    let set = MethodSet::parse(["GET", "PROPFIND"]).unwrap();
    for (name, yes) in [
        ("GET", true),
        ("PROPFIND", true),
        ("get", false),
        ("Get", false),
        ("HEAD", false),
        ("propfind", false),
    ] {
        assert_eq!(set.contains(&method(name)), yes, "{name}");
    }
    assert!(MethodSet::ANY.contains(&method("x")));
    assert!(MethodSet::parse([]).unwrap().is_any());
    assert_eq!(
        MethodSet::parse(["post"]),
        Err(BadMethod::Case("POST".into()))
    );
    for bad in ["", "GET ", "G\nT", "G/T", "é", &"A".repeat(33)] {
        assert_eq!(Method::parse(bad), Err(BadMethod::NotToken), "{bad:?}");
    }
}

#[test]
fn first_matching_deny_wins_and_then_allow_must_match() {
    let rules = EndpointRules {
        allow: vec![rule(&["GET"], &["/**"]), rule(&["POST"], &["/a"])],
        deny: vec![
            rule(&[], &["/secret/**"]),
            rule(&["DELETE"], &[]),
            rule(&["GET"], &["/secret/x", "/y"]),
        ],
    };
    let judge = |m: &str, p: &str| {
        rules
            .judge(&method(m), &path(p))
            .map_err(|refusal| (refusal, refusal.reason()))
    };
    assert_eq!(judge("GET", "/a"), Ok(()));
    assert_eq!(judge("POST", "/a"), Ok(()));
    assert_eq!(
        judge("GET", "/secret/x"),
        Err((EndpointRefusal::Denied(&rules.deny[0]), Reason::PathDenied))
    );
    assert_eq!(
        judge("DELETE", "/a"),
        Err((
            EndpointRefusal::Denied(&rules.deny[1]),
            Reason::MethodDenied
        ))
    );
    assert_eq!(
        judge("GET", "/y/"),
        Err((EndpointRefusal::Denied(&rules.deny[2]), Reason::PathDenied))
    );
    assert_eq!(
        judge("POST", "/b"),
        Err((EndpointRefusal::Method, Reason::MethodDenied))
    );
    let only = EndpointRules {
        allow: vec![rule(&["GET"], &["/a"])],
        deny: vec![],
    };
    assert_eq!(
        only.judge(&method("GET"), &path("/b")),
        Err(EndpointRefusal::Path)
    );
    assert_eq!(
        EndpointRules::default().judge(&method("X"), &path("/b")),
        Ok(())
    );
}

#[test]
fn hostile_pattern_and_path_take_polynomial_time() {
    let stars = format!("/{}b", "a*".repeat(200));
    assert!(!pattern(&stars).covers(&path(&format!("/{}", "a".repeat(4_000)))));
    let many = format!("{}/b", "/**/a".repeat(200));
    assert!(!pattern(&many).covers(&path(&"/a".repeat(2_000))));
}

/// A simple recursive implementation of matching, for comparison.
fn naive(pattern: &[&str], path: &[&str]) -> bool {
    fn glob(pattern: &[u8], text: &[u8]) -> bool {
        match pattern {
            [] => text.is_empty(),
            [b'*', rest @ ..] => (0..=text.len()).any(|skip| glob(rest, &text[skip..])),
            [byte, rest @ ..] => text.first() == Some(byte) && glob(rest, &text[1..]),
        }
    }
    match pattern {
        [] => path.is_empty(),
        ["**", rest @ ..] => (0..=path.len()).any(|skip| naive(rest, &path[skip..])),
        [segment, rest @ ..] => {
            !path.is_empty()
                && glob(segment.as_bytes(), path[0].as_bytes())
                && naive(rest, &path[1..])
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3_000))]

    #[test]
    fn matching_agrees_with_naive_implementation(
        wanted in proptest::collection::vec(prop_oneof![Just("**".to_owned()), Just("*".to_owned()), "[ab](\\*[ab]){0,2}\\*?"], 0..6),
        given in proptest::collection::vec("[ab]{1,4}", 0..6),
    ) {
        let wanted: Vec<&str> = wanted.iter().map(String::as_str).collect();
        let given: Vec<&str> = given.iter().map(String::as_str).collect();
        let pattern = pattern(&format!("/{}", wanted.join("/")));
        let path = path(&format!("/{}", given.join("/")));
        prop_assert_eq!(pattern.covers(&path), naive(&wanted, &given));
        prop_assert_eq!(pattern.touches(&path), naive(&wanted, &given));
    }

    #[test]
    fn covered_path_is_also_touched(
        wanted in "/([ab*;]|%2F|/){0,10}",
        given in "/([ab;]|%2F|/){0,10}",
    ) {
        if let (Ok(pattern), Ok(path)) = (PathPattern::parse(&wanted), CleanPath::parse(&given)) {
            prop_assert!(!pattern.covers(&path) || pattern.touches(&path));
        }
    }

    #[test]
    fn parsing_pattern_never_panics(text in "/?\\PC{0,20}|/[%*/.;2Fa]{0,12}") {
        let _ = PathPattern::parse(&text);
    }
}
