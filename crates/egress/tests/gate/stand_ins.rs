//! Who stands in for the parts that a gate is given: one registration for everybody, a log in
//! memory, and nobody who knows a program.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::{Arc, Mutex};

use arc_swap::ArcSwap;
use config::Settings;
use decide::hold::Questions;
use decide::snapshot::{CurrentPolicy, PolicySnapshot};
use egress::authority::Authority;
use egress::caller::Caller;
use egress::client_connection::ClientConnection;
use egress::connection;
use egress::dialer::Dialer;
use egress::mirror::Mirrors;
use egress::request::ConnectionInfo;
use egress::services::{Parts, Services};
use egress::source::Source;
use policy::audit::AuditEvent;
use policy::clock::UnixMillis;
use policy::host::Host;
use policy::id::{RequestId, SandboxId};
use policy::identity::Lookup;
use policy::ports::{AuditLog, AuditSink, Registry, SocketOwner};
use policy::registration::{AuthMode, Registration, Repo, RepoName};
use serde_json::{Map, json};
use tokio::io::{DuplexStream, duplex};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Whoever asks is registered, for one repository.
pub(crate) struct Row;

impl Row {
    pub(crate) fn of(id: &SandboxId) -> Registration {
        Registration {
            id: id.clone(),
            ip: None,
            repos: vec![Repo {
                name: RepoName::parse("acme/app").unwrap(),
                max_receive_pack_bytes: None,
            }],
            auth_mode: AuthMode::User,
            created: UnixMillis::new(0),
            expires: UnixMillis::new(i64::MAX),
            metadata: Map::from_iter([("team".to_owned(), json!("red"))]),
        }
    }
}

impl Registry for Row {
    fn by_id(&self, id: &SandboxId) -> Lookup {
        Lookup::Found(Arc::new(Self::of(id)))
    }

    fn by_ip(&self, _: IpAddr) -> Lookup {
        Lookup::Unknown
    }

    fn expired(&self, _: &SandboxId) {}
}

/// What was written down.
#[derive(Default)]
pub(crate) struct Records(pub(crate) Mutex<Vec<AuditEvent>>);

#[async_trait::async_trait]
impl AuditSink for Records {
    fn try_record(&self, event: Box<AuditEvent>) -> Result<(), Box<AuditEvent>> {
        self.0.lock().unwrap().push(*event);
        Ok(())
    }

    async fn record(&self, event: Box<AuditEvent>) {
        self.0.lock().unwrap().push(*event);
    }

    async fn keep(&self, event: Box<AuditEvent>) {
        self.record(event).await;
    }
}

#[async_trait::async_trait]
impl AuditLog for Records {
    async fn history(&self, _: &SandboxId) -> Option<Vec<AuditEvent>> {
        Some(Vec::new())
    }

    async fn find(&self, _: &SandboxId, _: RequestId) -> Option<AuditEvent> {
        None
    }
}

/// Nobody knows which program asks.
pub(crate) struct Nobody;

#[async_trait::async_trait]
impl SocketOwner for Nobody {
    async fn owner(&self, _: &SandboxId, _: SocketAddr, _: SocketAddr) -> Option<String> {
        None
    }
}

/// The sandbox whose traffic is tested.
pub(crate) fn sandbox() -> SandboxId {
    SandboxId::parse("fix-1").unwrap()
}

/// What a gate is made of that keeps its files in `directory`, where every sandbox is registered
/// and no question is answered.
pub(crate) fn parts(directory: &Path, settings: Settings, records: &Arc<Records>) -> Parts {
    let authority = Authority::open(directory, UnixMillis::new(1_800_000_000_000)).unwrap();
    Parts {
        registry: Arc::new(Row),
        audit: Arc::clone(records) as _,
        programs: Arc::new(Nobody),
        authority: Arc::new(ArcSwap::from_pointee(authority)),
        dialer: Dialer::new(&settings).unwrap(),
        policy: policy(settings),
        questions: Questions::default(),
        pack_reader: None,
        spool: directory.join("spool"),
        mirrors: Mirrors::open(&directory.join("mirrors")).unwrap(),
    }
}

/// A connection of the sandbox, in a tunnel to a host and port where there is one.
pub(crate) fn connect(services: &Arc<Services>, tunnel: Option<(Host, u16)>) -> DuplexStream {
    let (client, server) = duplex(64 * 1024);
    let visit = ClientConnection {
        services: Arc::clone(services),
        source: Source::Listener(services.sandbox(&sandbox()).unwrap()),
        connection_info: ConnectionInfo {
            peer: None,
            meant: None,
            tunnel,
            hello: None,
            caller: Caller::default(),
        },
        place: None,
        stop: CancellationToken::new(),
        tasks: TaskTracker::new(),
    };
    connection::begin(visit, server);
    client
}

/// The rules of `settings`, in force.
pub(crate) fn policy(settings: Settings) -> Arc<CurrentPolicy> {
    let snapshot = PolicySnapshot::load(Arc::new(settings)).unwrap();
    Arc::new(CurrentPolicy::new(snapshot))
}

/// Puts other settings in force, as a reload does. Returns how many requests in flight ended.
pub(crate) fn reload(services: &Services, settings: Arc<Settings>) -> Result<usize, String> {
    let prepared = Services::prepare(&settings).map_err(|error| error.to_string())?;
    let snapshot = PolicySnapshot::load(settings).map_err(|error| error.to_string())?;
    services.policy().replace(Arc::new(snapshot));
    services.apply(prepared);
    Ok(services.recheck())
}
