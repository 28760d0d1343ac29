//! Renews the root certificate of a running gate before it expires.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use control::gate::Gate;
use control::{traffic_actions, wall_now};
use tokio_util::sync::CancellationToken;

/// Maximum wait between two checks of the wall clock: a timer stops while the machine sleeps,
/// and a clock can be set.
const MAX_WAIT: Duration = Duration::from_secs(60 * 60);

/// The wait after a renewal that failed.
const RETRY_AFTER: Duration = Duration::from_secs(5 * 60);

/// Name of the note in the health report.
const HEALTH_NOTE: &str = "root_certificate";

/// Renews the root when it is due, and adds it to running sandboxes that do not have it.
pub async fn maintain(gate: Arc<Gate>, stop: CancellationToken) -> Result<()> {
    loop {
        let renewed = tokio::select! {
            () = stop.cancelled() => return Ok(()),
            renewed = traffic_actions::renew_authority(&gate, wall_now()) => renewed,
        };
        let left = gate.traffic.authority().load().time_to_renewal(wall_now());
        let note = renewed.as_ref().err().map(|error| {
            tracing::error!(%error, "renewing the root certificate failed");
            format!("renewal failed: {error}")
        });
        gate.health_registry.set_note(HEALTH_NOTE, note);
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            () = tokio::time::sleep(wait(left, renewed.is_err())) => {}
        }
    }
}

/// How long to wait before the next check.
fn wait(left: Duration, failed: bool) -> Duration {
    if failed {
        RETRY_AFTER
    } else {
        // One millisecond more, because a timer may fire almost a millisecond too early.
        left.min(MAX_WAIT) + Duration::from_millis(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Issue 14, number 8.
    #[test]
    fn clock_is_checked_hourly_and_when_renewal_is_due() {
        let hour = Duration::from_secs(60 * 60);
        let one_millisecond = Duration::from_millis(1);
        assert_eq!(wait(1000 * hour, false), hour + one_millisecond);
        assert_eq!(wait(Duration::from_secs(5), false).as_secs(), 5);
        assert_eq!(wait(Duration::ZERO, true), RETRY_AFTER);
    }
}
