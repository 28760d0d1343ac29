//! Held pushes: pushes that wait for an operator's answer.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use config::Settings;
use config::section::egress::UnknownHostAction;
use config::section::scan::GitAction;
use policy::answer::ApprovalAnswer;
use policy::push::{Findings, SecretFinding, SecretLocation};
use policy::reason::Reason;
use policy::verdict::{Denial, Grant, VerdictKind};
use testkit::wait::until;
use tokio::io::AsyncWriteExt;

use super::fixture::assert_nothing_held;
use super::operator::{ALLOW, TestOperator};
use crate::fakes::{connect, sandbox_id};
use crate::push::{
    FEATURE, PushFixture, ReaderInput, findings_unknown_without_upstream_trees, git, head,
};

const FORGE: &str = "forge.example/acme/app.git";
const MIRROR: &str = "palisade.internal/git/app";

/// Finds a secret in every push to a branch whose name begins with `ask`.
fn find_secrets(input: &ReaderInput) -> Result<Findings, Denial> {
    let mut updates = input.context.updates.iter();
    let secret = SecretFinding {
        rule: "some-key".to_owned(),
        place: SecretLocation::Ref(0),
    };
    let has_secret = updates.any(|update| update.name.to_string().starts_with("refs/heads/ask"));
    Ok(Findings {
        secrets: if has_secret { vec![secret] } else { Vec::new() },
        ..Findings::default()
    })
}

/// A gate that requires approval for pushes with secrets.
fn create_fixture(git: &str) -> (Arc<PushFixture>, Arc<TestOperator>) {
    let operator = TestOperator::new();
    let ask = |settings: &mut Settings| settings.git.scan = GitAction::Ask;
    let fixture = PushFixture::with_operator(operator.questions(), git, ask, find_secrets);
    (Arc::new(fixture), operator)
}

/// Applies settings with `git` as lines of the section `git`.
async fn reload(fixture: &PushFixture, git: &str) {
    let mut settings = fixture.settings(git);
    settings.git.scan = GitAction::Ask;
    fixture.reload(settings).await;
}

/// Pushes a branch in a task.
fn push(
    fixture: &Arc<PushFixture>,
    address: &'static str,
    name: &str,
) -> tokio::task::JoinHandle<String> {
    let (fixture, body) = (Arc::clone(fixture), fixture.body(name));
    tokio::spawn(async move { fixture.push_to(address, &body).await })
}

/// Waits until the sandbox has no held request and its resources are free.
async fn assert_free(fixture: &PushFixture, operator: &TestOperator) {
    let unused = policy::id::SandboxId::parse("unused").unwrap();
    let [used, unused] = [&sandbox_id(), &unused].map(|id| fixture.services.sandbox(id).unwrap());
    assert_nothing_held(&used, &unused, operator).await;
}

/// The verdict, reason and rule of the only record about the forge's `git-receive-pack`.
fn only_push(fixture: &PushFixture) -> (Option<VerdictKind>, Option<Reason>, Option<String>) {
    let records = fixture.records.0.lock().unwrap();
    let pushes: Vec<_> = records
        .iter()
        .filter(|record| record.operation.as_deref() == Some("push"))
        .collect();
    let [record] = pushes.as_slice() else {
        panic!("{records:?}");
    };
    let rule = record.rule.as_ref().map(ToString::to_string);
    (record.verdict, record.reason, rule)
}

