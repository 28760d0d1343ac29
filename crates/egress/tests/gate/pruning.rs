//! Pruning of the state of sandboxes whose registration has expired.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use config::Settings;
use egress::services::{ServiceDependencies, Services};
use policy::clock::UnixMillis;
use policy::host::Host;
use policy::id::SandboxId;
use policy::identity::RegistrationLookup;
use policy::ports::Registry;
use policy::registration::Registration;

use crate::fakes::{FakeRegistry, MemoryAuditLog, fake_dependencies};

/// A registry with the sandbox `live` and the expired sandbox `expired`.
struct ExpiringRegistry;

impl Registry for ExpiringRegistry {
    fn by_id(&self, id: &SandboxId) -> RegistrationLookup {
        let expires = match id.as_str() {
            "live" => UnixMillis::new(i64::MAX),
            "expired" => UnixMillis::new(1),
            _ => return RegistrationLookup::Unknown,
        };
        RegistrationLookup::Found(Arc::new(Registration {
            expires,
            ..FakeRegistry::registration(id)
        }))
    }

    fn by_ip(&self, _: IpAddr) -> RegistrationLookup {
        RegistrationLookup::Unknown
    }

    fn report_expiry(&self, _: &SandboxId) {}
}

/// The services of a gate with an [`ExpiringRegistry`].
fn create_services(directory: &std::path::Path) -> Arc<Services> {
    Services::new(ServiceDependencies {
        registry: Arc::new(ExpiringRegistry),
        ..fake_dependencies(
            directory,
            Settings::default(),
            &Arc::<MemoryAuditLog>::default(),
        )
    })
}

// Seed requirement of issue 15, number 16. The tokio clock is paused.
#[tokio::test(start_paused = true)]
async fn seed_003_buckets_of_unregistered_containers_are_pruned_every_five_minutes() {
    let directory = tempfile::tempdir().unwrap();
    let services = create_services(directory.path());
    let snapshot = services.policy().load();
    let host = Host::parse("api.example").unwrap();
    for name in ["live", "expired", "gone"] {
        let id = SandboxId::parse(name).unwrap();
        let state = services.sandbox(&id).unwrap();
        let now = services.clock().tick();
        let _pass = state
            .upstreams
            .take(&snapshot.settings, &host, now)
            .unwrap();
    }
    let names_with_state = || {
        let states = services.sandboxes_with_state();
        let mut names: Vec<String> = states.iter().map(|state| state.id().to_string()).collect();
        names.sort();
        names
    };
    let pruning = {
        let services = Arc::clone(&services);
        tokio::spawn(async move { services.prune_regularly().await })
    };
    tokio::time::sleep(Duration::from_secs(299)).await;
    assert_eq!(names_with_state(), ["expired", "gone", "live"]);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(names_with_state(), ["live"]);
    pruning.abort();
}
