//! Queries off sockets.

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
    A, DnsAnswer, DnsFixture, DnsListener, LONG, one, query, receive, settings, until,
};

fn known(fixture: &DnsFixture) {
    let public = RecordData::A([203, 0, 113, 7].into());
    let reply = DnsReply::Records(vec![record("allowed.test", public)]);
    fixture.resolver.set_reply("allowed.test", A, reply);
}

/// Queries with their lengths in front.
fn framed(queries: &[Vec<u8>]) -> Vec<u8> {
    let frame = |query: &Vec<u8>| {
        let length = u16::try_from(query.len()).unwrap().to_be_bytes();
        [length.to_vec(), query.clone()].concat()
    };
    queries.iter().flat_map(frame).collect()
}

async fn next(stream: &mut TcpStream) -> DnsAnswer {
    let reading = async {
        let length = stream.read_u16().await.unwrap();
        let mut answer = vec![0; length.into()];
        stream.read_exact(&mut answer).await.unwrap();
        DnsAnswer::read(&answer, None)
    };
    tokio::time::timeout(LONG, reading)
        .await
        .expect("an answer in time")
}

#[tokio::test]
async fn datagram_is_answered_after_its_audit_record() {
    let fixture = DnsFixture::new();
    known(&fixture);
    let served = DnsListener::datagrams(&fixture, sandbox(Arc::new(KnowsOne)));
    let client = served.client().await;
    client.send(&query("allowed.test", A)).await.unwrap();
    assert_eq!(receive(&client).await.addresses.len(), 1);
    client.send(&query("evil.test", A)).await.unwrap();
    assert_eq!(receive(&client).await.code, ResponseCode::NXDomain);
    let events = served.journal.0.lock().unwrap().clone();
    assert_eq!(events.len(), 2);
    assert_eq!(events[1].reason, Some(Reason::HostDenied));
    assert_eq!(events[1].sandbox, Some(one()));
}

#[tokio::test]
async fn excess_queries_in_flight_are_dropped() {
    let fixture = DnsFixture::with("", |limits| {
        limits.in_flight = 3;
        limits.deadline = Duration::from_secs(4);
    });
    known(&fixture);
    for n in 0..3 {
        fixture
            .resolver
            .set_reply(&format!("n{n}.wild.test"), A, DnsReply::Silence);
    }
    let served = DnsListener::datagrams(&fixture, sandbox(Arc::new(KnowsOne)));
    let client = served.client().await;
    for n in 0..3 {
        client
            .send(&query(&format!("n{n}.wild.test"), A))
            .await
            .unwrap();
    }
    client.send(&query("evil.test", A)).await.unwrap();
    until("the fourth is dropped", || {
        fixture.metrics.count_of(QueryOutcome::Dropped, None) == 1
    })
    .await;
    for _ in 0..3 {
        assert_eq!(receive(&client).await.code, ResponseCode::ServFail);
    }
    // The room is free a moment after the answer is out.
    let waiting = async {
        loop {
            client.send(&query("allowed.test", A)).await.unwrap();
            let answer = tokio::time::timeout(Duration::from_millis(300), receive(&client)).await;
            if let Ok(answer) = answer {
                return answer;
            }
        }
    };
    let answer = tokio::time::timeout(LONG, waiting).await.unwrap();
    assert_eq!(answer.addresses.len(), 1);
}

#[tokio::test]
async fn rate_limit_drops_datagrams_and_delays_streams() {
    let fixture = DnsFixture::new();
    let mut slow = settings(fixture.resolver.address(), "");
    slow.egress.dns.rate = NonZeroU32::new(5).unwrap();
    slow.egress.dns.burst = NonZeroU32::new(3);
    fixture.reload(slow);
    let served = DnsListener::datagrams(&fixture, sandbox(Arc::new(KnowsOne)));
    let client = served.client().await;
    for _ in 0..10 {
        client.send(&query("evil.test", A)).await.unwrap();
    }
    for _ in 0..3 {
        assert_eq!(receive(&client).await.code, ResponseCode::NXDomain);
    }
    let dropped = || fixture.metrics.count_of(QueryOutcome::Dropped, None);
    until("some are dropped", || dropped() >= 1).await;

    let served = DnsListener::streams(&fixture, sandbox(Arc::new(KnowsOne))).await;
    let mut stream = served.connection().await;
    let all = vec![query("evil.test", A); 3];
    stream.write_all(&framed(&all)).await.unwrap();
    for _ in 0..3 {
        assert_eq!(next(&mut stream).await.code, ResponseCode::NXDomain);
    }
}

