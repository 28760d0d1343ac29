//! A gate's DNS with settings from a file, a resolver behind it, and clients before it.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use config::Settings;
use decide::hold::Questions;
use decide::snapshot::PolicySnapshot;
use egress::datagram::DatagramSocket;
use egress::dns::{
    DnsLimits, DnsMetrics, DnsResponse, NamePolicy, NameServer, QueryClient, QueryContext,
    QuerySource, Transport, serve_datagrams, serve_stream,
};
use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::RData;
use policy::audit::AuditEvent;
use policy::id::SandboxId;
use policy::ports::AuditSink;
use testkit::resolver::Resolver;
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio_util::sync::CancellationToken;

pub(super) const A: u16 = 1;
pub(super) const AAAA: u16 = 28;
pub(super) const TXT: u16 = 16;

/// Longer than any answer takes, shorter than a person waits.
pub(super) const LONG: Duration = Duration::from_secs(20);

pub(super) fn one() -> SandboxId {
    SandboxId::parse("one").unwrap()
}

/// Settings in forward mode, by way of a file as an operator writes it.
pub(super) fn settings(resolver: SocketAddr, more: &str) -> Settings {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("palisade.yaml");
    let text = format!(
        "version: '1.0'\negress:\n  domains: [allowed.test, '*.wild.test', cdn.test, \
         {{host: evil.wild.test, deny: [{{}}]}}]\n  \
         dns: {{mode: forward, upstreams: ['{resolver}'], extra_types: [TXT]}}\n{more}"
    );
    std::fs::write(&path, text).unwrap();
    config::load(Some(&path), &|_| None).unwrap()
}

pub(super) struct DnsFixture {
    pub(super) resolver: Resolver,
    pub(super) names: Arc<NameServer>,
    pub(super) metrics: DnsMetrics,
    settings: Arc<Mutex<Arc<Settings>>>,
}

impl DnsFixture {
    pub(super) fn new() -> Self {
        Self::with("", |_| {})
    }

    pub(super) fn with(more: &str, change: impl FnOnce(&mut DnsLimits)) -> Self {
        let resolver = Resolver::start();
        let settings = settings(resolver.address(), more);
        let settings = Arc::new(Mutex::new(Arc::new(settings)));
        let mut limits = DnsLimits::default();
        change(&mut limits);
        let metrics = DnsMetrics::default();
        let now = Arc::clone(&settings);
        let now = Box::new(move |_: Option<&SandboxId>| {
            let settings = Arc::clone(&now.lock().unwrap());
            NamePolicy::from(Arc::new(PolicySnapshot::without_bundles(settings)))
        });
        let fixture = Self {
            resolver,
            names: Arc::new(NameServer::new(
                now,
                Questions::default(),
                limits,
                metrics.clone(),
            )),
            metrics,
            settings,
        };
        fixture.follow();
        fixture
    }

    /// What a reload does.
    pub(super) fn reload(&self, settings: Settings) {
        *self.settings.lock().unwrap() = Arc::new(settings);
        self.follow();
    }

    fn follow(&self) {
        let settings = Arc::clone(&self.settings.lock().unwrap());
        self.names
            .set_resolvers(egress::resolvers::read(&settings.egress.dns));
    }

    pub(super) async fn ask(&self, name: &str, kind: u16) -> DnsAnswer {
        self.ask_over(Transport::Udp, name, kind).await
    }

    pub(super) async fn ask_over(&self, transport: Transport, name: &str, kind: u16) -> DnsAnswer {
        self.ask_as(&one(), transport, name, kind).await
    }

    pub(super) async fn ask_as(
        &self,
        sandbox: &SandboxId,
        transport: Transport,
        name: &str,
        kind: u16,
    ) -> DnsAnswer {
        let way = QueryContext {
            transport,
            mode: config::section::egress::DnsMode::Forward,
            gate: None,
        };
        let query = query(name, kind);
        let asker = QueryClient::Known(sandbox.clone());
        let answer = self.names.answer(&asker, &query, &way).await;
        let DnsResponse { bytes, event } = answer.expect("an answer");
        DnsAnswer::read(&bytes, event)
    }
}

/// A query by hand, with a cookie and a client subnet that are nobody's business.
pub(super) fn query(name: &str, kind: u16) -> Vec<u8> {
    let mut bytes = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\x01".to_vec();
    for label in name.split('.') {
        bytes.push(u8::try_from(label.len()).unwrap());
        bytes.extend(label.as_bytes());
    }
    bytes.push(0);
    bytes.extend(kind.to_be_bytes());
    bytes.extend([0, 1]);
    bytes.extend([0, 0, 41, 0x04, 0xd0, 0, 0, 0, 0, 0, 23]);
    bytes.extend(b"\0\x0a\0\x08tellthem");
    bytes.extend([0, 8, 0, 7, 0, 1, 24, 0, 192, 0, 2]);
    bytes
}

