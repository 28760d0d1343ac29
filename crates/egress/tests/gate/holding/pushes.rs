//! Pushes that wait for an operator's answer.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use config::Settings;
use config::section::egress::UnknownHostAction;
use config::section::scan::GitAction;
use policy::answer::Answer;
use policy::push::{Findings, Place as Whereabouts, Sighting};
use policy::reason::Reason;
use policy::verdict::{Denial, Grant, Word};
use testkit::wait::until;
use tokio::io::AsyncWriteExt;

use super::fixture::assert_nothing_held;
use super::operator::{ALLOW, TestOperator};
use crate::push::{FEATURE, Given, Place, git, head, unknown_without_bases};
use crate::stand_ins::{connect, sandbox};

const FORGE: &str = "forge.example/acme/app.git";
const MIRROR: &str = "palisade.internal/git/app";

/// Finds a secret in every push to a branch whose name begins with `ask`.
fn find_secrets(given: &Given) -> Result<Findings, Denial> {
    let mut updates = given.case.updates.iter();
    let secret = Sighting {
        rule: "some-key".to_owned(),
        place: Whereabouts::Ref(0),
    };
    let asks = updates.any(|update| update.name.to_string().starts_with("refs/heads/ask"));
    Ok(Findings {
        secrets: if asks { vec![secret] } else { Vec::new() },
        ..Findings::default()
    })
}

/// A gate that asks about secrets in pushes.
fn fixture(git: &str) -> (Arc<Place>, Arc<TestOperator>) {
    let operator = TestOperator::new();
    let ask = |settings: &mut Settings| settings.git.scan = GitAction::Ask;
    let place = Place::attended(operator.questions(), git, ask, find_secrets);
    (Arc::new(place), operator)
}

/// Puts the same settings, or others below `git`, in force.
async fn reload(place: &Place, git: &str) {
    let mut settings = place.settings(git);
    settings.git.scan = GitAction::Ask;
    place.reload(settings).await;
}

/// Pushes a branch in a task.
fn push(place: &Arc<Place>, address: &'static str, name: &str) -> tokio::task::JoinHandle<String> {
    let (place, body) = (Arc::clone(place), place.body(name));
    tokio::spawn(async move { place.push_to(address, &body).await })
}

/// Waits until nothing of the sandbox is held any more.
async fn assert_free(place: &Place, operator: &TestOperator) {
    let unused = policy::id::SandboxId::parse("unused").unwrap();
    let [used, unused] = [&sandbox(), &unused].map(|id| place.traffic.sandbox(id).unwrap());
    assert_nothing_held(&used, &unused, operator).await;
}

