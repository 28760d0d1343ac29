use proptest::prelude::*;

use super::*;
use crate::endpoint::{EndpointRule, MethodSet, PathPattern};

fn host(text: &str) -> Host {
    Host::parse(text).unwrap()
}

fn rule(pattern: &str) -> HostRule {
    HostRule::new(HostPattern::parse(pattern).unwrap())
}

fn endpoint(methods: &[&str], paths: &[&str]) -> EndpointRule {
    EndpointRule {
        methods: MethodSet::parse(methods.iter().copied()).unwrap(),
        paths: paths
            .iter()
            .map(|text| PathPattern::parse(text).unwrap())
            .collect(),
    }
}

fn target(method: &str, host_text: &str, port: u16, path: &str) -> Target {
    Target {
        sandbox: SandboxId::parse("a").unwrap(),
        method: Method::parse(method).unwrap(),
        host: host(host_text),
        port,
        path: CleanPath::parse(path).unwrap(),
        program: None,
    }
}

fn winner(list: &Allowlist, text: &str) -> Option<String> {
    list.lookup(&host(text))
        .map(|rules| rules[0].pattern.to_string())
}

// Issue 14, number 5.
#[test]
fn rule_about_methods_or_paths_restricts_its_host_and_port() {
    let allowing = |pattern: &str, allow: Vec<EndpointRule>| {
        let mut rule = rule(pattern);
        rule.endpoints.allow = allow;
        rule
    };
    let mut denying = rule("*.d.com");
    denying.endpoints.deny = vec![endpoint(&["DELETE"], &[])];
    let mut elsewhere = allowing("ports.com", vec![endpoint(&["GET"], &[])]);
    elsewhere.ports = vec![8443];
    let list = Allowlist::new(vec![
        rule("open.com"),
        allowing("every.com", vec![endpoint(&[], &["/**"])]),
        allowing("methods.com", vec![endpoint(&["GET"], &[])]),
        allowing("paths.com", vec![endpoint(&[], &["/v1/**"])]),
        allowing("*.wild.com", vec![endpoint(&["GET"], &[])]),
        rule("own.wild.com"),
        denying,
        rule("own.d.com"),
        rule("ports.com"),
        elsewhere,
    ]);
    for (name, port, restricted) in [
        ("open.com", 443, false),
        ("every.com", 443, false),
        ("methods.com", 443, true),
        ("paths.com", 80, true),
        ("a.wild.com", 443, true),
        // A more specific pattern replaces the allow rules of a wider one, not its deny rules.
        ("own.wild.com", 443, false),
        ("a.d.com", 443, true),
        ("own.d.com", 443, true),
        ("ports.com", 443, false),
        ("ports.com", 8443, true),
        ("unknown.com", 443, false),
    ] {
        let found = list.restricts_endpoints(&host(name), port);
        assert_eq!(found, restricted, "{name}:{port}");
    }
}

#[test]
fn lookup_returns_most_specific_pattern() {
    let list = Allowlist::new(vec![
        rule("*.x.com"),
        rule("*.b.x.com"),
        rule("a.b.x.com"),
        rule("192.0.2.7"),
    ]);
    for (given, wins) in [
        ("a.b.x.com", Some("a.b.x.com")),
        ("A.B.X.com.", Some("a.b.x.com")),
        ("z.b.x.com", Some("*.b.x.com")),
        ("y.z.b.x.com", Some("*.b.x.com")),
        ("b.x.com", Some("*.x.com")),
        ("x.a.b.x.com", Some("*.b.x.com")),
        ("x.com", None),
        ("com", None),
        ("ax.com", None),
        ("x.com.evil.example", None),
        ("192.0.2.7", Some("192.0.2.7")),
        ("0xc0000207", Some("192.0.2.7")),
        ("::ffff:192.0.2.7", Some("192.0.2.7")),
        ("64:ff9b::192.0.2.7", None),
        ("192.0.2.8", None),
    ] {
        assert_eq!(winner(&list, given).as_deref(), wins, "{given}");
    }
}

