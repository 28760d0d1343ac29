//! The registry as the gate uses it: durable before the answer, and never partly applied.

use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;

use crate::fixture::{at, copy_dir, id, open, registered, row};
use policy::registration::{AuthMode, Repo, RepoName};
use store::audit::query::AuditFilter;
use store::error::StoreError;
use store::registry::RegistryLookup;

fn found(lookup: RegistryLookup) -> String {
    match lookup {
        RegistryLookup::Found(row) => row.id.as_str().to_owned(),
        other => format!("{other:?}"),
    }
}

#[tokio::test]
async fn a_registration_is_on_disk_when_it_is_answered() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let mut full = row("a", Some("::ffff:10.0.0.1"));
    full.repos = vec![Repo {
        name: RepoName::parse("o/r").unwrap(),
        max_receive_pack_bytes: Some(5),
    }];
    full.auth_mode = AuthMode::Bot;
    full.metadata = serde_json::Map::from_iter([("k\0\"'".to_owned(), "é\n\u{202e}".into())]);
    let done = store
        .register(full.clone(), registered("a"), at(5))
        .await
        .unwrap();
    assert_eq!(
        (done.seq, done.replaced, done.removed_holder),
        (1, None, None)
    );

    // The files that a kill at this moment would leave.
    let killed = copy_dir(dir.path());
    let again = open(killed.path());
    full.ip = Some("10.0.0.1".parse().unwrap());
    for ip in ["10.0.0.1", "::ffff:10.0.0.1"] {
        let ip: IpAddr = ip.parse().unwrap();
        assert_eq!(
            again.registry().by_ip(ip),
            RegistryLookup::Found(full.clone().into())
        );
    }
    assert_eq!(
        again.registry().by_id(&id("a")),
        RegistryLookup::Found(full.into())
    );
    assert_eq!(
        again
            .audit()
            .query_blocking(&AuditFilter::default())
            .unwrap()
            .len(),
        1
    );
    assert!(again.audit().verify_blocking().unwrap().is_intact());
}

#[tokio::test]
async fn the_same_id_replaces_and_frees_its_old_address() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let put = |r| store.register(r, registered("a"), at(1));
    put(row("a", Some("10.0.0.1"))).await.unwrap();
    let second = put(row("a", Some("10.0.0.2"))).await.unwrap();
    assert_eq!(
        second.replaced.unwrap().ip,
        Some("10.0.0.1".parse().unwrap())
    );
    let registry = store.registry();
    assert_eq!(
        registry.by_ip("10.0.0.1".parse().unwrap()),
        RegistryLookup::Unknown
    );
    assert_eq!(found(registry.by_ip("10.0.0.2".parse().unwrap())), "a");
    assert_eq!(registry.len(), 1);
}

#[tokio::test]
async fn an_address_belongs_to_one_live_sandbox() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let ip: IpAddr = "10.0.0.1".parse().unwrap();
    let mut first = row("a", Some("10.0.0.1"));
    first.expires = at(100);
    store.register(first, registered("a"), at(1)).await.unwrap();

    let refused = store
        .register(row("b", Some("::ffff:10.0.0.1")), registered("b"), at(99))
        .await;
    let holder = id("a");
    assert_eq!(refused, Err(StoreError::IpTaken { ip, holder }));
    assert_eq!(found(store.registry().by_ip(ip)), "a");
    assert_eq!(store.registry().by_id(&id("b")), RegistryLookup::Unknown);

    let done = store
        .register(row("b", Some("10.0.0.1")), registered("b"), at(100))
        .await
        .unwrap();
    assert_eq!(done.removed_holder, Some(id("a")));
    assert_eq!(found(store.registry().by_ip(ip)), "b");
    assert_eq!(store.registry().by_id(&id("a")), RegistryLookup::Unknown);
    let events: Vec<_> = store
        .audit()
        .query_blocking(&AuditFilter::default())
        .unwrap()
        .into_iter()
        .map(|r| (r.event.sandbox.unwrap().to_string(), r.event.event.unwrap()))
        .collect();
    let expect = [("a", "registered"), ("a", "expired"), ("b", "registered")];
    assert_eq!(events, expect.map(|(s, e)| (s.to_owned(), e.to_owned())));
}

