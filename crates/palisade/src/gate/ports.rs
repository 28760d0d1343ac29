//! Implementations of the traits by which the egress crate uses the gate: registry, audit log,
//! pack reader, socket owners.

use std::fs::File;
use std::net::{IpAddr, SocketAddr};

use control::wall_now;
use policy::audit::{AuditEvent, Kind};
use policy::id::{RequestId, SandboxId};
use policy::identity::RegistrationLookup;
use policy::ports::{AuditReader, AuditSink, Pack, PackReader, Registry, SocketOwner};
use policy::push::{Findings, PushContext};
use policy::verdict::Denial;
use sandbox::namespace::Namespace;
use sandbox::pack_reader::{PackFile, PackReaderPool};
use store::Store;
use store::audit::query::AuditFilter;
use store::registry::RegistryLookup as StoreLookup;
use tokio::runtime::Handle;

/// The store's registry.
#[derive(Clone, Debug)]
pub struct StoreRegistry {
    store: Store,
    runtime: Handle,
}

impl StoreRegistry {
    /// Must be called in the runtime that prunes expired rows.
    pub fn new(store: Store) -> Self {
        Self {
            store,
            runtime: Handle::current(),
        }
    }
}

fn lookup(found: StoreLookup) -> RegistrationLookup {
    match found {
        StoreLookup::Unavailable => RegistrationLookup::Unavailable,
        StoreLookup::Unknown => RegistrationLookup::Unknown,
        StoreLookup::Found(row) => RegistrationLookup::Found(row),
    }
}

impl Registry for StoreRegistry {
    fn by_id(&self, id: &SandboxId) -> RegistrationLookup {
        lookup(self.store.registry().by_id(id))
    }

    fn by_ip(&self, ip: IpAddr) -> RegistrationLookup {
        lookup(self.store.registry().by_ip(ip))
    }

    fn report_expiry(&self, id: &SandboxId) {
        let (store, id) = (self.store.clone(), id.clone());
        self.runtime.spawn(async move {
            // Removes every expired row, including this one.
            if let Err(error) = store.prune_expired(wall_now()).await {
                tracing::warn!(sandbox = %id, %error, "removing an expired registration failed");
            }
        });
    }
}

/// The store's audit log.
#[derive(Clone, Debug)]
pub struct StoreAuditSink(pub Store);

#[async_trait::async_trait]
impl AuditSink for StoreAuditSink {
    fn try_record(&self, event: Box<AuditEvent>) -> Result<(), Box<AuditEvent>> {
        self.0.audit().try_record(event, wall_now()).map(drop)
    }

    async fn record(&self, event: Box<AuditEvent>) {
        let sandbox = event.sandbox.clone();
        if let Err(error) = self.0.audit().record(*event, wall_now()).await {
            let sandbox = sandbox.as_ref().map(SandboxId::as_str);
            tracing::warn!(sandbox, %error, "recording a decision in the audit log failed");
        }
    }

    async fn record_durably(&self, event: Box<AuditEvent>) {
        let sandbox = event.sandbox.clone();
        if let Err(error) = self.0.audit().record_durable(*event, wall_now()).await {
            let sandbox = sandbox.as_ref().map(SandboxId::as_str);
            tracing::warn!(sandbox, %error, "recording a lifecycle event in the audit log failed");
        }
    }
}

#[async_trait::async_trait]
impl AuditReader for StoreAuditSink {
    async fn history(&self, sandbox: &SandboxId) -> Option<Vec<AuditEvent>> {
        let mut filter = AuditFilter {
            sandbox: Some(sandbox.clone()),
            kind: Some(Kind::Lifecycle),
            ..AuditFilter::default()
        };
        let mut history = Vec::new();
        loop {
            let page = match self.0.audit().query(filter.clone()).await {
                Ok(page) => page,
                Err(error) => {
                    tracing::warn!(%sandbox, %error, "querying the audit log failed");
                    return None;
                }
            };
            let Some(last) = page.last() else {
                return Some(history);
            };
            filter.after_seq = Some(last.seq);
            history.extend(page.into_iter().map(|record| record.event));
        }
    }

    async fn find(&self, sandbox: &SandboxId, request: RequestId) -> Option<AuditEvent> {
        let filter = AuditFilter {
            sandbox: Some(sandbox.clone()),
            request_id: Some(request),
            limit: Some(1),
            ..AuditFilter::default()
        };
        match self.0.audit().query(filter).await {
            Ok(records) => records.into_iter().next().map(|record| record.event),
            Err(error) => {
                tracing::warn!(%sandbox, %error, "querying the audit log failed");
                None
            }
        }
    }
}

/// The pool of pack readers.
#[derive(Clone, Debug)]
pub struct PackReaderPort(pub PackReaderPool);

#[async_trait::async_trait]
impl PackReader for PackReaderPort {
    async fn read(
        &self,
        case: &PushContext,
        pack: Option<Pack>,
        bases: Vec<File>,
    ) -> Result<Findings, Denial> {
        let pack = pack.map(|Pack { file, offset }| PackFile { file, offset });
        let whole = |file| PackFile { file, offset: 0 };
        let bases = bases.into_iter().map(whole).collect();
        let result = self.0.read(case, pack, bases).await;
        result.map_err(|error| error.denial())
    }
}

/// Looks up the program that owns a socket, through the init of its sandbox.
#[derive(Clone, Debug)]
pub struct SocketOwnerLookup(pub Namespace);

#[async_trait::async_trait]
impl SocketOwner for SocketOwnerLookup {
    async fn owner(&self, sandbox: &SandboxId, from: SocketAddr, to: SocketAddr) -> Option<String> {
        let (backend, id) = (self.0.clone(), sandbox.clone());
        let lookup = tokio::task::spawn_blocking(move || backend.socket_owner(&id, from, to));
        match lookup.await {
            Ok(Ok(program)) => program,
            Ok(Err(error)) => {
                tracing::debug!(%sandbox, %error, "sandbox did not report the owner of a socket");
                None
            }
            Err(error) => {
                tracing::warn!(%sandbox, %error, "looking up the owner of a socket failed");
                None
            }
        }
    }
}