#[tokio::test]
async fn socket_is_closed_after_stop() {
    let fixture = DnsFixture::new();
    let served = DnsListener::datagrams(&fixture, sandbox(Arc::new(KnowsOne)));
    let client = served.client().await;
    client.send(&query("evil.test", A)).await.unwrap();
    receive(&client).await;
    served.stop.cancel();
    let closed = async {
        let mut buffer = [0; 512];
        loop {
            // Loopback says so when a port has closed.
            if client.send(&query("evil.test", A)).await.is_err() {
                return;
            }
            let answer = tokio::time::timeout(Duration::from_millis(50), client.recv(&mut buffer));
            if let Ok(Err(_)) = answer.await {
                return;
            }
        }
    };
    tokio::time::timeout(LONG, closed)
        .await
        .expect("the socket closes");
}

#[tokio::test]
async fn connection_serves_concurrent_and_fragmented_queries() {
    let fixture = DnsFixture::with("", |limits| limits.deadline = Duration::from_secs(3));
    known(&fixture);
    let served = DnsListener::streams(&fixture, sandbox(Arc::new(KnowsOne))).await;
    let mut stream = served.connection().await;
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
        let answer = next(&mut stream).await;
        answers.push((answer.code, answer.addresses.len()));
    }
    answers.sort_by_key(|(code, _)| u16::from(*code));
    assert_eq!(answers[2], (ResponseCode::NXDomain, 0));
    assert_eq!(answers[0], (ResponseCode::NoError, 1));

    // A quick answer does not wait for a slow one.
    fixture
        .resolver
        .set_reply("slow.wild.test", A, DnsReply::Silence);
    let both = framed(&[query("slow.wild.test", A), query("evil.test", A)]);
    stream.write_all(&both).await.unwrap();
    stream.shutdown().await.unwrap();
    assert_eq!(next(&mut stream).await.code, ResponseCode::NXDomain);
    assert_eq!(next(&mut stream).await.code, ResponseCode::ServFail);
    assert_eq!(stream.read(&mut [0; 1]).await.unwrap(), 0, "then it ends");
}

#[tokio::test]
async fn all_of_300_queries_on_one_connection_are_answered() {
    let fixture = DnsFixture::with("", |limits| limits.in_flight = 2);
    let served = DnsListener::streams(&fixture, sandbox(Arc::new(KnowsOne))).await;
    let stream = served.connection().await;
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
    tokio::time::timeout(LONG, reading).await.unwrap();
    drop(sending.await.unwrap());
    assert_eq!(served.journal.0.lock().unwrap().len(), 300);
}

