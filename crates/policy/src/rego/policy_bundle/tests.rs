use serde_json::json;

use super::super::Module;
use super::*;

fn judge(text: &str, terms: Terms) -> PolicyBundle {
    let module = Module {
        name: "policy.rego".to_owned(),
        text: format!("package http.authz\n{text}"),
    };
    let many: Vec<u32> = (0..300).collect();
    let bundle = Bundle::compile("mine", "http/authz", &[module], &json!({"many": many}));
    PolicyBundle::new(bundle.unwrap(), terms)
}

const STRICT: Terms = Terms {
    budget: Budget::of(Duration::from_secs(60)),
    counts: true,
    fail_open: false,
};

#[test]
fn what_follows_from_a_decision() {
    let told = |policy: &str| {
        let judge = judge(policy, STRICT);
        judge.understand(judge.at_length(&json!({"x": 1})))
    };
    assert_eq!(told("allow := true"), Outcome::Pass);
    let change = told("action := \"redact\"\noutputs := {\"modified_data\": 1}");
    assert!(
        matches!(change, Outcome::Change { outputs, .. } if outputs == json!({"modified_data": 1}))
    );
    let asked = told("decision := {\"action\": \"ask\", \"reason\": \"why\"}");
    assert!(matches!(asked, Outcome::Ask(said) if said.message.as_deref() == Some("why")));
    for (policy, reason, says) in [
        (
            "allow := false\nreason := \"why\"",
            Reason::RegoDenied,
            "why",
        ),
        ("allow if input.none", Reason::RegoDenied, ""),
        ("decision := 1", Reason::RegoError, ""),
    ] {
        let Outcome::Deny(denial) = told(policy) else {
            panic!("{policy} refuses");
        };
        assert_eq!(denial.reason, reason, "{policy}");
        assert_eq!(denial.rule.as_str(), "rego:mine");
        assert!(denial.message.contains(says), "{}", denial.message);
    }
}

#[test]
fn a_failure_decides_unless_the_operator_lets_it_pass() {
    let failed = Denial::new(Reason::RegoError, "rego:mine");
    let denied = Denial::new(Reason::RegoDenied, "rego:mine");
    for (counts, fail_open, by_failure, by_denial) in [
        (true, false, true, true),
        (true, true, false, true),
        (false, false, false, false),
        (false, true, false, false),
    ] {
        let terms = Terms {
            counts,
            fail_open,
            ..STRICT
        };
        let judge = judge("allow := true", terms);
        assert_eq!(judge.decides(Some(&failed)), by_failure, "{terms:?}");
        assert_eq!(judge.decides(Some(&denied)), by_denial, "{terms:?}");
        assert_eq!(judge.decides(None), counts, "{terms:?}");
    }
}

#[test]
fn what_takes_long_is_not_decided_at_once() {
    let slow = "allow if count([1 | some a in data.many; some b in data.many; a + b == 1]) == 2";
    let judge = judge(slow, STRICT);
    assert_eq!(judge.at_once(&json!({})), None);
    let decided = judge.at_length(&json!({}));
    assert_eq!(decided, Decision::Allow(Said::default()));
}

#[test]
fn failures_are_told_ever_more_seldom() {
    let judge = judge("allow := true", STRICT);
    let told: Vec<u64> = (0..20).filter_map(|_| judge.count_failure()).collect();
    assert_eq!(told, [1, 2, 4, 8, 16]);
}