/// The verdict, reason and rule of the only record about the forge's `git-receive-pack`.
fn only_push(place: &Place) -> (Option<Word>, Option<Reason>, Option<String>) {
    let records = place.records.0.lock().unwrap();
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
async fn held_push_gets_what_the_operator_answered() {
    for (answer, said, reason) in [
        (ALLOW, "ok refs/heads/ask", None),
        (
            Answer::Deny,
            "ng refs/heads/ask palisade: ask_denied",
            Some(Reason::AskDenied),
        ),
        (
            Answer::TimedOut,
            "ng refs/heads/ask palisade: ask_timeout",
            Some(Reason::AskTimeout),
        ),
    ] {
        let (place, operator) = fixture("  restricted_paths: []\n");
        let pushing = push(&place, FORGE, "refs/heads/ask");
        let open = operator.next().await;
        assert_eq!(open.question.grants, Grant::Push);
        assert_eq!(open.question.rules, ["secret:some-key".into()]);
        assert_eq!(place.forge.pushed(), 0);
        open.answer(answer);
        let heard = pushing.await.unwrap();
        assert!(heard.contains(said), "{heard}");
        assert_free(&place, &operator).await;
        assert_eq!(only_push(&place).1, reason);
        assert_eq!(place.refs().contains("refs/heads/ask"), reason.is_none());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn four_held_pushes_leave_a_place_for_a_fifth() {
    let (place, operator) = fixture("  restricted_paths: []\n");
    let mut held = Vec::new();
    for number in 1..=4 {
        let pushing = push(&place, FORGE, &format!("refs/heads/ask-{number}"));
        held.push((pushing, operator.next().await));
    }
    let state = place.traffic.sandbox(&sandbox()).unwrap();
    assert_eq!(state.in_flight.held(), 4);
    assert!(state.spooled.level() > 0);
    let heard = push(&place, FORGE, FEATURE).await.unwrap();
    assert!(heard.contains("ok refs/heads/feature"), "{heard}");
    assert_eq!((state.in_flight.held(), operator.waiting()), (4, 4));
    for (pushing, open) in held {
        open.answer(ALLOW);
        let heard = pushing.await.unwrap();
        assert!(heard.contains("ok refs/heads/ask-"), "{heard}");
    }
    assert_free(&place, &operator).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn push_decided_three_times_takes_one_push_token() {
    let git = "  restricted_paths: []\n";
    let (place, operator) = fixture(git);
    let pushing = push(&place, FORGE, "refs/heads/ask");
    let first = operator.next().await;
    let asked = place.traffic.clock().tick();
    reload(&place, git).await;
    let second = operator.next().await;
    first.withdrawn().await;
    second.answer(ALLOW);
    let heard = pushing.await.unwrap();
    assert!(heard.contains("ok refs/heads/ask"), "{heard}");
    // As of the first question: a token that was taken after it would count in full, however long
    // that is ago.
    let state = place.traffic.sandbox(&sandbox()).unwrap();
    let mut left = 0;
    while state.take_push(asked).is_ok() {
        left += 1;
    }
    assert_eq!(left, 9);
    assert_eq!(place.reader.given.lock().unwrap().len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn client_that_hangs_up_ends_the_hold_of_its_push() {
    let (place, operator) = fixture("  restricted_paths: []\n");
    let body = place.body("refs/heads/ask");
    let mut client = connect(&place.traffic, None);
    client.write_all(&head(FORGE, &body)).await.unwrap();
    client.write_all(&body).await.unwrap();
    let open = operator.next().await;
    drop(client);
    open.withdrawn().await;
    assert_free(&place, &operator).await;
    let asked = (Some(Word::Ask), None, Some("secret:some-key".to_owned()));
    assert_eq!(only_push(&place), asked);
    assert_eq!(place.forge.pushed(), 0);
}

/// The settings of a mirror of a repository of the forge.
fn mirror(repository: &str) -> String {
    format!(
        "  restricted_paths: []\n  \
         mirrors: [{{name: app, upstream: 'http://forge.example/{repository}.git'}}]\n"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn push_to_a_mirror_is_held_and_then_sent() {
    let (place, operator) = fixture(&mirror("acme/app"));
    let pushing = push(&place, MIRROR, "refs/heads/ask");
    let open = operator.next().await;
    assert_eq!(place.forge.pushed(), 0);
    open.answer(ALLOW);
    let heard = pushing.await.unwrap();
    assert!(heard.contains("ok refs/heads/ask"), "{heard}");
    assert!(place.refs().contains("refs/heads/ask"));
    assert_free(&place, &operator).await;
    assert_eq!(only_push(&place).0, Some(Word::Allow));

    let pushing = push(&place, MIRROR, "refs/heads/ask-again");
    operator.next().await.answer(Answer::Deny);
    let heard = pushing.await.unwrap();
    assert!(heard.contains("palisade: ask_denied"), "{heard}");
    assert!(!place.refs().contains("refs/heads/ask-again"));
}

#[tokio::test(flavor = "multi_thread")]
async fn reload_that_moves_a_mirror_moves_its_held_push() {
    let (place, operator) = fixture(&mirror("acme/app"));
    git(
        &place.path("forge/acme"),
        &["clone", "-q", "--bare", "app.git", "moved.git"],
    );
    let moved = place.path("forge/acme/moved.git");
    git(&moved, &["config", "http.receivepack", "true"]);
    let pushing = push(&place, MIRROR, "refs/heads/ask");
    let first = operator.next().await;
    reload(&place, &mirror("acme/moved")).await;
    let second = operator.next().await;
    first.withdrawn().await;
    second.answer(ALLOW);
    let heard = pushing.await.unwrap();
    assert!(heard.contains("ok refs/heads/ask"), "{heard}");
    assert!(git(&moved, &["for-each-ref"]).contains("refs/heads/ask"));
    assert!(!place.refs().contains("refs/heads/ask"));
}

/// A gate whose rules do not name the forge, and ask about it.
async fn unlisted(
    find: impl Fn(&Given) -> Result<Findings, Denial> + Send + Sync + 'static,
) -> (Arc<Place>, Arc<TestOperator>) {
    let operator = TestOperator::new();
    let place = Place::attended(operator.questions(), "", |_| {}, find);
    let path = place.path("palisade.yaml");
    let text = std::fs::read_to_string(&path).unwrap();
    let text = text.replace("host: forge.example", "host: other.example");
    std::fs::write(&path, text).unwrap();
    let mut unlisted = config::load(Some(&path), &|_| None).unwrap();
    unlisted.egress.unknown = UnknownHostAction::Ask;
    place.reload(unlisted).await;
    (Arc::new(place), operator)
}

#[tokio::test(flavor = "multi_thread")]
async fn approved_host_is_asked_what_a_push_is_compared_with() {
    let (place, operator) = unlisted(unknown_without_bases).await;
    let pushing = push(&place, FORGE, FEATURE);
    let open = operator.next().await;
    assert_eq!(open.question.grants, Grant::Host);
    open.answer(ALLOW);
    let heard = pushing.await.unwrap();
    assert!(heard.contains("ok refs/heads/feature"), "{heard}");
    assert_free(&place, &operator).await;
    assert_eq!(only_push(&place).0, Some(Word::Allow));
}

#[tokio::test(flavor = "multi_thread")]
async fn approval_that_ends_while_a_push_is_read_asks_again() {
    let gate = Arc::<OnceLock<Arc<Place>>>::default();
    let reader = Arc::clone(&gate);
    let (place, operator) = unlisted(move |_| {
        // The end of an approval replaces the rules of the sandbox, as a reload does.
        let services = &reader.get().unwrap().traffic;
        let state = services.sandbox(&sandbox()).unwrap();
        let has_ended = || {
            let own = services.snapshot_for(Some(&state)).number;
            (own != services.policy().load().number).then_some(())
        };
        tokio::task::block_in_place(|| until("the end of the approval", has_ended));
        Ok(Findings::default())
    })
    .await;
    assert!(gate.set(Arc::clone(&place)).is_ok());
    let pushing = push(&place, FORGE, FEATURE);
    let open = operator.next().await;
    let soon = place.traffic.clock().tick() + Duration::from_millis(500);
    open.answer(Answer::Allow { until: Some(soon) });
    let again = operator.next().await;
    assert_eq!(place.forge.pushed(), 0);
    again.answer(Answer::Deny);
    let heard = pushing.await.unwrap();
    assert!(heard.contains("ask_denied"), "{heard}");
    assert_free(&place, &operator).await;
    assert_eq!(only_push(&place).1, Some(Reason::AskDenied));
}
