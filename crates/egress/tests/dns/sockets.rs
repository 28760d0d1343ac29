//! DNS queries over UDP and TCP sockets.

use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use egress::dns::{QueryOutcome, QuerySource};
use egress::listener_checks::ListenerChecks;
use hickory_proto::op::ResponseCode;
use policy::audit::AuditEvent;
use policy::clock::UnixMillis;
use policy::id::SandboxId;
use policy::identity::RegistrationLookup;
use policy::ports::{AuditSink, Registry};
use policy::reason::Reason;
use policy::registration::{AuthMode, Registration};
use testkit::resolver::{DnsReply, RecordData, record};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};

use super::fixture::{
    A, DnsAnswer, DnsFixture, DnsListener, TIMEOUT, query, receive, sandbox_id, settings, until,
};

/// Adds an address of `allowed.test` to the upstream resolver.
fn add_allowed_name(fixture: &DnsFixture) {
    let public = RecordData::A([203, 0, 113, 7].into());
    let reply = DnsReply::Records(vec![record("allowed.test", public)]);
    fixture.resolver.set_reply("allowed.test", A, reply);
}

/// Queries as DNS over TCP sends them: each after its length.
fn framed(queries: &[Vec<u8>]) -> Vec<u8> {
    let frame = |query: &Vec<u8>| {
        let length = u16::try_from(query.len()).unwrap().to_be_bytes();
        [length.to_vec(), query.clone()].concat()
    };
    queries.iter().flat_map(frame).collect()
}

async fn read_answer(stream: &mut TcpStream) -> DnsAnswer {
    let reading = async {
        let length = stream.read_u16().await.unwrap();
        let mut answer = vec![0; length.into()];
        stream.read_exact(&mut answer).await.unwrap();
        DnsAnswer::read(&answer, None)
    };
    tokio::time::timeout(TIMEOUT, reading)
        .await
        .expect("an answer in time")
}

#[tokio::test]
async fn datagram_is_answered_after_its_audit_record() {
    let fixture = DnsFixture::new();
    add_allowed_name(&fixture);
    let listener = DnsListener::datagrams(&fixture, sandbox_source(Arc::new(OneSandboxRegistry)));
    let client = listener.client().await;
    client.send(&query("allowed.test", A)).await.unwrap();
    assert_eq!(receive(&client).await.addresses.len(), 1);
    client.send(&query("evil.test", A)).await.unwrap();
    assert_eq!(receive(&client).await.code, ResponseCode::NXDomain);
    let events = listener.audit_log.0.lock().unwrap().clone();
    assert_eq!(events.len(), 2);
    assert_eq!(events[1].reason, Some(Reason::HostDenied));
    assert_eq!(events[1].sandbox, Some(sandbox_id()));
}

#[tokio::test]
async fn excess_queries_in_flight_are_dropped() {
    let fixture = DnsFixture::with("", |limits| {
        limits.in_flight = 3;
        limits.deadline = Duration::from_secs(4);
    });
    add_allowed_name(&fixture);
    for n in 0..3 {
        fixture
            .resolver
            .set_reply(&format!("n{n}.wild.test"), A, DnsReply::Silence);
    }
    let listener = DnsListener::datagrams(&fixture, sandbox_source(Arc::new(OneSandboxRegistry)));
    let client = listener.client().await;
    for n in 0..3 {
        client
            .send(&query(&format!("n{n}.wild.test"), A))
            .await
            .unwrap();
    }
    client.send(&query("evil.test", A)).await.unwrap();
    until("the fourth query is dropped", || {
        fixture.metrics.count_of(QueryOutcome::Dropped, None) == 1
    })
    .await;
    for _ in 0..3 {
        assert_eq!(receive(&client).await.code, ResponseCode::ServFail);
    }
    // The slot of a query becomes free shortly after its answer is sent.
    let waiting = async {
        loop {
            client.send(&query("allowed.test", A)).await.unwrap();
            let answer = tokio::time::timeout(Duration::from_millis(300), receive(&client)).await;
            if let Ok(answer) = answer {
                return answer;
            }
        }
    };
    let answer = tokio::time::timeout(TIMEOUT, waiting).await.unwrap();
    assert_eq!(answer.addresses.len(), 1);
}