#[tokio::test]
async fn idle_and_slow_clients_are_disconnected() {
    let fixture = DnsFixture::with("", |limits| limits.idle = Duration::from_millis(300));
    let served = DnsListener::streams(&fixture, sandbox(Arc::new(KnowsOne))).await;
    let mut silent = served.connection().await;
    let mut byte = [0; 1];
    let ends = tokio::time::timeout(LONG, silent.read(&mut byte)).await;
    assert_eq!(ends.unwrap().unwrap(), 0);

    let dribbling = served.connection().await;
    let (mut reader, mut writer) = dribbling.into_split();
    let dribble = async {
        writer.write_all(&[0x0f, 0xff]).await.unwrap();
        while writer.write_all(&[0]).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::select! {
        () = dribble => {}
        // A reset is an end as well.
        _ = reader.read(&mut byte) => {}
        () = tokio::time::sleep(LONG) => panic!("it dribbles on"),
    }
}

#[tokio::test]
async fn oversized_query_ends_the_connection() {
    let fixture = DnsFixture::new();
    let served = DnsListener::streams(&fixture, sandbox(Arc::new(KnowsOne))).await;
    let mut stream = served.connection().await;
    stream.write_all(&[0xff, 0xff]).await.unwrap();
    let ends = tokio::time::timeout(LONG, stream.read(&mut [0; 1]))
        .await
        .unwrap();
    assert!(matches!(ends, Ok(0) | Err(_)));
}

/// A registry that knows one sandbox, at 127.0.0.1.
struct KnowsOne;

impl Registry for KnowsOne {
    fn by_ip(&self, ip: IpAddr) -> RegistrationLookup {
        if ip == IpAddr::from([127, 0, 0, 1]) {
            registered(i64::MAX)
        } else {
            RegistrationLookup::Unknown
        }
    }

    fn by_id(&self, id: &SandboxId) -> RegistrationLookup {
        if *id == one() {
            registered(i64::MAX)
        } else {
            RegistrationLookup::Unknown
        }
    }

    fn expired(&self, _: &SandboxId) {}
}

/// A journal that never finishes a stranger's record.
struct Stuck;

#[async_trait::async_trait]
impl AuditSink for Stuck {
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

/// A journal that fails at one name in the worst way.
struct Panics;

#[async_trait::async_trait]
impl AuditSink for Panics {
    fn try_record(&self, event: Box<AuditEvent>) -> Result<(), Box<AuditEvent>> {
        assert_ne!(event.host.as_deref(), Some("evil.test"), "as it should");
        Ok(())
    }

    async fn record(&self, _: Box<AuditEvent>) {}

    async fn record_durably(&self, _: Box<AuditEvent>) {}
}

#[tokio::test]
async fn panic_in_one_query_does_not_affect_others() {
    let fixture = DnsFixture::with("", |limits| limits.in_flight = 1);
    let served =
        DnsListener::datagrams_with(&fixture, shared(Arc::new(KnowsOne)), Arc::new(Panics));
    let client = served.client().await;
    for _ in 0..3 {
        client.send(&query("evil.test", A)).await.unwrap();
        client.send(&query("other.test", A)).await.unwrap();
        // Its room, of which there is one, was given back.
        assert_eq!(receive(&client).await.code, ResponseCode::NXDomain);
    }
}

#[tokio::test]
async fn flood_from_unknown_clients_does_not_block_registered_ones() {
    let fixture = DnsFixture::with("", |limits| limits.in_flight = 2);
    let served = DnsListener::datagrams_with(&fixture, shared(Arc::new(KnowsOne)), Arc::new(Stuck));
    let stranger = UdpSocket::bind("127.0.0.2:0").await.unwrap();
    let asked = query("allowed.test", A);
    for _ in 0..5 {
        stranger.send_to(&asked, served.address).await.unwrap();
    }
    let dropped = || fixture.metrics.count_of(QueryOutcome::Dropped, None);
    until("the strangers' room is full", || dropped() == 3).await;
    let client = served.client().await;
    client.send(&query("evil.test", A)).await.unwrap();
    assert_eq!(receive(&client).await.code, ResponseCode::NXDomain);
}

/// The network of a sandbox that `registry` knows or does not.
fn sandbox(registry: Arc<dyn Registry>) -> QuerySource {
    QuerySource::Sandbox {
        sandbox: one(),
        registry,
    }
}

/// A shared network whose containers `registry` knows.
fn shared(registry: Arc<dyn Registry>) -> QuerySource {
    QuerySource::Shared {
        registry,
        checks: Arc::new(ListenerChecks::default()),
    }
}

/// A registry with one answer.
struct Says(RegistrationLookup);

impl Registry for Says {
    fn by_ip(&self, ip: IpAddr) -> RegistrationLookup {
        assert!(ip.is_loopback());
        self.0.clone()
    }

    fn by_id(&self, _: &SandboxId) -> RegistrationLookup {
        self.0.clone()
    }

    fn expired(&self, _: &SandboxId) {}
}

fn registered(expires: i64) -> RegistrationLookup {
    RegistrationLookup::Found(Arc::new(Registration {
        id: one(),
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
    known(&fixture);
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
        let registry = Arc::new(Says(lookup));
        for source in [shared(Arc::clone(&registry) as _), sandbox(registry)] {
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
            assert_eq!(next(&mut stream).await.code, code);
            for served in [datagrams, streams] {
                assert_eq!(served.journal.0.lock().unwrap()[0].reason, reason);
            }
        }
    }
}

#[tokio::test]
async fn gate_name_resolves_to_the_queried_address_on_shared_network() {
    let fixture = DnsFixture::new();
    let source = shared(Arc::new(Says(registered(i64::MAX))));
    let served = DnsListener::datagrams(&fixture, source);
    let client = served.client().await;
    client.send(&query("palisade.internal", A)).await.unwrap();
    assert_eq!(receive(&client).await.addresses, [served.address.ip()]);
}