#[tokio::test]
async fn live_holder_of_the_address_is_replaced_on_request() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let address = Some("10.0.0.1");
    let done = store.register(row("a", address), registered("a"), at(1));
    assert_eq!(done.await.unwrap().removed_holder, None);
    let done = store.register_replacing(row("b", address), registered("b"), at(2));
    assert_eq!(done.await.unwrap().removed_holder, Some(id("a")));
    let ip: IpAddr = "10.0.0.1".parse().unwrap();
    assert_eq!(found(store.registry().by_ip(ip)), "b");
    assert_eq!(store.registry().by_id(&id("a")), RegistryLookup::Unknown);
    let events = store.audit().query_blocking(&AuditFilter {
        sandbox: Some(id("a")),
        ..AuditFilter::default()
    });
    let events: Vec<_> = events.unwrap().into_iter().map(|r| r.event.event).collect();
    let expect = ["registered", "replaced"].map(|event| Some(event.to_owned()));
    assert_eq!(events, expect);
    // The same after a restart.
    drop(store);
    assert_eq!(open(dir.path()).registry().len(), 1);
}

#[tokio::test]
async fn unregistering_and_pruning_leave_records() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    for (n, name) in ["a", "b", "c"].into_iter().enumerate() {
        let mut r = row(name, None);
        r.expires = at(i64::try_from(n).unwrap() * 100 + 100);
        store.register(r, registered(name), at(1)).await.unwrap();
    }
    assert_eq!(
        store.prune_expired(at(200)).await.unwrap(),
        [id("a"), id("b")]
    );
    assert_eq!(store.prune_expired(at(200)).await.unwrap(), []);
    let missing = store.unregister(&id("a"), registered("a"), at(1)).await;
    assert_eq!(missing, Err(StoreError::NotFound { id: id("a") }));
    let row = store.unregister(&id("c"), registered("c"), at(1)).await;
    assert_eq!(row.unwrap().id, id("c"));
    assert!(store.registry().is_empty());
    store.close().await.unwrap();
    assert_eq!(store.prune_expired(at(1)).await, Err(StoreError::Closed));

    let store = open(dir.path());
    assert!(store.registry().list().unwrap().is_empty());
    assert_eq!(
        // Three registrations, two expiries, one removal, one checkpoint at closing.
        store
            .audit()
            .query_blocking(&AuditFilter::default())
            .unwrap()
            .len(),
        7
    );
}

#[tokio::test]
async fn concurrent_callers_share_commits_and_get_their_own_result() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..200 {
        let store = store.clone();
        tasks.spawn(async move {
            let name = format!("s{n}");
            // Every address is requested twice.
            let ip = format!("10.0.0.{}", n / 2);
            let result = store.register(row(&name, Some(&ip)), registered(&name), at(1));
            result.await.is_ok()
        });
    }
    let won = tasks.join_all().await.into_iter().filter(|ok| *ok).count();
    assert_eq!(won, 100);
    assert_eq!(store.registry().len(), 100);
    let stats = store.stats();
    assert!(stats.batches < 200, "{stats:?}");
    assert_eq!(stats.registered, 100);
}

#[tokio::test]
async fn database_is_accessible_to_its_owner_only() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    store
        .register(row("a", None), registered("a"), at(1))
        .await
        .unwrap();
    for name in ["palisade.db", "palisade.db-wal", "palisade.db-shm"] {
        let mode = std::fs::metadata(dir.path().join(name))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
}

#[test]
fn state_directory_that_is_a_file_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let opened = store::Store::open(store::StoreOptions {
        dir: file.clone(),
        audit: store::audit::AuditOptions::default(),
        now: at(1),
    });
    assert!(matches!(opened, Err(StoreError::File { path, .. }) if path == file));
}
