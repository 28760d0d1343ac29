//! Rules that change when the gate sends a request, or before the upstream responds: the request is
//! decided again, on a thread that runs no async tasks.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, ThreadId};

use config::section::egress::UnknownHostAction;
use egress::services::ServiceDependencies;
use policy::audit::AuditEvent;
use policy::id::{RequestId, SandboxId};
use policy::identity::RegistrationLookup;
use policy::ports::{AuditReader, AuditSink, Registry};
use testkit::origin::{Latch, OriginReply, OriginServer};
use testkit::wait::eventually;

use super::fixture::{Gate, Rules, hello_origin};
use crate::fakes::FakeRegistry;

/// A registry that records the threads of its lookups.
#[derive(Clone, Default)]
struct RecordingRegistry(Arc<Mutex<Vec<ThreadId>>>);

impl Registry for RecordingRegistry {
    fn by_id(&self, id: &SandboxId) -> RegistrationLookup {
        self.0.lock().unwrap().push(thread::current().id());
        FakeRegistry.by_id(id)
    }

    fn by_ip(&self, ip: IpAddr) -> RegistrationLookup {
        FakeRegistry.by_ip(ip)
    }

    fn report_expiry(&self, _: &SandboxId) {}
}

impl RecordingRegistry {
    /// Whether a lookup ran on another thread than this one. This thread runs all async tasks of
    /// the test, so only a recheck can use another thread.
    fn used_another_thread(&self) -> bool {
        let own = thread::current().id();
        self.0.lock().unwrap().iter().any(|id| *id != own)
    }
}

/// An audit log that replaces the rules when the decision of a bundle is recorded: after the
/// decision about a request, and before the request is sent.
#[derive(Default)]
struct ReloadingLog {
    gate: OnceLock<(Arc<Gate>, Rules)>,
}

#[async_trait::async_trait]
impl AuditSink for ReloadingLog {
    fn try_record(&self, _: Box<AuditEvent>) -> Result<(), Box<AuditEvent>> {
        Ok(())
    }

    async fn record(&self, _: Box<AuditEvent>) {
        let (gate, rules) = self.gate.get().unwrap();
        gate.reload(rules);
    }

    async fn record_durably(&self, _: Box<AuditEvent>) {}
}

#[async_trait::async_trait]
impl AuditReader for ReloadingLog {
    async fn history(&self, _: &SandboxId) -> Option<Vec<AuditEvent>> {
        None
    }

    async fn find(&self, _: &SandboxId, _: RequestId) -> Option<AuditEvent> {
        None
    }
}

/// A policy that refuses everything; its bundle only logs.
const LOGGED: &str = "package http.authz\n\nallow := false\n";

#[tokio::test]
async fn reload_as_a_request_leaves_rechecks_off_the_async_thread() {
    let log_only = || Rules {
        bundle_mode: "log",
        unknown: UnknownHostAction::Deny,
        ..Rules::with_bundle("mine", LOGGED)
    };
    let other_host = Rules {
        domains: "other.example".to_owned(),
        ..log_only()
    };
    for (rules, status) in [(log_only(), 200), (other_host, 403)] {
        let (threads, log) = (RecordingRegistry::default(), Arc::<ReloadingLog>::default());
        let gate = Gate::with_dependencies(&log_only(), hello_origin(), |dependencies| {
            ServiceDependencies {
                registry: Arc::new(threads.clone()),
                audit: Arc::clone(&log) as _,
                ..dependencies
            }
        });
        let gate = Arc::new(gate);
        assert!(log.gate.set((Arc::clone(&gate), rules)).is_ok());
        assert_eq!(gate.get("known.example", "/").await.status, status);
        assert!(threads.used_another_thread());
        assert_eq!(gate.origin.requests().len(), usize::from(status == 200));
        gate.assert_nothing_held().await;
    }
}

#[tokio::test]
async fn reload_before_the_answer_rechecks_off_the_async_thread() {
    let latch = Latch::new();
    let (held, threads) = (latch.clone(), RecordingRegistry::default());
    let origin = OriginServer::http(move |_| OriginReply::text("hello").held_until(&held));
    let gate = Gate::with_dependencies(&Rules::default(), origin, |dependencies| {
        ServiceDependencies {
            registry: Arc::new(threads.clone()),
            ..dependencies
        }
    });
    let request_task = gate.spawn_get("known.example", "/").await;
    eventually("the request at its origin", || {
        (gate.origin.requests().len() == 1).then_some(())
    })
    .await;
    assert!(!threads.used_another_thread());
    let ended = gate.reload(&Rules {
        domains: "other.example".to_owned(),
        unknown: UnknownHostAction::Deny,
        ..Rules::default()
    });
    assert_eq!(ended, 1);
    assert_eq!(request_task.await.unwrap().reason(), "host_denied");
    assert!(threads.used_another_thread());
    latch.open();
}
