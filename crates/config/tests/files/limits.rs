//! Files that once took minutes to load, or produced very long messages. The test runner ends a
//! test that takes too long.

use super::{directory, load, load_in, no_env};

fn policy(yaml: &str) -> Result<config::Settings, String> {
    let dir = directory(&[
        (
            "palisade.yaml",
            "version: '1.0'\negress: {policy: p.yaml}\n",
        ),
        ("p.yaml", yaml),
    ]);
    load_in(dir.path(), &no_env)
}

#[test]
fn a_small_file_of_large_patterns_is_refused_quickly() {
    let aliases = ", *p".repeat(100);
    let mut yaml =
        format!("policy:\n  blocked_api_patterns:\n    A1: &b [&p '\\pL{{45}}'{aliases}]\n");
    for key in 2..40 {
        yaml.push_str(&format!("    A{key}: *b\n"));
    }
    assert!(yaml.len() < 1400);
    let problems = policy(&yaml).unwrap_err();
    assert!(
        problems.contains("its compiled form is too large"),
        "{problems}"
    );

    // Ordinary patterns are far from the limit, and the message has a useful hint.
    let list = |pattern: &str| {
        policy(&format!(
            "policy: {{blocked_api_patterns: {{GET: ['{pattern}']}}}}\n"
        ))
    };
    for pattern in [
        r"^/repos/[^/]+/[^/]+/pulls/\d+/merge$",
        r"^/repos/\w+/x/(merge|merges)$",
        r"^/\w+/\w+$",
        r"(?-u)^/\w+/\w+/\w+/\w+$",
    ] {
        assert!(list(pattern).is_ok(), "{pattern}");
    }
    let problems = list(r"^(/\w{5}){5}$").unwrap_err();
    assert!(
        problems.ends_with("(?-u) at the start limits classes such as \\w to ASCII"),
        "{problems}"
    );
}

#[test]
fn patterns_are_bounded_in_length_and_number() {
    let list =
        |pattern: &str| format!("policy: {{blocked_api_patterns: {{GET: ['{pattern}']}}}}\n");
    assert!(policy(&list(&"a".repeat(1024))).is_ok());
    let problems = policy(&list(&"a".repeat(1025))).unwrap_err();
    assert!(
        problems.ends_with("it is longer than 1024 bytes"),
        "{problems}"
    );

    let many = |count: usize| {
        let items: Vec<String> = (0..count).map(|n| format!("p{n}")).collect();
        policy(&format!(
            "policy: {{blocked_api_patterns: {{GET: [{}]}}}}\n",
            items.join(", ")
        ))
    };
    let settings = many(256).unwrap();
    let patterns = &settings.policy.policy.blocked_api_patterns["GET"];
    assert!(patterns[255].regex().is_match("/x/p255"));
    assert_eq!(
        many(257).unwrap_err(),
        "p.yaml:1:38: policy.blocked_api_patterns.GET has at most 256 items"
    );
    let methods: Vec<String> = (0..17).map(|n| format!("M{n}: [a]")).collect();
    let problems = policy(&format!(
        "policy: {{blocked_api_patterns: {{{}}}}}\n",
        methods.join(", ")
    ));
    assert_eq!(
        problems.unwrap_err(),
        "p.yaml:1:32: policy.blocked_api_patterns has at most 16 items"
    );
}

#[test]
fn very_many_mistakes_are_counted_and_only_the_first_reported() {
    let unset: String = (0..45_000).map(|n| format!("  - ${{N{n}}}\n")).collect();
    let unknown: String = (0..45_000).map(|n| format!("key{n}: 1\n")).collect();
    let long = format!("{}: 1\n", "k".repeat(3_000_000));
    for (yaml, count) in [
        (format!("version: '1.0'\nsandbox:\n  env:\n{unset}"), 45_000),
        (format!("version: '1.0'\n{unknown}"), 45_000),
        (format!("version: '1.0'\n{long}"), 1),
    ] {
        let problems = load(&yaml).unwrap_err();
        let lines: Vec<&str> = problems.lines().collect();
        if count == 1 {
            assert_eq!(lines.len(), 1);
        } else {
            assert_eq!(lines.len(), 201);
            assert!(
                lines[0].starts_with("palisade.yaml:2:")
                    || lines[0].starts_with("palisade.yaml:4:")
            );
            let more = format!("palisade.yaml: and {} more mistakes", count - 200);
            assert_eq!(lines[200], more);
        }
    }
}

#[test]
fn very_many_unset_secrets_are_counted_and_only_the_first_reported() {
    let unset: String = (0..1000).map(|n| format!("  k{n}: ${{N{n}}}\n")).collect();
    let settings = load(&format!("version: '1.0'\nsecrets:\n{unset}")).unwrap();
    assert_eq!(settings.secrets.len(), 1000);
    assert_eq!(settings.warnings.len(), 201);
}

#[test]
fn the_mistakes_of_every_file_are_counted_together() {
    let keys: String = (0..150).map(|n| format!("key{n}: 1\n")).collect();
    let dir = directory(&[
        (
            "palisade.yaml",
            &format!("version: '1.0'\negress: {{policy: p.yaml}}\n{keys}"),
        ),
        ("p.yaml", &keys),
    ]);
    let problems = config::load(Some(&dir.path().join("palisade.yaml")), &no_env).unwrap_err();
    assert_eq!(problems.len(), 201);
    let last = problems.iter().last().unwrap();
    assert_eq!(last.message, "and 100 more mistakes");
}