#[test]
fn refusal_has_reason_rule_and_message() {
    let mut limited = rule("api.x.com");
    limited.endpoints.allow = vec![endpoint(&["GET"], &["/v1/**"])];
    limited.endpoints.deny = vec![endpoint(&[], &["/v1/admin/**"])];
    let mut git = rule("git.x.com");
    git.programs = vec!["git".into(), "/opt/git-lfs".into()];
    let mut wide = rule("*.y.com");
    wide.ports = vec![8443];
    let list = Allowlist::new(vec![limited, git, wide]);

    for (wanted, reason, name) in [
        (
            target("GET", "x.com", 443, "/"),
            Reason::HostDenied,
            "allowlist",
        ),
        (
            target("GET", "y.com", 8443, "/"),
            Reason::HostDenied,
            "allowlist:*.y.com",
        ),
        (
            target("GET", "10.0.0.1", 80, "/"),
            Reason::IpLiteral,
            "allowlist",
        ),
        (
            target("GET", "a.y.com", 443, "/"),
            Reason::PortDenied,
            "allowlist:*.y.com",
        ),
        (
            target("GET", "api.x.com", 22, "/v1/a"),
            Reason::PortDenied,
            "allowlist:api.x.com",
        ),
        (
            target("POST", "api.x.com", 443, "/v1/a"),
            Reason::MethodDenied,
            "allowlist:api.x.com",
        ),
        (
            target("get", "api.x.com", 443, "/v1/a"),
            Reason::MethodDenied,
            "allowlist:api.x.com",
        ),
        (
            target("GET", "api.x.com", 443, "/v2"),
            Reason::PathDenied,
            "allowlist:api.x.com",
        ),
        (
            target("GET", "api.x.com", 443, "/v1/%61dmin;x/y"),
            Reason::PathDenied,
            "allowlist:api.x.com",
        ),
        (
            target("GET", "git.x.com", 443, "/"),
            Reason::ProgramDenied,
            "allowlist:git.x.com",
        ),
    ] {
        let denial = list.judge(wanted.clone()).unwrap_err();
        assert_eq!(
            (denial.reason, denial.rule.as_str()),
            (reason, name),
            "{wanted:?}"
        );
        assert!(denial.message.ends_with('.'), "{}", denial.message);
    }
}

#[test]
fn permit_owns_target_and_names_rule() {
    let mut scanned = rule("*.x.com");
    scanned.scan = Some("strict".into());
    let list = Allowlist::new(vec![scanned]);
    let wanted = target("GET", "a.x.com", 80, "/a/../b?q=1");
    let permit = list.judge(wanted.clone()).unwrap();
    assert_eq!(permit.target(), &wanted);
    assert_eq!(permit.rule().as_str(), "allowlist:*.x.com");
    assert_eq!(permit.scan(), Some("strict"));
    assert_eq!(permit.into_target().path.target(), "/b?q=1");
}

#[test]
fn rules_of_one_host_apply_in_file_order_and_deny_wins() {
    let mut first = rule("x.com");
    first.name = "first".into();
    first.endpoints.allow = vec![endpoint(&["GET"], &["/a/**"])];
    let mut second = rule("x.com");
    second.name = "second".into();
    second.endpoints.allow = vec![endpoint(&["POST"], &["/b"]), endpoint(&["GET"], &["/a/x"])];
    second.endpoints.deny = vec![endpoint(&[], &["/a/secret"])];
    let list = Allowlist::new(vec![first, rule("y.com"), second]);

    let judged = |method, path| list.judge(target(method, "x.com", 443, path));
    assert_eq!(judged("GET", "/a/x").unwrap().rule().as_str(), "first");
    assert_eq!(judged("POST", "/b").unwrap().rule().as_str(), "second");
    let denial = judged("GET", "/a/secret").unwrap_err();
    assert_eq!(
        (denial.reason, denial.rule.as_str()),
        (Reason::PathDenied, "second")
    );
    assert_eq!(
        denial.evidence.as_deref(),
        Some("deny any method /a/secret")
    );
    let denial = judged("GET", "/b").unwrap_err();
    assert_eq!(
        (denial.reason, denial.rule.as_str()),
        (Reason::MethodDenied, "second")
    );
    assert_eq!(list.rules().count(), 3);
}

#[test]
fn deny_of_wider_pattern_is_not_lifted_by_narrower_one() {
    let mut wide = rule("*.x.com");
    wide.endpoints.deny = vec![endpoint(&["DELETE"], &[])];
    let list = Allowlist::new(vec![wide, rule("*.b.x.com"), rule("a.b.x.com")]);
    for name in ["a.b.x.com", "z.b.x.com", "z.x.com"] {
        let denial = list.judge(target("DELETE", name, 443, "/")).unwrap_err();
        assert_eq!(denial.reason, Reason::MethodDenied, "{name}");
        assert_eq!(denial.rule.as_str(), "allowlist:*.x.com", "{name}");
        let allowed = list.judge(target("GET", name, 443, "/"));
        assert!(allowed.is_ok(), "{name}: {allowed:?}");
    }
}

