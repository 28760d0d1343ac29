//! Fake dependencies of a gate: a registry that accepts every sandbox, an audit log in memory, and
//! a socket owner lookup without results.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::{Arc, Mutex};

use arc_swap::ArcSwap;
use config::Settings;
use credentials::service::CredentialService;
use decide::hold::Questions;
use decide::snapshot::{CurrentPolicy, PolicySnapshot};
use egress::authority::CertificateAuthority;
use egress::caller::ProgramLookup;
use egress::client_connection::ClientConnection;
use egress::connection;
use egress::dialer::Dialer;
use egress::mirror::Mirrors;
use egress::request::ConnectionInfo;
use egress::services::{ServiceDependencies, Services};
use egress::source::ConnectionSource;
use policy::audit::AuditEvent;
use policy::clock::UnixMillis;
use policy::host::Host;
use policy::id::{RequestId, SandboxId};
use policy::identity::RegistrationLookup;
use policy::ports::{AuditReader, AuditSink, Registry, SocketOwner};
use policy::registration::{AuthMode, Registration, Repo, RepoName};
use serde_json::{Map, json};
use tokio::io::{DuplexStream, duplex};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// A registry in which every sandbox is registered, with one repository.
pub(crate) struct FakeRegistry;

impl FakeRegistry {
    /// The registration that the registry returns for `id`.
    pub(crate) fn registration(id: &SandboxId) -> Registration {
        Registration {
            id: id.clone(),
            ip: None,
            repos: vec![Repo {
                name: RepoName::parse("acme/app").unwrap(),
                max_receive_pack_bytes: None,
            }],
            auth_mode: AuthMode::User,
            credentials: Vec::new(),
            created: UnixMillis::new(0),
            expires: UnixMillis::new(i64::MAX),
            metadata: Map::from_iter([("team".to_owned(), json!("red"))]),
        }
    }
}

impl Registry for FakeRegistry {
    fn by_id(&self, id: &SandboxId) -> RegistrationLookup {
        RegistrationLookup::Found(Arc::new(Self::registration(id)))
    }

    fn by_ip(&self, _: IpAddr) -> RegistrationLookup {
        RegistrationLookup::Unknown
    }

    fn report_expiry(&self, _: &SandboxId) {}
}

/// An audit log in memory.
#[derive(Default)]
pub(crate) struct MemoryAuditLog(pub(crate) Mutex<Vec<AuditEvent>>);

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

#[async_trait::async_trait]
impl AuditReader for MemoryAuditLog {
    async fn history(&self, _: &SandboxId) -> Option<Vec<AuditEvent>> {
        Some(Vec::new())
    }

    async fn find(&self, _: &SandboxId, _: RequestId) -> Option<AuditEvent> {
        None
    }
}

/// A lookup that never finds the program of a socket.
pub(crate) struct NoSocketOwner;

#[async_trait::async_trait]
impl SocketOwner for NoSocketOwner {
    async fn owner(&self, _: &SandboxId, _: SocketAddr, _: SocketAddr) -> Option<String> {
        None
    }
}

/// Id of the sandbox whose traffic is tested.
pub(crate) fn sandbox_id() -> SandboxId {
    SandboxId::parse("fix-1").unwrap()
}

/// Dependencies of a gate that stores its files in `directory`, has every sandbox registered and
/// no operator.
pub(crate) fn fake_dependencies(
    directory: &Path,
    settings: Settings,
    records: &Arc<MemoryAuditLog>,
) -> ServiceDependencies {
    let authority =
        CertificateAuthority::open(directory, UnixMillis::new(1_800_000_000_000)).unwrap();
    let credentials = CredentialService::open(directory, Box::new(|_, _| ())).unwrap();
    ServiceDependencies {
        credentials: Arc::new(credentials),
        registry: Arc::new(FakeRegistry),
        audit: Arc::clone(records) as _,
        socket_owners: Arc::new(NoSocketOwner),
        authority: Arc::new(ArcSwap::from_pointee(authority)),
        dialer: Dialer::new(&settings).unwrap(),
        policy: load_policy(settings),
        questions: Questions::default(),
        pack_reader: None,
        spool: directory.join("spool"),
        mirrors: Mirrors::open(&directory.join("mirrors")).unwrap(),
    }
}

/// Opens a connection of the sandbox, inside a tunnel to a host and port if one is given.
pub(crate) fn connect(services: &Arc<Services>, tunnel: Option<(Host, u16)>) -> DuplexStream {
    let (client, server) = duplex(64 * 1024);
    let connection = ClientConnection {
        services: Arc::clone(services),
        source: ConnectionSource::Listener(services.sandbox(&sandbox_id()).unwrap()),
        connection_info: ConnectionInfo {
            peer: None,
            original_destination: None,
            tunnel,
            hello: None,
            caller: ProgramLookup::default(),
        },
        connection_slot: None,
        stop: CancellationToken::new(),
        tasks: TaskTracker::new(),
    };
    connection::spawn(connection, server);
    client
}

/// Compiles the policy of `settings`.
pub(crate) fn load_policy(settings: Settings) -> Arc<CurrentPolicy> {
    let snapshot = PolicySnapshot::load(Arc::new(settings)).unwrap();
    Arc::new(CurrentPolicy::new(snapshot))
}

/// Applies other settings, as a reload does. Returns the number of requests in flight that ended.
pub(crate) fn reload(services: &Services, settings: Arc<Settings>) -> Result<usize, String> {
    let prepared = Services::prepare(&settings).map_err(|error| error.to_string())?;
    let snapshot = PolicySnapshot::load(settings).map_err(|error| error.to_string())?;
    services.policy().replace(Arc::new(snapshot));
    services.apply(prepared);
    Ok(services.recheck())
}
