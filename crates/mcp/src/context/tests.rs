use std::time::Duration;

use super::*;

fn contexts(max_entries: usize) -> (Contexts, Metrics) {
    let metrics = Metrics::default();
    let contexts = Contexts::with_limits(&metrics, max_entries, MAX_DECISION_BYTES);
    (contexts, metrics)
}

fn decision(metadata: &str) -> PolicyDecision {
    PolicyDecision {
        verdict: VerdictKind::Allow,
        bundle: String::new(),
        denial: None,
        reason: String::new(),
        metadata: metadata.to_owned(),
    }
}

const SUCCESSFUL_EXECUTION: Execution = Execution {
    failed: false,
    exit_code: 0,
    duration: Duration::from_millis(7),
};

fn origin<'a>(agent: &'a str, session: &'a str) -> RequestOrigin<'a> {
    RequestOrigin {
        agent,
        session,
        tool: "fs",
        ..RequestOrigin::default()
    }
}

#[tokio::test(start_paused = true)]
async fn context_is_stored_until_deleted() {
    let (contexts, metrics) = contexts(10);
    contexts.create("r", origin("a", "s"));
    let stored = decision(r#"{"ticket":7}"#);
    contexts.set_decision("r", stored.clone()).unwrap();
    contexts.set_result("r", SUCCESSFUL_EXECUTION).unwrap();
    let known = contexts.get("r").unwrap();
    assert_eq!((&*known.agent, &*known.tool), ("a", "fs"));
    assert_eq!(known.decision.as_deref(), Some(&stored));
    assert_eq!(known.execution, Some(SUCCESSFUL_EXECUTION));
    assert_eq!(metrics.contexts().get(), 1);
    assert!(contexts.delete("r").is_some());
    assert!(contexts.find("r").is_none());
    assert_eq!(metrics.contexts().get(), 0);
}

#[tokio::test(start_paused = true)]
async fn unknown_request_gets_a_new_context() {
    let (contexts, _) = contexts(10);
    assert!(contexts.find("r").is_none());
    assert_eq!(&*contexts.get("r").unwrap().agent, "");
    assert!(contexts.find("r").is_some());
}

#[tokio::test(start_paused = true)]
async fn context_expires_after_five_minutes() {
    let (contexts, metrics) = contexts(10);
    contexts.create("old", origin("a", ""));
    tokio::time::advance(TTL).await;
    contexts.create("young", origin("a", ""));
    assert!(contexts.get("old").is_ok());
    tokio::time::advance(Duration::from_millis(1)).await;
    assert!(contexts.find("old").is_none());
    assert_eq!(contexts.get("old"), Err(ContextExpired));
    assert_eq!(
        contexts
            .set_result("young", SUCCESSFUL_EXECUTION)
            .unwrap()
            .id,
        "young".into()
    );
    contexts.create("old", origin("a", ""));
    tokio::time::advance(TTL).await;
    contexts.cleanup();
    assert_eq!(contexts.len(), 1, "only the younger entry is left");
    tokio::time::advance(TTL).await;
    contexts.cleanup();
    assert!(contexts.is_empty());
    assert_eq!(metrics.contexts().get(), 0);
}

// Issue 14, number 9.
#[tokio::test(start_paused = true)]
async fn expired_context_stays_an_error_after_cleanup() {
    let (contexts, metrics) = contexts(10);
    contexts.create("swept", origin("a", ""));
    contexts.create("read", origin("a", ""));
    tokio::time::advance(TTL + Duration::from_millis(1)).await;
    assert_eq!(contexts.get("read"), Err(ContextExpired));
    contexts.cleanup();
    assert!(contexts.is_empty());
    for id in ["swept", "read"] {
        for _ in 0..2 {
            assert_eq!(contexts.get(id), Err(ContextExpired), "{id}");
            assert_eq!(
                contexts.set_result(id, SUCCESSFUL_EXECUTION),
                Err(ContextExpired),
                "{id}"
            );
            assert!(contexts.has_expired(id), "{id}");
            assert_eq!(contexts.take(id), Err(ContextExpired), "{id}");
        }
    }
    assert_eq!(metrics.contexts().get(), 0);
    assert_eq!(contexts.take("never"), Ok(None));
    assert!(!contexts.has_expired("never"));
    // A request that begins under the same id is a new one.
    contexts.create("swept", origin("b", ""));
    assert_eq!(&*contexts.get("swept").unwrap().agent, "b");
    assert_eq!(&*contexts.take("swept").unwrap().unwrap().agent, "b");
    assert!(contexts.get("swept").is_ok());
}

#[tokio::test(start_paused = true)]
async fn evicted_context_stays_an_error() {
    let (contexts, _) = contexts(2);
    for id in ["a", "b", "c"] {
        contexts.create(id, origin("x", ""));
    }
    assert_eq!(contexts.get("a"), Err(ContextExpired));
    assert!(contexts.get("b").is_ok() && contexts.get("c").is_ok());
}

#[tokio::test(start_paused = true)]
async fn tombstones_are_bounded_and_the_newest_are_kept() {
    let (contexts, _) = contexts(8);
    for round in 0..100 {
        for n in 0..8 {
            contexts.create(&format!("{round}-{n}"), origin("x", ""));
        }
        // An id that is used again is one request.
        contexts.create("again", origin("x", ""));
        tokio::time::advance(TTL + Duration::from_millis(1)).await;
        contexts.cleanup();
    }
    let table = contexts.table();
    assert!(table.entries.is_empty());
    assert_eq!(table.tombstones.queue.len(), 8);
    assert!(table.tombstones.numbers.len() <= 8);
    drop(table);
    assert_eq!(contexts.get("again"), Err(ContextExpired));
    assert_eq!(contexts.get("99-7"), Err(ContextExpired));
}

#[tokio::test(start_paused = true)]
async fn oldest_context_is_evicted_at_the_limit() {
    let (contexts, _) = contexts(3);
    for id in ["a", "b", "c"] {
        contexts.create(id, origin("x", "s"));
    }
    // An entry that is created again is the youngest.
    contexts.create("a", origin("x", "s"));
    contexts.create("d", origin("x", "s"));
    let left: Vec<_> = ["a", "b", "c", "d"]
        .into_iter()
        .filter(|id| contexts.find(id).is_some())
        .collect();
    assert_eq!(left, ["a", "c", "d"]);
}

#[tokio::test(start_paused = true)]
async fn contexts_are_deleted_with_their_session() {
    let (contexts, _) = contexts(10);
    for (id, session) in [("a", "s"), ("b", "s"), ("c", "t"), ("d", "")] {
        contexts.create(id, origin("x", session));
    }
    contexts.delete_session("s");
    contexts.delete_session("");
    assert!(contexts.find("a").is_none() && contexts.find("b").is_none());
    assert!(contexts.find("c").is_some() && contexts.find("d").is_some());
}

#[tokio::test(start_paused = true)]
async fn deleted_contexts_leave_no_queue_entries() {
    let (contexts, _) = contexts(10);
    contexts.create("first", origin("x", "s"));
    for n in 0..10 * MAX_STALE {
        let id = n.to_string();
        contexts.create(&id, origin("x", &id));
        contexts.delete(&id);
    }
    let table = contexts.table();
    assert_eq!(table.entries.len(), 1);
    assert_eq!(table.sessions.len(), 1);
    assert!(table.queue.len() <= 2 * MAX_STALE, "{}", table.queue.len());
}

#[tokio::test(start_paused = true)]
async fn large_decisions_evict_the_oldest_entries() {
    let metrics = Metrics::default();
    let contexts = Contexts::with_limits(&metrics, 100, 1000);
    for n in 0..20 {
        let id = n.to_string();
        contexts.create(&id, origin("x", ""));
        contexts
            .set_decision(&id, decision(&"m".repeat(100)))
            .unwrap();
        // A decision replaces the one before.
        contexts
            .set_decision(&id, decision(&"m".repeat(200)))
            .unwrap();
    }
    assert_eq!(contexts.len(), 5);
    assert_eq!(contexts.table().decision_bytes, 1000);
    assert_eq!(metrics.contexts().get(), 5);
    assert!(contexts.has_expired("14") && contexts.find("15").is_some());
    for n in 15..20 {
        contexts.delete(&n.to_string());
    }
    assert_eq!(contexts.table().decision_bytes, 0);
    // A decision above the limit is stored: policy bundles bound the size of each decision.
    contexts
        .set_decision("large", decision(&"m".repeat(2000)))
        .unwrap();
    assert_eq!(contexts.len(), 1);
}
