//! Git's own protocol, spoken by hand: clients that take their time, or all of it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use egress::caller::Caller;
use egress::mirror_server::daemon;
use egress::request::ConnectionInfo;
use policy::audit::AuditEvent;
use policy::id::SandboxId;
use policy::push::Findings;
use policy::reason::Reason;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use crate::push::{FEATURE, Place};

/// More than any client here waits for.
const LONG: Duration = Duration::from_secs(20);

const MIRROR: &str = "  mirrors: [{name: app, upstream: 'http://forge.example/acme/app.git'}]\n";

/// A gate with a mirror of the forge, whose patience is short.
async fn harbour(timeouts: &str) -> Place {
    let place = Place::new("", |_| Ok(Findings::default()));
    reload(&place, timeouts, MIRROR).await;
    place
}

async fn reload(place: &Place, timeouts: &str, mirrors: &str) {
    let path = place.path("palisade.yaml");
    let text = format!(
        "version: \"1.0\"\negress:\n  timeouts: {{{timeouts}}}\n  \
         resolve: {{forge.example: '{}'}}\ngit:\n  restricted_paths: []\n{mirrors}",
        place.forge.address()
    );
    std::fs::write(&path, text).unwrap();
    let settings = config::load(Some(&path), &|_| None).unwrap();
    place.reload(settings).await;
}

/// A connection of the sandbox to the port, and the end of its being served.
async fn connect(place: &Place) -> (TcpStream, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap());
    let (client, accepted) = tokio::join!(client, listener.accept());
    let (server, peer) = accepted.unwrap();
    let traffic = Arc::clone(&place.traffic);
    let serving = tokio::spawn(async move {
        let guest = traffic
            .sandbox(&SandboxId::parse("fix-1").unwrap())
            .unwrap();
        let connection_info = ConnectionInfo {
            peer: Some(peer),
            meant: None,
            tunnel: None,
            hello: None,
            caller: Caller::default(),
        };
        daemon::serve(&traffic, &guest, &connection_info, server).await;
    });
    (client.unwrap(), serving)
}

/// All that is said to a client from now on.
async fn heard(client: &mut TcpStream) -> String {
    let mut said = Vec::new();
    let read = tokio::time::timeout(LONG, client.read_to_end(&mut said)).await;
    read.expect("it is not ended").unwrap();
    String::from_utf8_lossy(&said).into_owned()
}

fn last_record(place: &Place) -> AuditEvent {
    place.records.0.lock().unwrap().last().unwrap().clone()
}

const PUSH: &[u8] = b"0022git-receive-pack /app\0host=x\0\0";
const FETCH: &[u8] = b"0019git-upload-pack /app\0";

/// Reads up to the end of the list of refs.
async fn hear_list(client: &mut TcpStream) -> String {
    let mut said = Vec::new();
    while !said.ends_with(b"0000") {
        let read = tokio::time::timeout(LONG, client.read_buf(&mut said)).await;
        assert!(read.expect("no list").unwrap() > 0, "{said:?}");
    }
    String::from_utf8_lossy(&said).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_says_nothing_or_too_little_is_not_waited_for() {
    let place = harbour("header: 1s").await;
    for beginning in [&b""[..], b"0022git-receive-pack"] {
        let (mut client, serving) = connect(&place).await;
        client.write_all(beginning).await.unwrap();
        let said = heard(&mut client).await;
        assert!(said.contains("client_timeout"), "{said}");
        drop(client);
        serving.await.unwrap();
        assert_eq!(last_record(&place).reason, Some(Reason::ClientTimeout));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_that_stops_in_the_middle_is_given_up() {
    let place = harbour("idle: 3s").await;
    let body = place.body(FEATURE);
    let (mut client, serving) = connect(&place).await;
    client.write_all(PUSH).await.unwrap();
    let list = hear_list(&mut client).await;
    assert!(list.contains("refs/heads/main\0"), "{list}");
    assert!(list.contains(" no-thin"), "{list}");
    assert!(!list.contains("# service"), "that is HTTP's: {list}");
    client.write_all(&body[..body.len() - 30]).await.unwrap();
    let said = heard(&mut client).await;
    assert!(said.contains("ERR "), "{said}");
    drop(client);
    serving.await.unwrap();
    assert_eq!(place.forge.pushed(), 0);
    assert!(!place.refs().contains(FEATURE));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_push_in_pieces_passes_and_is_answered_with_the_clients_side_open() {
    let place = harbour("").await;
    let (mut client, serving) = connect(&place).await;
    client.set_nodelay(true).unwrap();
    client.write_all(PUSH).await.unwrap();
    hear_list(&mut client).await;
    for piece in place.body(FEATURE).chunks(13) {
        client.write_all(piece).await.unwrap();
        tokio::task::yield_now().await;
    }
    let said = heard(&mut client).await;
    assert!(said.contains("ok refs/heads/feature"), "{said}");
    assert!(place.refs().contains(FEATURE));
    drop(client);
    serving.await.unwrap();
    let given = place.reader.given.lock().unwrap();
    assert_eq!(given[0].pack.as_deref(), Some(&place.pack()[..]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_in_the_middle_pushes_nothing() {
    let place = harbour("").await;
    let (mut client, serving) = connect(&place).await;
    client.write_all(PUSH).await.unwrap();
    hear_list(&mut client).await;
    let body = place.body(FEATURE);
    client.write_all(&body[..body.len() - 1]).await.unwrap();
    client.shutdown().await.unwrap();
    let said = heard(&mut client).await;
    let refused = "ng refs/heads/feature palisade: git_malformed";
    assert!(said.contains(refused), "{said}");
    drop(client);
    serving.await.unwrap();
    assert_eq!(place.forge.pushed(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_ends_with_its_mirror_and_with_silence() {
    let place = harbour("").await;
    let (mut client, serving) = connect(&place).await;
    client.write_all(FETCH).await.unwrap();
    let list = hear_list(&mut client).await;
    assert!(list.contains("refs/heads/main\n"), "{list}");
    reload(&place, "", "").await;
    assert_eq!(heard(&mut client).await, "");
    drop(client);
    serving.await.unwrap();

    reload(&place, "idle: 3s", MIRROR).await;
    let (mut client, serving) = connect(&place).await;
    client.write_all(FETCH).await.unwrap();
    hear_list(&mut client).await;
    let begun = Instant::now();
    heard(&mut client).await;
    assert!(begun.elapsed() >= Duration::from_millis(900));
    drop(client);
    serving.await.unwrap();
}
