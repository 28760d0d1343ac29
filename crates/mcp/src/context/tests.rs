use std::time::Duration;

use super::*;

fn contexts(most: usize) -> (Contexts, Metrics) {
    let metrics = Metrics::default();
    (Contexts::with_room(&metrics, most), metrics)
}

fn of<'a>(agent: &'a str, session: &'a str) -> Origin<'a> {
    Origin {
        agent,
        session,
        tool: "fs",
        ..Origin::default()
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_stored_is_there_until_it_is_deleted() {
    let (contexts, metrics) = contexts(10);
    contexts.create("r", of("a", "s"));
    contexts.set_decision("r", Word::Allow, None).unwrap();
    contexts.set_result("r", false, Some(0)).unwrap();
    let known = contexts.get("r").unwrap();
    assert_eq!((&*known.agent, &*known.tool), ("a", "fs"));
    assert_eq!(known.decision.unwrap().verdict, Word::Allow);
    assert_eq!(known.execution.unwrap().exit_code, Some(0));
    assert_eq!(metrics.contexts().get(), 1);
    assert!(contexts.delete("r").is_some());
    assert!(contexts.find("r").is_none());
    assert_eq!(metrics.contexts().get(), 0);
}

#[tokio::test(start_paused = true)]
async fn an_unknown_request_is_remembered_from_now_on() {
    let (contexts, _) = contexts(10);
    assert!(contexts.find("r").is_none());
    assert_eq!(&*contexts.get("r").unwrap().agent, "");
    assert!(contexts.find("r").is_some());
}

#[tokio::test(start_paused = true)]
async fn after_five_minutes_it_has_expired() {
    let (contexts, metrics) = contexts(10);
    contexts.create("old", of("a", ""));
    tokio::time::advance(TTL).await;
    contexts.create("young", of("a", ""));
    assert!(contexts.get("old").is_ok());
    tokio::time::advance(Duration::from_millis(1)).await;
    assert!(contexts.find("old").is_none());
    assert_eq!(contexts.get("old"), Err(Expired));
    assert_eq!(
        contexts.set_result("young", true, None).unwrap().id,
        "young".into()
    );
    contexts.create("old", of("a", ""));
    tokio::time::advance(TTL).await;
    contexts.cleanup();
    assert_eq!(contexts.len(), 1, "only the younger is left");
    tokio::time::advance(TTL).await;
    contexts.cleanup();
    assert!(contexts.is_empty());
    assert_eq!(metrics.contexts().get(), 0);
}

// Issue 14, number 9.
#[tokio::test(start_paused = true)]
async fn an_expired_request_stays_an_error_after_the_sweep() {
    let (contexts, metrics) = contexts(10);
    contexts.create("swept", of("a", ""));
    contexts.create("read", of("a", ""));
    tokio::time::advance(TTL + Duration::from_millis(1)).await;
    assert_eq!(contexts.get("read"), Err(Expired));
    contexts.cleanup();
    assert!(contexts.is_empty());
    for id in ["swept", "read"] {
        for _ in 0..2 {
            assert_eq!(contexts.get(id), Err(Expired), "{id}");
            assert_eq!(contexts.set_result(id, false, None), Err(Expired), "{id}");
            assert_eq!(contexts.take(id), Err(Expired), "{id}");
        }
    }
    assert_eq!(metrics.contexts().get(), 0);
    assert_eq!(contexts.take("never"), Ok(None));
    // A request that begins under the same id is a new one.
    contexts.create("swept", of("b", ""));
    assert_eq!(&*contexts.get("swept").unwrap().agent, "b");
    assert_eq!(&*contexts.take("swept").unwrap().unwrap().agent, "b");
    assert!(contexts.get("swept").is_ok());
}

#[tokio::test(start_paused = true)]
async fn an_evicted_request_stays_an_error() {
    let (contexts, _) = contexts(2);
    for id in ["a", "b", "c"] {
        contexts.create(id, of("x", ""));
    }
    assert_eq!(contexts.get("a"), Err(Expired));
    assert!(contexts.get("b").is_ok() && contexts.get("c").is_ok());
}

#[tokio::test(start_paused = true)]
async fn tombstones_are_bounded_and_the_newest_stay() {
    let (contexts, _) = contexts(8);
    for round in 0..100 {
        for n in 0..8 {
            contexts.create(&format!("{round}-{n}"), of("x", ""));
        }
        // Used again and again, it still is one request.
        contexts.create("again", of("x", ""));
        tokio::time::advance(TTL + Duration::from_millis(1)).await;
        contexts.cleanup();
    }
    let table = contexts.table();
    assert!(table.entries.is_empty());
    assert_eq!(table.tombstones.queue.len(), 8);
    assert!(table.tombstones.numbers.len() <= 8);
    drop(table);
    assert_eq!(contexts.get("again"), Err(Expired));
    assert_eq!(contexts.get("99-7"), Err(Expired));
}

#[tokio::test(start_paused = true)]
async fn the_oldest_makes_room() {
    let (contexts, _) = contexts(3);
    for id in ["a", "b", "c"] {
        contexts.create(id, of("x", "s"));
    }
    // Made anew, it is the youngest.
    contexts.create("a", of("x", "s"));
    contexts.create("d", of("x", "s"));
    let left: Vec<_> = ["a", "b", "c", "d"]
        .into_iter()
        .filter(|id| contexts.find(id).is_some())
        .collect();
    assert_eq!(left, ["a", "c", "d"]);
}

#[tokio::test(start_paused = true)]
async fn a_session_takes_its_requests_along() {
    let (contexts, _) = contexts(10);
    for (id, session) in [("a", "s"), ("b", "s"), ("c", "t"), ("d", "")] {
        contexts.create(id, of("x", session));
    }
    contexts.delete_session("s");
    contexts.delete_session("");
    assert!(contexts.find("a").is_none() && contexts.find("b").is_none());
    assert!(contexts.find("c").is_some() && contexts.find("d").is_some());
}

#[tokio::test(start_paused = true)]
async fn what_is_made_and_deleted_leaves_nothing_behind() {
    let (contexts, _) = contexts(10);
    contexts.create("first", of("x", "s"));
    for n in 0..10 * MOST_STALE {
        let id = n.to_string();
        contexts.create(&id, of("x", &id));
        contexts.delete(&id);
    }
    let table = contexts.table();
    assert_eq!(table.entries.len(), 1);
    assert_eq!(table.sessions.len(), 1);
    assert!(table.queue.len() <= 2 * MOST_STALE, "{}", table.queue.len());
}