#[tokio::test]
async fn rate_limit_drops_datagrams_and_delays_streams() {
    let fixture = DnsFixture::new();
    let mut slow = settings(fixture.resolver.address(), "");
    slow.egress.dns.rate = NonZeroU32::new(5).unwrap();
    slow.egress.dns.burst = NonZeroU32::new(3);
    fixture.reload(slow);
    let listener = DnsListener::datagrams(&fixture, sandbox_source(Arc::new(OneSandboxRegistry)));
    let client = listener.client().await;
    for _ in 0..10 {
        client.send(&query("evil.test", A)).await.unwrap();
    }
    for _ in 0..3 {
        assert_eq!(receive(&client).await.code, ResponseCode::NXDomain);
    }
    let dropped = || fixture.metrics.count_of(QueryOutcome::Dropped, None);
    until("a query is dropped", || dropped() >= 1).await;

    let listener =
        DnsListener::streams(&fixture, sandbox_source(Arc::new(OneSandboxRegistry))).await;
    let mut stream = listener.connection().await;
    let all = vec![query("evil.test", A); 3];
    stream.write_all(&framed(&all)).await.unwrap();
    for _ in 0..3 {
        assert_eq!(read_answer(&mut stream).await.code, ResponseCode::NXDomain);
    }
}

#[tokio::test]
async fn socket_is_closed_after_stop() {
    let fixture = DnsFixture::new();
    let listener = DnsListener::datagrams(&fixture, sandbox_source(Arc::new(OneSandboxRegistry)));
    let client = listener.client().await;
    client.send(&query("evil.test", A)).await.unwrap();
    receive(&client).await;
    listener.stop.cancel();
    let closed = async {
        let mut buffer = [0; 512];
        loop {
            // On loopback a send to a closed port fails.
            if client.send(&query("evil.test", A)).await.is_err() {
                return;
            }
            let answer = tokio::time::timeout(Duration::from_millis(50), client.recv(&mut buffer));
            if let Ok(Err(_)) = answer.await {
                return;
            }
        }
    };
    tokio::time::timeout(TIMEOUT, closed)
        .await
        .expect("the socket closes");
}

#[tokio::test]
async fn connection_serves_concurrent_and_fragmented_queries() {
    let fixture = DnsFixture::with("", |limits| limits.deadline = Duration::from_secs(3));
    add_allowed_name(&fixture);
    let listener =
        DnsListener::streams(&fixture, sandbox_source(Arc::new(OneSandboxRegistry))).await;
    let mut stream = listener.connection().await;
    let all = framed(&[
        query("allowed.test", A),
        query("evil.test", A),
        query("palisade.internal", A),
    ]);
    for byte in all {
        stream.write_all(&[byte]).await.unwrap();
    }
    let mut answers = Vec::new();
    for _ in 0..3 {
        let answer = read_answer(&mut stream).await;
        answers.push((answer.code, answer.addresses.len()));
    }
    answers.sort_by_key(|(code, _)| u16::from(*code));
    assert_eq!(answers[2], (ResponseCode::NXDomain, 0));
    assert_eq!(answers[0], (ResponseCode::NoError, 1));

    // A fast answer does not wait for a slow answer.
    fixture
        .resolver
        .set_reply("slow.wild.test", A, DnsReply::Silence);
    let slow_and_fast = framed(&[query("slow.wild.test", A), query("evil.test", A)]);
    stream.write_all(&slow_and_fast).await.unwrap();
    stream.shutdown().await.unwrap();
    assert_eq!(read_answer(&mut stream).await.code, ResponseCode::NXDomain);
    assert_eq!(read_answer(&mut stream).await.code, ResponseCode::ServFail);
    assert_eq!(
        stream.read(&mut [0; 1]).await.unwrap(),
        0,
        "then the connection ends"
    );
}

#[tokio::test]
async fn all_of_300_queries_on_one_connection_are_answered() {
    let fixture = DnsFixture::with("", |limits| limits.in_flight = 2);
    let listener =
        DnsListener::streams(&fixture, sandbox_source(Arc::new(OneSandboxRegistry))).await;
    let stream = listener.connection().await;
    let (mut reader, mut writer) = stream.into_split();
    let sending = tokio::spawn(async move {
        let all: Vec<_> = (0..300)
            .map(|n| query(&format!("n{n}.evil.test"), A))
            .collect();
        writer.write_all(&framed(&all)).await.unwrap();
        writer
    });
    let reading = async {
        for _ in 0..300 {
            let length = reader.read_u16().await.unwrap();
            let mut answer = vec![0; length.into()];
            reader.read_exact(&mut answer).await.unwrap();
            assert_eq!(DnsAnswer::read(&answer, None).code, ResponseCode::NXDomain);
        }
    };
    tokio::time::timeout(TIMEOUT, reading).await.unwrap();
    drop(sending.await.unwrap());
    assert_eq!(listener.audit_log.0.lock().unwrap().len(), 300);
}

