use serde_json::json;

use super::super::Module;
use super::*;

fn bundle(text: &str, settings: EvaluationSettings) -> PolicyBundle {
    let module = Module {
        name: "policy.rego".to_owned(),
        text: format!("package http.authz\n{text}"),
    };
    let many: Vec<u32> = (0..300).collect();
    let bundle = Bundle::compile("mine", "http/authz", &[module], &json!({"many": many}));
    PolicyBundle::new(bundle.unwrap(), settings)
}

const STRICT: EvaluationSettings = EvaluationSettings {
    budget: Budget::with_time_limit(Duration::from_secs(60)),
    is_enforced: true,
    fail_open: false,
};

#[test]
fn decision_has_matching_outcome() {
    let outcome = |policy: &str| {
        let bundle = bundle(policy, STRICT);
        bundle.outcome(bundle.decide_blocking(&json!({"x": 1})))
    };
    assert_eq!(outcome("allow := true"), BundleOutcome::Pass);
    let change = outcome("action := \"redact\"\noutputs := {\"modified_data\": 1}");
    assert!(
        matches!(change, BundleOutcome::Change { outputs, .. } if outputs == json!({"modified_data": 1}))
    );
    let asked = outcome("decision := {\"action\": \"ask\", \"reason\": \"why\"}");
    assert!(
        matches!(asked, BundleOutcome::Ask(details) if details.message.as_deref() == Some("why"))
    );
    for (policy, reason, message) in [
        (
            "allow := false\nreason := \"why\"",
            Reason::RegoDenied,
            "why",
        ),
        ("allow if input.none", Reason::RegoDenied, ""),
        ("decision := 1", Reason::RegoError, ""),
    ] {
        let BundleOutcome::Deny(denial) = outcome(policy) else {
            panic!("{policy} refuses");
        };
        assert_eq!(denial.reason, reason, "{policy}");
        assert_eq!(denial.rule.as_str(), "rego:mine");
        assert!(denial.message.contains(message), "{}", denial.message);
    }
}

#[test]
fn failure_is_enforced_unless_fail_open() {
    let failed = Denial::new(Reason::RegoError, "rego:mine");
    let denied = Denial::new(Reason::RegoDenied, "rego:mine");
    for (counts, fail_open, by_failure, by_denial) in [
        (true, false, true, true),
        (true, true, false, true),
        (false, false, false, false),
        (false, true, false, false),
    ] {
        let settings = EvaluationSettings {
            is_enforced: counts,
            fail_open,
            ..STRICT
        };
        let bundle = bundle("allow := true", settings);
        assert_eq!(
            bundle.is_outcome_enforced(Some(&failed)),
            by_failure,
            "{settings:?}"
        );
        assert_eq!(
            bundle.is_outcome_enforced(Some(&denied)),
            by_denial,
            "{settings:?}"
        );
        assert_eq!(bundle.is_outcome_enforced(None), counts, "{settings:?}");
    }
}

#[test]
fn slow_policy_is_not_decided_with_quick_budget() {
    let slow = "allow if count([1 | some a in data.many; some b in data.many; a + b == 1]) == 2";
    let bundle = bundle(slow, STRICT);
    assert_eq!(bundle.decide_quickly(&json!({})), None);
    let decided = bundle.decide_blocking(&json!({}));
    assert_eq!(decided, Decision::Allow(DecisionDetails::default()));
}

#[test]
fn failures_are_reported_at_powers_of_two() {
    let bundle = bundle("allow := true", STRICT);
    let reported: Vec<u64> = (0..20).filter_map(|_| bundle.count_failure()).collect();
    assert_eq!(reported, [1, 2, 4, 8, 16]);
}
