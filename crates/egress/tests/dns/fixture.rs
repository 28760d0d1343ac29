//! The gate's DNS server with settings from a file, a fake upstream resolver, and clients.

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

/// Timeout of every wait of a test.
pub(super) const TIMEOUT: Duration = Duration::from_secs(20);

pub(super) fn sandbox_id() -> SandboxId {
    SandboxId::parse("one").unwrap()
}

/// Settings of the forward mode, loaded from a file with `more` lines.
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
    pub(super) name_server: Arc<NameServer>,
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
        let current = Arc::clone(&settings);
        let current_policy = Box::new(move |_: Option<&SandboxId>| {
            let settings = Arc::clone(&current.lock().unwrap());
            NamePolicy::from(Arc::new(PolicySnapshot::without_bundles(settings)))
        });
        let fixture = Self {
            resolver,
            name_server: Arc::new(NameServer::new(
                current_policy,
                Questions::default(),
                limits,
                metrics.clone(),
            )),
            metrics,
            settings,
        };
        fixture.apply_resolvers();
        fixture
    }

    /// Applies other settings, as a reload does.
    pub(super) fn reload(&self, settings: Settings) {
        *self.settings.lock().unwrap() = Arc::new(settings);
        self.apply_resolvers();
    }

    fn apply_resolvers(&self) {
        let settings = Arc::clone(&self.settings.lock().unwrap());
        self.name_server
            .set_resolvers(egress::resolvers::read(&settings.egress.dns));
    }

    pub(super) async fn resolve(&self, name: &str, kind: u16) -> DnsAnswer {
        self.resolve_over(Transport::Udp, name, kind).await
    }

    pub(super) async fn resolve_over(
        &self,
        transport: Transport,
        name: &str,
        kind: u16,
    ) -> DnsAnswer {
        self.resolve_as(&sandbox_id(), transport, name, kind).await
    }

    pub(super) async fn resolve_as(
        &self,
        sandbox: &SandboxId,
        transport: Transport,
        name: &str,
        kind: u16,
    ) -> DnsAnswer {
        let context = QueryContext {
            transport,
            mode: config::section::egress::DnsMode::Forward,
            gate: None,
        };
        let query = query(name, kind);
        let client = QueryClient::Known(sandbox.clone());
        let answer = self.name_server.answer(&client, &query, &context).await;
        let DnsResponse { bytes, event } = answer.expect("an answer");
        DnsAnswer::read(&bytes, event)
    }
}

/// Builds a query with an EDNS cookie and a client subnet, which the gate must not forward.
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

/// A parsed DNS answer.
#[derive(Debug)]
pub(super) struct DnsAnswer {
    pub(super) code: ResponseCode,
    pub(super) truncated: bool,
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
                "aliases are flattened, and the name has the client's upper and lower case"
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
            truncated: message.metadata.truncation,
            addresses,
            texts,
            ttl: message.answers.first().map(|record| record.ttl),
            event,
        }
    }
}

/// An audit log in memory.
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

/// A DNS listener of the gate, and its audit log.
pub(super) struct DnsListener {
    pub(super) address: SocketAddr,
    pub(super) audit_log: Arc<MemoryAuditLog>,
    pub(super) stop: CancellationToken,
}

impl DnsListener {
    pub(super) fn datagrams(fixture: &DnsFixture, source: QuerySource) -> Self {
        let audit_log = Arc::new(MemoryAuditLog::default());
        let listener = Self::datagrams_with(
            fixture,
            source,
            Arc::clone(&audit_log) as Arc<dyn AuditSink>,
        );
        Self {
            audit_log,
            ..listener
        }
    }

    pub(super) fn datagrams_with(
        fixture: &DnsFixture,
        source: QuerySource,
        audit_log: Arc<dyn AuditSink>,
    ) -> Self {
        let socket = std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        let packet_info = nix::sys::socket::sockopt::Ipv4PacketInfo;
        nix::sys::socket::setsockopt(&socket, packet_info, &true).unwrap();
        let listener = Self::on_port(socket.local_addr().unwrap().port());
        tokio::spawn(serve_datagrams(
            Arc::clone(&fixture.name_server),
            DatagramSocket::new(socket.into()).unwrap(),
            source,
            audit_log,
            listener.stop.clone(),
        ));
        listener
    }

    pub(super) async fn streams(fixture: &DnsFixture, source: QuerySource) -> Self {
        let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let listener = Self::on_port(socket.local_addr().unwrap().port());
        let name_server = Arc::clone(&fixture.name_server);
        let audit_log = Arc::clone(&listener.audit_log);
        let stop = listener.stop.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = socket.accept().await {
                tokio::spawn(serve_stream(
                    Arc::clone(&name_server),
                    stream,
                    source.clone(),
                    Arc::clone(&audit_log) as Arc<dyn AuditSink>,
                    stop.clone(),
                ));
            }
        });
        listener
    }

    fn on_port(port: u16) -> Self {
        Self {
            address: SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port),
            audit_log: Arc::default(),
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

/// Receives the next answer.
pub(super) async fn receive(client: &UdpSocket) -> DnsAnswer {
    let mut buffer = [0; 4096];
    let length = tokio::time::timeout(TIMEOUT, client.recv(&mut buffer));
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
    tokio::time::timeout(TIMEOUT, waiting)
        .await
        .unwrap_or_else(|_| panic!("timed out waiting until {what}"));
}