#[test]
fn rule_that_denies_everything_denies_the_name() {
    let denying = |pattern: &str, paths: &[&str]| {
        let mut rule = rule(pattern);
        rule.endpoints.deny = vec![endpoint(&[], paths)];
        rule
    };
    let mut of_some = denying("program.x.com", &[]);
    of_some.programs = vec!["git".into()];
    let mut odd_port = denying("port.x.com", &[]);
    odd_port.ports = vec![8443];
    let mut two = rule("two.x.com");
    two.ports = vec![443, 8443];
    let list = Allowlist::new(vec![
        rule("*.x.com"),
        denying("no.x.com", &[]),
        denying("never.x.com", &["/a", "/**"]),
        denying("some.x.com", &["/a/**"]),
        denying("*.bad.x.com", &[]),
        rule("granted.bad.x.com"),
        of_some,
        odd_port,
        rule("port.x.com"),
        denying("two.x.com", &[]),
        two,
    ]);
    for (name, denied) in [
        ("a.x.com", false),
        ("no.x.com", true),
        ("never.x.com", true),
        ("some.x.com", false),
        ("bad.x.com", false),
        ("a.bad.x.com", true),
        ("granted.bad.x.com", true),
        ("program.x.com", false),
        ("port.x.com", false),
        ("two.x.com", false),
    ] {
        let judged = list.judge_host(&host(name)).map(drop);
        assert_eq!(judged.is_err(), denied, "{name}: {judged:?}");
        assert_eq!(list.judge_alias(&host(name)), judged, "{name}");
        let decided = list.judge(target("GET", name, 443, "/b"));
        let unread = list.judge_unread(&host(name), 443, Some("/bin/git"));
        let on_port = denied || name == "two.x.com";
        assert_eq!(unread.is_err(), on_port, "{name}: {unread:?}");
        assert_eq!(
            decided.is_err(),
            on_port || name == "program.x.com",
            "{name}: {decided:?}"
        );
    }
    let elsewhere = host("cdn.example");
    assert!(list.judge_host(&elsewhere).is_err());
    assert_eq!(list.judge_alias(&elsewhere), Ok(()), "no rule denies it");
    let denial = list.judge_alias(&host("a.bad.x.com")).unwrap_err();
    assert_eq!(denial.rule.as_str(), "allowlist:*.bad.x.com");
    assert_eq!(denial.reason, Reason::HostDenied);
}

#[test]
fn rule_for_another_port_is_ignored() {
    let mut odd = rule("x.com");
    odd.ports = vec![8080];
    odd.endpoints.deny = vec![endpoint(&[], &["/**"])];
    let list = Allowlist::new(vec![odd, rule("x.com")]);
    assert!(list.judge(target("GET", "x.com", 443, "/a")).is_ok());
    assert!(list.judge(target("GET", "x.com", 8080, "/a")).is_err());
    assert!(list.judge_port(&host("x.com"), 8080).is_ok());
    assert!(list.judge_port(&host("x.com"), 22).is_err());
    assert!(list.judge_host(&host("x.com")).is_ok());
}

#[test]
fn program_matches_by_file_name_or_path_and_unknown_is_refused() {
    let mut git = rule("x.com");
    git.programs = vec!["git".into(), "/opt/lfs".into()];
    git.endpoints.deny = vec![endpoint(&[], &["/secret"])];
    let mut all = rule("x.com");
    all.endpoints.allow = vec![endpoint(&[], &["/open/**"]), endpoint(&[], &["/secret"])];
    let list = Allowlist::new(vec![git, all]);
    let judged = |program: Option<&str>, path| {
        let wanted = target("GET", "x.com", 443, path);
        let program = program.map(str::to_owned);
        list.judge(Target { program, ..wanted }).is_ok()
    };
    for (program, path, yes) in [
        (Some("git"), "/a", true),
        (Some("/usr/bin/git"), "/a", true),
        (Some("/opt/lfs"), "/a", true),
        (Some("/home/lfs"), "/a", false),
        (Some("/usr/bin/git/x"), "/a", false),
        (Some("git "), "/a", false),
        (None, "/a", false),
        (None, "/open/x", true),
        (Some("curl"), "/secret", true),
        (Some("git"), "/secret", false),
        (None, "/secret", false),
    ] {
        assert_eq!(judged(program, path), yes, "{program:?} {path}");
    }
}

#[test]
fn unread_connection_is_decided_by_program_too() {
    let mut git = rule("x.com");
    git.programs = vec!["git".into()];
    git.ports = vec![443];
    let mut any = rule("x.com");
    any.ports = vec![8443];
    let list = Allowlist::new(vec![git, any]);
    for (port, program, reason) in [
        (443, Some("/usr/bin/git"), None),
        (443, Some("/usr/bin/curl"), Some(Reason::ProgramDenied)),
        (443, None, Some(Reason::ProgramDenied)),
        (8443, Some("/usr/bin/curl"), None),
        (8443, None, None),
        (22, Some("/usr/bin/git"), Some(Reason::PortDenied)),
    ] {
        let judged = list.judge_unread(&host("x.com"), port, program);
        let refused = judged.err().map(|denial| denial.reason);
        assert_eq!(refused, reason, "{port} {program:?}");
    }
}