/// An answer as a client understands it.
#[derive(Debug)]
pub(super) struct DnsAnswer {
    pub(super) code: ResponseCode,
    pub(super) cut: bool,
    pub(super) addresses: Vec<IpAddr>,
    pub(super) texts: Vec<String>,
    pub(super) ttl: Option<u32>,
    pub(super) event: Option<AuditEvent>,
}

impl DnsAnswer {
    pub(super) fn read(bytes: &[u8], event: Option<AuditEvent>) -> Self {
        let message = Message::from_vec(bytes).unwrap();
        assert_eq!(message.metadata.id, 0x1234);
        let question = &message.queries[0].name;
        let (mut addresses, mut texts) = (Vec::new(), Vec::new());
        for record in &message.answers {
            assert!(
                record.name.eq_case(question),
                "flattened, in the asker's letters"
            );
            match &record.data {
                RData::A(a) => addresses.push(a.0.into()),
                RData::AAAA(aaaa) => addresses.push(aaaa.0.into()),
                RData::TXT(text) => texts.push(text.to_string()),
                other => panic!("unrequested record {other:?}"),
            }
        }
        Self {
            code: message.metadata.response_code,
            cut: message.metadata.truncation,
            addresses,
            texts,
            ttl: message.answers.first().map(|record| record.ttl),
            event,
        }
    }
}

/// Remembers what was written down.
#[derive(Default)]
pub(super) struct MemoryAuditLog(pub(super) Mutex<Vec<AuditEvent>>);

#[async_trait::async_trait]
impl AuditSink for MemoryAuditLog {
    fn try_record(&self, event: Box<AuditEvent>) -> Result<(), Box<AuditEvent>> {
        self.0.lock().unwrap().push(*event);
        Ok(())
    }

    async fn record(&self, event: Box<AuditEvent>) {
        self.0.lock().unwrap().push(*event);
    }

    async fn record_durably(&self, event: Box<AuditEvent>) {
        self.record(event).await;
    }
}

/// The sockets of a gate.
pub(super) struct DnsListener {
    pub(super) address: SocketAddr,
    pub(super) journal: Arc<MemoryAuditLog>,
    pub(super) stop: CancellationToken,
}

impl DnsListener {
    pub(super) fn datagrams(fixture: &DnsFixture, source: QuerySource) -> Self {
        let journal = Arc::new(MemoryAuditLog::default());
        let served =
            Self::datagrams_with(fixture, source, Arc::clone(&journal) as Arc<dyn AuditSink>);
        Self { journal, ..served }
    }

    pub(super) fn datagrams_with(
        fixture: &DnsFixture,
        source: QuerySource,
        journal: Arc<dyn AuditSink>,
    ) -> Self {
        let socket = std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        let on = nix::sys::socket::sockopt::Ipv4PacketInfo;
        nix::sys::socket::setsockopt(&socket, on, &true).unwrap();
        let served = Self::at(socket.local_addr().unwrap().port());
        tokio::spawn(serve_datagrams(
            Arc::clone(&fixture.names),
            DatagramSocket::new(socket.into()).unwrap(),
            source,
            journal,
            served.stop.clone(),
        ));
        served
    }

    pub(super) async fn streams(fixture: &DnsFixture, source: QuerySource) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let served = Self::at(listener.local_addr().unwrap().port());
        let names = Arc::clone(&fixture.names);
        let journal = Arc::clone(&served.journal);
        let stop = served.stop.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve_stream(
                    Arc::clone(&names),
                    stream,
                    source.clone(),
                    Arc::clone(&journal) as Arc<dyn AuditSink>,
                    stop.clone(),
                ));
            }
        });
        served
    }

    fn at(port: u16) -> Self {
        Self {
            address: SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port),
            journal: Arc::default(),
            stop: CancellationToken::new(),
        }
    }

    pub(super) async fn client(&self) -> UdpSocket {
        let client = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        client.connect(self.address).await.unwrap();
        client
    }

    pub(super) async fn connection(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }
}

/// The next datagram.
pub(super) async fn receive(client: &UdpSocket) -> DnsAnswer {
    let mut buffer = [0; 4096];
    let length = tokio::time::timeout(LONG, client.recv(&mut buffer));
    let length = length.await.expect("an answer in time").unwrap();
    DnsAnswer::read(&buffer[..length], None)
}

/// Waits for a condition.
pub(super) async fn until(what: &str, condition: impl Fn() -> bool) {
    let waiting = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONG, waiting)
        .await
        .unwrap_or_else(|_| panic!("never: {what}"));
}
