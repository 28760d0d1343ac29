//! The git protocol (`git://`) with test clients that are slow, silent or disconnect early.

use std::sync::Arc;
use std::time::{Duration, Instant};

use egress::caller::ProgramLookup;
use egress::mirror_server::daemon;
use egress::request::ConnectionInfo;
use policy::audit::AuditEvent;
use policy::id::SandboxId;
use policy::push::Findings;
use policy::reason::Reason;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use crate::push::{FEATURE, PushFixture};

/// Timeout of a test's reads.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Settings of a mirror of the forge's repository.
const MIRROR: &str = "  mirrors: [{name: app, upstream: 'http://forge.example/acme/app.git'}]\n";

/// A gate with a mirror of the forge and these timeouts.
async fn mirror_fixture(timeouts: &str) -> PushFixture {
    let fixture = PushFixture::new("", |_| Ok(Findings::default()));
    reload(&fixture, timeouts, MIRROR).await;
    fixture
}

/// Applies settings with these timeouts and these lines about mirrors.
async fn reload(fixture: &PushFixture, timeouts: &str, mirrors: &str) {
    let path = fixture.path("palisade.yaml");
    let text = format!(
        "version: \"1.0\"\negress:\n  timeouts: {{{timeouts}}}\n  \
         resolve: {{forge.example: '{}'}}\ngit:\n  restricted_paths: []\n{mirrors}",
        fixture.forge.address()
    );
    std::fs::write(&path, text).unwrap();
    let settings = config::load(Some(&path), &|_| None).unwrap();
    fixture.reload(settings).await;
}

/// A connection of the sandbox to the git port, and the task that serves it.
async fn connect(fixture: &PushFixture) -> (TcpStream, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap());
    let (client, accepted) = tokio::join!(client, listener.accept());
    let (server, peer) = accepted.unwrap();
    let services = Arc::clone(&fixture.services);
    let serving = tokio::spawn(async move {
        let state = services
            .sandbox(&SandboxId::parse("fix-1").unwrap())
            .unwrap();
        let connection_info = ConnectionInfo {
            peer: Some(peer),
            original_destination: None,
            tunnel: None,
            hello: None,
            caller: ProgramLookup::default(),
        };
        daemon::serve(&services, &state, &connection_info, server).await;
    });
    (client.unwrap(), serving)
}

/// Reads the rest of the response.
async fn read_response(client: &mut TcpStream) -> String {
    let mut response = Vec::new();
    let read = tokio::time::timeout(TIMEOUT, client.read_to_end(&mut response)).await;
    read.expect("the connection did not end").unwrap();
    String::from_utf8_lossy(&response).into_owned()
}

/// The newest audit record.
fn last_record(fixture: &PushFixture) -> AuditEvent {
    fixture.records.0.lock().unwrap().last().unwrap().clone()
}

/// The request line of a push.
const PUSH: &[u8] = b"0022git-receive-pack /app\0host=x\0\0";
/// The request line of a fetch.
const FETCH: &[u8] = b"0019git-upload-pack /app\0";

/// Reads the ref advertisement.
async fn read_refs(client: &mut TcpStream) -> String {
    let mut response = Vec::new();
    while !response.ends_with(b"0000") {
        let read = tokio::time::timeout(TIMEOUT, client.read_buf(&mut response)).await;
        assert!(
            read.expect("no ref advertisement").unwrap() > 0,
            "{response:?}"
        );
    }
    String::from_utf8_lossy(&response).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn client_without_complete_request_line_times_out() {
    let fixture = mirror_fixture("header: 1s").await;
    for partial_line in [&b""[..], b"0022git-receive-pack"] {
        let (mut client, serving) = connect(&fixture).await;
        client.write_all(partial_line).await.unwrap();
        let response = read_response(&mut client).await;
        assert!(response.contains("client_timeout"), "{response}");
        drop(client);
        serving.await.unwrap();
        assert_eq!(last_record(&fixture).reason, Some(Reason::ClientTimeout));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn push_that_stalls_times_out() {
    let fixture = mirror_fixture("idle: 3s").await;
    let body = fixture.body(FEATURE);
    let (mut client, serving) = connect(&fixture).await;
    client.write_all(PUSH).await.unwrap();
    let refs = read_refs(&mut client).await;
    assert!(refs.contains("refs/heads/main\0"), "{refs}");
    assert!(refs.contains(" no-thin"), "{refs}");
    assert!(
        !refs.contains("# service"),
        "this line belongs to HTTP: {refs}"
    );
    client.write_all(&body[..body.len() - 30]).await.unwrap();
    let response = read_response(&mut client).await;
    assert!(response.contains("ERR "), "{response}");
    drop(client);
    serving.await.unwrap();
    assert_eq!(fixture.forge.pushed_bytes(), 0);
    assert!(!fixture.refs().contains(FEATURE));
}

#[tokio::test(flavor = "multi_thread")]
async fn chunked_push_is_answered_before_the_client_closes() {
    let fixture = mirror_fixture("").await;
    let (mut client, serving) = connect(&fixture).await;
    client.set_nodelay(true).unwrap();
    client.write_all(PUSH).await.unwrap();
    read_refs(&mut client).await;
    for piece in fixture.body(FEATURE).chunks(13) {
        client.write_all(piece).await.unwrap();
        tokio::task::yield_now().await;
    }
    let response = read_response(&mut client).await;
    assert!(response.contains("ok refs/heads/feature"), "{response}");
    assert!(fixture.refs().contains(FEATURE));
    drop(client);
    serving.await.unwrap();
    let inputs = fixture.reader.inputs.lock().unwrap();
    assert_eq!(inputs[0].pack.as_deref(), Some(&fixture.pack()[..]));
}

#[tokio::test(flavor = "multi_thread")]
async fn incomplete_push_is_refused_when_the_client_closes() {
    let fixture = mirror_fixture("").await;
    let (mut client, serving) = connect(&fixture).await;
    client.write_all(PUSH).await.unwrap();
    read_refs(&mut client).await;
    let body = fixture.body(FEATURE);
    client.write_all(&body[..body.len() - 1]).await.unwrap();
    client.shutdown().await.unwrap();
    let response = read_response(&mut client).await;
    let refused = "ng refs/heads/feature palisade: git_malformed";
    assert!(response.contains(refused), "{response}");
    drop(client);
    serving.await.unwrap();
    assert_eq!(fixture.forge.pushed_bytes(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn fetch_ends_when_its_mirror_is_removed_or_idle() {
    let fixture = mirror_fixture("").await;
    let (mut client, serving) = connect(&fixture).await;
    client.write_all(FETCH).await.unwrap();
    let refs = read_refs(&mut client).await;
    assert!(refs.contains("refs/heads/main\n"), "{refs}");
    reload(&fixture, "", "").await;
    assert_eq!(read_response(&mut client).await, "");
    drop(client);
    serving.await.unwrap();

    reload(&fixture, "idle: 3s", MIRROR).await;
    let (mut client, serving) = connect(&fixture).await;
    client.write_all(FETCH).await.unwrap();
    read_refs(&mut client).await;
    let started = Instant::now();
    read_response(&mut client).await;
    assert!(started.elapsed() >= Duration::from_millis(900));
    drop(client);
    serving.await.unwrap();
}