#[test]
fn git_rule_matches_helpers_of_git() {
    for (program, is_git) in [
        ("/usr/bin/git", true),
        ("/usr/lib/git-core/git-remote-http", true),
        ("/usr/libexec/git-core/git-remote-https", true),
        ("/usr/lib/git-core/curl", false),
        ("/usr/bin/git-remote-http", false),
        ("/tmp/not-git-core/git-remote-http", false),
        ("git-core/git-remote-http", false),
    ] {
        assert_eq!(is_program(program, "git"), is_git, "{program}");
    }
    assert!(is_program(
        "/usr/lib/git-core/git-remote-http",
        "git-remote-http"
    ));
    assert!(!is_program("/usr/lib/git-core/git-remote-http", "curl"));
}

#[test]
fn empty_list_allows_nothing() {
    let list = Allowlist::default();
    assert!(list.lookup(&host("a.b.c.example")).is_none());
    assert_eq!(
        list.judge(target("GET", "a", 80, "/")).unwrap_err().reason,
        Reason::HostDenied
    );
}

#[test]
fn name_with_most_labels_can_be_listed() {
    let deepest = "a.".repeat(126) + "b";
    let list = Allowlist::new(vec![rule(&format!("*.{}", &deepest[2..]))]);
    assert!(list.lookup(&host(&deepest)).is_some());
    assert!(list.lookup(&host(&deepest[2..])).is_none());
}

proptest! {
    #[test]
    fn lookup_agrees_with_matching_every_pattern(
        patterns in proptest::collection::vec("(\\*\\.)?([ab]\\.){0,3}[ab]\\.[cd]", 0..12),
        name in "([ab]\\.){0,5}[cd]",
    ) {
        let list = Allowlist::new(patterns.iter().map(|text| rule(text)).collect());
        let host = host(&name);
        let best = patterns
            .iter()
            .map(|text| HostPattern::parse(text).unwrap())
            .filter(|pattern| pattern.matches(&host))
            .max_by_key(|pattern| match pattern {
                HostPattern::Exact(_) | HostPattern::Ip(_) => usize::MAX,
                HostPattern::Wildcard(suffix) => suffix.as_str().len(),
                HostPattern::Any => 0,
            });
        let found = list.lookup(&host).map(|rules| rules[0].pattern.clone());
        prop_assert_eq!(found, best);
    }
}

/// A rule that lets every name be read.
fn reads_everywhere() -> HostRule {
    let mut rule = HostRule::new(HostPattern::Any);
    rule.endpoints.allow = vec![endpoint(&["GET", "HEAD"], &[])];
    rule.reads_only = true;
    rule.name = "tier:open".into();
    rule
}

#[test]
fn rule_for_every_name_allows_reads_and_no_address() {
    let mut denied = rule("*.no.com");
    denied.endpoints.deny = vec![EndpointRule::default()];
    let list = Allowlist::new(vec![reads_everywhere(), rule("x.com"), denied]);
    for (method, host, allowed) in [
        ("GET", "any.example", true),
        ("HEAD", "any.example", true),
        ("POST", "any.example", false),
        ("PUT", "any.example", false),
        ("GET", "192.0.2.1", false),
        ("GET", "a.no.com", false),
        // A listed host has its own rules.
        ("POST", "x.com", true),
    ] {
        let judged = list.judge(target(method, host, 443, "/"));
        assert_eq!(judged.is_ok(), allowed, "{method} {host}");
    }
    let only_reads = |name: &str, port| list.allows_only_reads(&host(name), port);
    assert!(only_reads("any.example", 443));
    assert!(!only_reads("any.example", 25) && !only_reads("x.com", 443));
    let port = list.judge(target("GET", "any.example", 25, "/"));
    assert_eq!(port.unwrap_err().reason, Reason::PortDenied);

    let permit = list.judge(target("GET", "any.example", 443, "/")).unwrap();
    assert_eq!(permit.rule().as_str(), "tier:open");
    assert!(permit.check_read(false).is_ok());
    let denial = permit.check_read(true).unwrap_err();
    assert_eq!(
        (denial.reason, denial.rule.as_str()),
        (Reason::MethodDenied, "tier:open")
    );
    let listed = list.judge(target("GET", "x.com", 443, "/")).unwrap();
    assert!(listed.check_read(true).is_ok());
    // Files cannot contain the pattern.
    assert!(HostPattern::parse(&HostPattern::Any.to_string()).is_err());
}
