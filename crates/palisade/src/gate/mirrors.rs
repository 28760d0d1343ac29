//! Maintenance of mirrors: health, removal of those not configured any more, repacking.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use control::health::HealthRegistry;
use egress::mirror::Mirrors;
use egress::services::Services;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// The health check of mirrors.
const CHECK: &str = "git_mirrors";

/// How often the programs are looked for: they may be installed meanwhile.
const LOOK_EVERY: Duration = Duration::from_secs(60);

/// How often mirrors are checked for many packs.
const REPACK_EVERY: Duration = Duration::from_secs(10 * 60);

/// Says whether mirrors can be served and removes those that are not configured any more: at
/// the start, after each change and now and then.
pub async fn look_after(
    traffic: Arc<Services>,
    health_registry: Arc<HealthRegistry>,
    changed: Arc<Notify>,
    stop: CancellationToken,
) -> Result<()> {
    loop {
        let settings = Arc::clone(&traffic.policy().load().settings);
        if settings.git.mirrors.is_empty() {
            health_registry.retract(CHECK);
        } else {
            let looked = {
                let settings = Arc::clone(&settings);
                tokio::task::spawn_blocking(move || Mirrors::lacking(&settings))
            };
            health_registry.check(CHECK, looked.await?.map_or(Ok(()), Err));
        }
        traffic.mirrors().remove_others(&settings).await;
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            () = changed.notified() => {}
            () = tokio::time::sleep(LOOK_EVERY) => {}
        }
    }
}

/// Packs mirrors anew, now and then. One that is being packed when the gate stops stays as it
/// was.
pub async fn repack(traffic: Arc<Services>, stop: CancellationToken) -> Result<()> {
    loop {
        let settings = Arc::clone(&traffic.policy().load().settings);
        let repacking = traffic.mirrors().repack(&settings);
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            () = repacking => {}
        }
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            () = tokio::time::sleep(REPACK_EVERY) => {}
        }
    }
}
