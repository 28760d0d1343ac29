//! Maintenance of mirrors: health check, removal of mirrors that are no longer configured,
//! repacking.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use control::health::HealthRegistry;
use egress::mirror::Mirrors;
use egress::services::Services;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// Name of the health check of mirrors.
const HEALTH_CHECK: &str = "git_mirrors";

/// How often the required programs are checked: they may be installed meanwhile.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// How often mirrors are checked for many packs.
const REPACK_INTERVAL: Duration = Duration::from_secs(10 * 60);

/// Reports whether mirrors can be served, and removes mirrors that are no longer configured: at
/// the start, after each change of the configuration, and every [`CHECK_INTERVAL`].
pub async fn maintain(
    traffic: Arc<Services>,
    health_registry: Arc<HealthRegistry>,
    changed: Arc<Notify>,
    stop: CancellationToken,
) -> Result<()> {
    loop {
        let settings = Arc::clone(&traffic.policy().load().settings);
        if settings.git.mirrors.is_empty() {
            health_registry.remove_check(HEALTH_CHECK);
        } else {
            let missing = {
                let settings = Arc::clone(&settings);
                tokio::task::spawn_blocking(move || Mirrors::missing_program(&settings))
            };
            health_registry.set_check(HEALTH_CHECK, missing.await?.map_or(Ok(()), Err));
        }
        traffic.mirrors().remove_unconfigured(&settings).await;
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            () = changed.notified() => {}
            () = tokio::time::sleep(CHECK_INTERVAL) => {}
        }
    }
}

/// Repacks mirrors every [`REPACK_INTERVAL`]. A repack that the shutdown interrupts leaves the
/// mirror unchanged.
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
            () = tokio::time::sleep(REPACK_INTERVAL) => {}
        }
    }
}
