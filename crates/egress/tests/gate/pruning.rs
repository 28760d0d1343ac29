//! State of sandboxes whose registration ended without a request to end it.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use config::Settings;
use egress::services::{Parts, Services};
use policy::clock::UnixMillis;
use policy::host::Host;
use policy::id::SandboxId;
use policy::identity::Lookup;
use policy::ports::Registry;
use policy::registration::Registration;

use crate::stand_ins::{Records, Row, parts};

/// A registry in which `live` is registered, `expired` was, and nothing else ever.
struct Rows;

impl Registry for Rows {
    fn by_id(&self, id: &SandboxId) -> Lookup {
        let expires = match id.as_str() {
            "live" => UnixMillis::new(i64::MAX),
            "expired" => UnixMillis::new(1),
            _ => return Lookup::Unknown,
        };
        Lookup::Found(Arc::new(Registration {
            expires,
            ..Row::of(id)
        }))
    }

    fn by_ip(&self, _: IpAddr) -> Lookup {
        Lookup::Unknown
    }

    fn expired(&self, _: &SandboxId) {}
}

fn traffic(directory: &std::path::Path) -> Arc<Services> {
    Services::new(Parts {
        registry: Arc::new(Rows),
        ..parts(directory, Settings::default(), &Arc::<Records>::default())
    })
}

// Issue 15, number 16. The time is virtual.
#[tokio::test(start_paused = true)]
async fn seed_003_buckets_of_unregistered_containers_are_pruned_every_five_minutes() {
    let directory = tempfile::tempdir().unwrap();
    let traffic = traffic(directory.path());
    let rules = traffic.policy().load();
    let host = Host::parse("api.example").unwrap();
    for name in ["live", "expired", "gone"] {
        let id = SandboxId::parse(name).unwrap();
        let guest = traffic.sandbox(&id).unwrap();
        let now = traffic.clock().tick();
        let _pass = guest.upstreams.take(&rules.settings, &host, now).unwrap();
    }
    let known = || {
        let known = traffic.known();
        let mut names: Vec<String> = known.iter().map(|one| one.id().to_string()).collect();
        names.sort();
        names
    };
    let pruning = {
        let traffic = Arc::clone(&traffic);
        tokio::spawn(async move { traffic.prune_regularly().await })
    };
    tokio::time::sleep(Duration::from_secs(299)).await;
    assert_eq!(known(), ["expired", "gone", "live"]);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(known(), ["live"]);
    pruning.abort();
}