#[tokio::test]
async fn idle_and_slow_clients_are_disconnected() {
    let fixture = DnsFixture::with("", |limits| limits.idle = Duration::from_millis(300));
    let listener =
        DnsListener::streams(&fixture, sandbox_source(Arc::new(OneSandboxRegistry))).await;
    let mut silent = listener.connection().await;
    let mut byte = [0; 1];
    let ends = tokio::time::timeout(TIMEOUT, silent.read(&mut byte)).await;
    assert_eq!(ends.unwrap().unwrap(), 0);

    let slow_client = listener.connection().await;
    let (mut reader, mut writer) = slow_client.into_split();
    let send_slowly = async {
        writer.write_all(&[0x0f, 0xff]).await.unwrap();
        while writer.write_all(&[0]).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::select! {
        () = send_slowly => {}
        // A TCP reset also counts as the end.
        _ = reader.read(&mut byte) => {}
        () = tokio::time::sleep(TIMEOUT) => panic!("the slow client was not disconnected"),
    }
}

#[tokio::test]
async fn oversized_query_ends_the_connection() {
    let fixture = DnsFixture::new();
    let listener =
        DnsListener::streams(&fixture, sandbox_source(Arc::new(OneSandboxRegistry))).await;
    let mut stream = listener.connection().await;
    stream.write_all(&[0xff, 0xff]).await.unwrap();
    let ends = tokio::time::timeout(TIMEOUT, stream.read(&mut [0; 1]))
        .await
        .unwrap();
    assert!(matches!(ends, Ok(0) | Err(_)));
}

/// A registry with one registered sandbox, at 127.0.0.1.
struct OneSandboxRegistry;

impl Registry for OneSandboxRegistry {
    fn by_ip(&self, ip: IpAddr) -> RegistrationLookup {
        if ip == IpAddr::from([127, 0, 0, 1]) {
            registered(i64::MAX)
        } else {
            RegistrationLookup::Unknown
        }
    }

    fn by_id(&self, id: &SandboxId) -> RegistrationLookup {
        if *id == sandbox_id() {
            registered(i64::MAX)
        } else {
            RegistrationLookup::Unknown
        }
    }

    fn report_expiry(&self, _: &SandboxId) {}
}

/// An audit log in which the record of an unknown client never completes.
struct BlockedAuditLog;

#[async_trait::async_trait]
impl AuditSink for BlockedAuditLog {
    fn try_record(&self, event: Box<AuditEvent>) -> Result<(), Box<AuditEvent>> {
        match event.sandbox {
            Some(_) => Ok(()),
            None => Err(event),
        }
    }

    async fn record(&self, _: Box<AuditEvent>) {
        std::future::pending::<()>().await;
    }

    async fn record_durably(&self, event: Box<AuditEvent>) {
        self.record(event).await;
    }
}

/// An audit log that panics at the record of `evil.test`.
struct PanickingAuditLog;

#[async_trait::async_trait]
impl AuditSink for PanickingAuditLog {
    fn try_record(&self, event: Box<AuditEvent>) -> Result<(), Box<AuditEvent>> {
        assert_ne!(
            event.host.as_deref(),
            Some("evil.test"),
            "the panic of this test"
        );
        Ok(())
    }

    async fn record(&self, _: Box<AuditEvent>) {}

    async fn record_durably(&self, _: Box<AuditEvent>) {}
}

#[tokio::test]
async fn panic_in_one_query_does_not_affect_others() {
    let fixture = DnsFixture::with("", |limits| limits.in_flight = 1);
    let listener = DnsListener::datagrams_with(
        &fixture,
        shared_source(Arc::new(OneSandboxRegistry)),
        Arc::new(PanickingAuditLog),
    );
    let client = listener.client().await;
    for _ in 0..3 {
        client.send(&query("evil.test", A)).await.unwrap();
        client.send(&query("other.test", A)).await.unwrap();
        // The panic freed the only slot for queries in flight.
        assert_eq!(receive(&client).await.code, ResponseCode::NXDomain);
    }
}

#[tokio::test]
async fn flood_from_unknown_clients_does_not_block_registered_ones() {
    let fixture = DnsFixture::with("", |limits| limits.in_flight = 2);
    let listener = DnsListener::datagrams_with(
        &fixture,
        shared_source(Arc::new(OneSandboxRegistry)),
        Arc::new(BlockedAuditLog),
    );
    let unknown_client = UdpSocket::bind("127.0.0.2:0").await.unwrap();
    let datagram = query("allowed.test", A);
    for _ in 0..5 {
        unknown_client
            .send_to(&datagram, listener.address)
            .await
            .unwrap();
    }
    let dropped = || fixture.metrics.count_of(QueryOutcome::Dropped, None);
    until("the slots for unknown clients are used up", || {
        dropped() == 3
    })
    .await;
    let client = listener.client().await;
    client.send(&query("evil.test", A)).await.unwrap();
    assert_eq!(receive(&client).await.code, ResponseCode::NXDomain);
}

/// A sandbox's own network; `registry` has the registration of the sandbox, if any.
fn sandbox_source(registry: Arc<dyn Registry>) -> QuerySource {
    QuerySource::Sandbox {
        sandbox: sandbox_id(),
        registry,
    }
}

/// A shared network whose containers are registered in `registry`.
fn shared_source(registry: Arc<dyn Registry>) -> QuerySource {
    QuerySource::Shared {
        registry,
        checks: Arc::new(ListenerChecks::default()),
    }
}

/// A registry that returns the same result for every lookup.
struct FixedRegistry(RegistrationLookup);

impl Registry for FixedRegistry {
    fn by_ip(&self, ip: IpAddr) -> RegistrationLookup {
        assert!(ip.is_loopback());
        self.0.clone()
    }

    fn by_id(&self, _: &SandboxId) -> RegistrationLookup {
        self.0.clone()
    }

    fn report_expiry(&self, _: &SandboxId) {}
}

fn registered(expires: i64) -> RegistrationLookup {
    RegistrationLookup::Found(Arc::new(Registration {
        id: sandbox_id(),
        ip: None,
        repos: Vec::new(),
        auth_mode: AuthMode::User,
        credentials: Vec::new(),
        created: UnixMillis::new(0),
        expires: UnixMillis::new(expires),
        metadata: serde_json::Map::new(),
    }))
}

#[tokio::test]
async fn queries_without_a_live_registration_are_refused() {
    let fixture = DnsFixture::new();
    add_allowed_name(&fixture);
    for (lookup, code, reason) in [
        (registered(i64::MAX), ResponseCode::NoError, None),
        (
            registered(1),
            ResponseCode::Refused,
            Some(Reason::IdentityExpired),
        ),
        (
            RegistrationLookup::Unknown,
            ResponseCode::Refused,
            Some(Reason::IdentityUnknown),
        ),
        (
            RegistrationLookup::Unavailable,
            ResponseCode::Refused,
            Some(Reason::RegistryUnavailable),
        ),
    ] {
        let registry = Arc::new(FixedRegistry(lookup));
        for source in [
            shared_source(Arc::clone(&registry) as _),
            sandbox_source(registry),
        ] {
            let datagrams = DnsListener::datagrams(&fixture, source.clone());
            let client = datagrams.client().await;
            client.send(&query("allowed.test", A)).await.unwrap();
            assert_eq!(receive(&client).await.code, code);
            let streams = DnsListener::streams(&fixture, source).await;
            let mut stream = streams.connection().await;
            stream
                .write_all(&framed(&[query("allowed.test", A)]))
                .await
                .unwrap();
            assert_eq!(read_answer(&mut stream).await.code, code);
            for listener in [datagrams, streams] {
                assert_eq!(listener.audit_log.0.lock().unwrap()[0].reason, reason);
            }
        }
    }
}

#[tokio::test]
async fn gate_name_resolves_to_the_queried_address_on_shared_network() {
    let fixture = DnsFixture::new();
    let source = shared_source(Arc::new(FixedRegistry(registered(i64::MAX))));
    let listener = DnsListener::datagrams(&fixture, source);
    let client = listener.client().await;
    client.send(&query("palisade.internal", A)).await.unwrap();
    assert_eq!(receive(&client).await.addresses, [listener.address.ip()]);
}
