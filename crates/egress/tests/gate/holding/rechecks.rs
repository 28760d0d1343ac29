//! Rules that change at the moment a request leaves, or while its upstream takes its time: it is
//! decided about again, and not on a thread that others wait for.

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

/// A registry that keeps the threads on which it was read.
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

    fn expired(&self, _: &SandboxId) {}
}

impl RecordingRegistry {
    /// Whether a recheck was made on a thread that is not this one, which runs all tasks of a
    /// test. Nothing else reads the registry elsewhere.
    fn has_another(&self) -> bool {
        let own = thread::current().id();
        self.0.lock().unwrap().iter().any(|id| *id != own)
    }
}

/// A log that has the rules changed when the decision of a bundle is written to it: after the
/// decision about a request, and before the request leaves.
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

/// Refuses everything, in a bundle that only logs.
const LOGGED: &str = "package http.authz\n\nallow := false\n";

#[tokio::test]
async fn reload_as_a_request_leaves_rechecks_off_the_async_thread() {
    let logging = || Rules {
        bundle_mode: "log",
        unknown: UnknownHostAction::Deny,
        ..Rules::with_bundle("mine", LOGGED)
    };
    let elsewhere = Rules {
        domains: "other.example".to_owned(),
        ..logging()
    };
    for (rules, status) in [(logging(), 200), (elsewhere, 403)] {
        let (threads, log) = (RecordingRegistry::default(), Arc::<ReloadingLog>::default());
        let gate = Gate::with_dependencies(&logging(), hello_origin(), |dependencies| {
            ServiceDependencies {
                registry: Arc::new(threads.clone()),
                audit: Arc::clone(&log) as _,
                ..dependencies
            }
        });
        let gate = Arc::new(gate);
        assert!(log.gate.set((Arc::clone(&gate), rules)).is_ok());
        assert_eq!(gate.get("known.example", "/").await.status, status);
        assert!(threads.has_another());
        assert_eq!(gate.origin.requests().len(), usize::from(status == 200));
        gate.assert_nothing_held().await;
    }
}

#[tokio::test]
async fn reload_before_the_answer_rechecks_off_the_async_thread() {
    let latch = Latch::new();
    let (held, threads) = (latch.clone(), RecordingRegistry::default());
    let origin = OriginServer::http(move |_| OriginReply::text("hello").held(&held));
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
    assert!(!threads.has_another());
    let ended = gate.reload(&Rules {
        domains: "other.example".to_owned(),
        unknown: UnknownHostAction::Deny,
        ..Rules::default()
    });
    assert_eq!(ended, 1);
    assert_eq!(request_task.await.unwrap().reason(), "host_denied");
    assert!(threads.has_another());
    latch.open();
}