#[tokio::test(flavor = "multi_thread")]
async fn held_push_follows_the_operators_answer() {
    for (answer, expected, reason) in [
        (ALLOW, "ok refs/heads/ask", None),
        (
            ApprovalAnswer::Deny,
            "ng refs/heads/ask palisade: ask_denied",
            Some(Reason::AskDenied),
        ),
        (
            ApprovalAnswer::TimedOut,
            "ng refs/heads/ask palisade: ask_timeout",
            Some(Reason::AskTimeout),
        ),
    ] {
        let (fixture, operator) = create_fixture("  restricted_paths: []\n");
        let pushing = push(&fixture, FORGE, "refs/heads/ask");
        let open = operator.next_question().await;
        assert_eq!(open.question.grants, Grant::Push);
        assert_eq!(open.question.rules, ["secret:some-key".into()]);
        assert_eq!(fixture.forge.pushed_bytes(), 0);
        open.answer(answer);
        let response = pushing.await.unwrap();
        assert!(response.contains(expected), "{response}");
        assert_free(&fixture, &operator).await;
        assert_eq!(only_push(&fixture).1, reason);
        assert_eq!(fixture.refs().contains("refs/heads/ask"), reason.is_none());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn four_held_pushes_do_not_block_a_fifth() {
    let (fixture, operator) = create_fixture("  restricted_paths: []\n");
    let mut held = Vec::new();
    for number in 1..=4 {
        let pushing = push(&fixture, FORGE, &format!("refs/heads/ask-{number}"));
        held.push((pushing, operator.next_question().await));
    }
    let state = fixture.services.sandbox(&sandbox_id()).unwrap();
    assert_eq!(state.in_flight.held(), 4);
    assert!(state.spooled.used_bytes() > 0);
    let response = push(&fixture, FORGE, FEATURE).await.unwrap();
    assert!(response.contains("ok refs/heads/feature"), "{response}");
    assert_eq!((state.in_flight.held(), operator.waiting()), (4, 4));
    for (pushing, open) in held {
        open.answer(ALLOW);
        let response = pushing.await.unwrap();
        assert!(response.contains("ok refs/heads/ask-"), "{response}");
    }
    assert_free(&fixture, &operator).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn push_decided_three_times_takes_one_push_token() {
    let git = "  restricted_paths: []\n";
    let (fixture, operator) = create_fixture(git);
    let pushing = push(&fixture, FORGE, "refs/heads/ask");
    let first = operator.next_question().await;
    let first_question_time = fixture.services.clock().tick();
    reload(&fixture, git).await;
    let second = operator.next_question().await;
    first.wait_until_withdrawn().await;
    second.answer(ALLOW);
    let response = pushing.await.unwrap();
    assert!(response.contains("ok refs/heads/ask"), "{response}");
    // Counts the tokens as of the first question. A token that was taken later than this time would
    // not be refilled at all.
    let state = fixture.services.sandbox(&sandbox_id()).unwrap();
    let mut left = 0;
    while state.take_push(first_question_time).is_ok() {
        left += 1;
    }
    assert_eq!(left, 9);
    assert_eq!(fixture.reader.inputs.lock().unwrap().len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn client_that_hangs_up_ends_the_hold_of_its_push() {
    let (fixture, operator) = create_fixture("  restricted_paths: []\n");
    let body = fixture.body("refs/heads/ask");
    let mut client = connect(&fixture.services, None);
    client.write_all(&head(FORGE, &body)).await.unwrap();
    client.write_all(&body).await.unwrap();
    let open = operator.next_question().await;
    drop(client);
    open.wait_until_withdrawn().await;
    assert_free(&fixture, &operator).await;
    let ask_record = (
        Some(VerdictKind::Ask),
        None,
        Some("secret:some-key".to_owned()),
    );
    assert_eq!(only_push(&fixture), ask_record);
    assert_eq!(fixture.forge.pushed_bytes(), 0);
}

/// Settings with a mirror of the forge's repository `repository`.
fn mirror(repository: &str) -> String {
    format!(
        "  restricted_paths: []\n  \
         mirrors: [{{name: app, upstream: 'http://forge.example/{repository}.git'}}]\n"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn push_to_a_mirror_is_held_and_then_sent() {
    let (fixture, operator) = create_fixture(&mirror("acme/app"));
    let pushing = push(&fixture, MIRROR, "refs/heads/ask");
    let open = operator.next_question().await;
    assert_eq!(fixture.forge.pushed_bytes(), 0);
    open.answer(ALLOW);
    let response = pushing.await.unwrap();
    assert!(response.contains("ok refs/heads/ask"), "{response}");
    assert!(fixture.refs().contains("refs/heads/ask"));
    assert_free(&fixture, &operator).await;
    assert_eq!(only_push(&fixture).0, Some(VerdictKind::Allow));

    let pushing = push(&fixture, MIRROR, "refs/heads/ask-again");
    operator.next_question().await.answer(ApprovalAnswer::Deny);
    let response = pushing.await.unwrap();
    assert!(response.contains("palisade: ask_denied"), "{response}");
    assert!(!fixture.refs().contains("refs/heads/ask-again"));
}

#[tokio::test(flavor = "multi_thread")]
async fn reload_that_moves_a_mirror_moves_its_held_push() {
    let (fixture, operator) = create_fixture(&mirror("acme/app"));
    git(
        &fixture.path("forge/acme"),
        &["clone", "-q", "--bare", "app.git", "moved.git"],
    );
    let moved = fixture.path("forge/acme/moved.git");
    git(&moved, &["config", "http.receivepack", "true"]);
    let pushing = push(&fixture, MIRROR, "refs/heads/ask");
    let first = operator.next_question().await;
    reload(&fixture, &mirror("acme/moved")).await;
    let second = operator.next_question().await;
    first.wait_until_withdrawn().await;
    second.answer(ALLOW);
    let response = pushing.await.unwrap();
    assert!(response.contains("ok refs/heads/ask"), "{response}");
    assert!(git(&moved, &["for-each-ref"]).contains("refs/heads/ask"));
    assert!(!fixture.refs().contains("refs/heads/ask"));
}

/// A gate whose allowlist does not have the forge, and which requires approval for unknown hosts.
async fn create_unlisted_fixture(
    find: impl Fn(&ReaderInput) -> Result<Findings, Denial> + Send + Sync + 'static,
) -> (Arc<PushFixture>, Arc<TestOperator>) {
    let operator = TestOperator::new();
    let fixture = PushFixture::with_operator(operator.questions(), "", |_| {}, find);
    let path = fixture.path("palisade.yaml");
    let text = std::fs::read_to_string(&path).unwrap();
    let text = text.replace("host: forge.example", "host: other.example");
    std::fs::write(&path, text).unwrap();
    let mut settings = config::load(Some(&path), &|_| None).unwrap();
    settings.egress.unknown = UnknownHostAction::Ask;
    fixture.reload(settings).await;
    (Arc::new(fixture), operator)
}

#[tokio::test(flavor = "multi_thread")]
async fn approved_host_is_queried_for_the_trees_of_a_push() {
    let (fixture, operator) =
        create_unlisted_fixture(findings_unknown_without_upstream_trees).await;
    let pushing = push(&fixture, FORGE, FEATURE);
    let open = operator.next_question().await;
    assert_eq!(open.question.grants, Grant::Host);
    open.answer(ALLOW);
    let response = pushing.await.unwrap();
    assert!(response.contains("ok refs/heads/feature"), "{response}");
    assert_free(&fixture, &operator).await;
    assert_eq!(only_push(&fixture).0, Some(VerdictKind::Allow));
}

#[tokio::test(flavor = "multi_thread")]
async fn approval_that_ends_while_a_push_is_read_asks_again() {
    let gate = Arc::<OnceLock<Arc<PushFixture>>>::default();
    let reader = Arc::clone(&gate);
    let (fixture, operator) = create_unlisted_fixture(move |_| {
        // The end of an approval replaces the policy snapshot of the sandbox, as a reload does.
        let services = &reader.get().unwrap().services;
        let state = services.sandbox(&sandbox_id()).unwrap();
        let has_ended = || {
            let own = services.snapshot_for(Some(&state)).number;
            (own != services.policy().load().number).then_some(())
        };
        tokio::task::block_in_place(|| until("the end of the approval", has_ended));
        Ok(Findings::default())
    })
    .await;
    assert!(gate.set(Arc::clone(&fixture)).is_ok());
    let pushing = push(&fixture, FORGE, FEATURE);
    let open = operator.next_question().await;
    let soon = fixture.services.clock().tick() + Duration::from_millis(500);
    open.answer(ApprovalAnswer::Allow { until: Some(soon) });
    let again = operator.next_question().await;
    assert_eq!(fixture.forge.pushed_bytes(), 0);
    again.answer(ApprovalAnswer::Deny);
    let response = pushing.await.unwrap();
    assert!(response.contains("ask_denied"), "{response}");
    assert_free(&fixture, &operator).await;
    assert_eq!(only_push(&fixture).1, Some(Reason::AskDenied));
}
