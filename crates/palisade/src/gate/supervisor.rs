//! Supervisor: starts every long-lived task of the gate by name, and restarts it when it ends.
//!
//! ```text
//!            start                 ends or panics
//!   (none) ────────▶ running ──────────────────────▶ waiting
//!                      ▲   │                            │
//!                      │   │ shutdown                   │ after the backoff
//!                      │   ▼                            │
//!                      │ stopped ◀── shutdown ──────────┤
//!                      └────────────────────────────────┘
//! ```
//!
//! A failing task does not affect the others; its state is in the health registry.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use control::health::{HealthRegistry, TaskHealth, TaskState};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::telemetry::process_metrics::ProcessMetrics;

const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(30);

/// After a run of this length, the next failure of the task starts from the first backoff.
const BACKOFF_RESET: Duration = Duration::from_secs(60);

/// Starts tasks, restarts them, and waits for them at shutdown.
#[derive(Clone, Debug)]
pub struct Supervisor {
    health_registry: Arc<HealthRegistry>,
    process_metrics: ProcessMetrics,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Supervisor {
    /// A supervisor whose tasks end when `stop` is cancelled.
    pub fn new(
        health_registry: Arc<HealthRegistry>,
        process_metrics: ProcessMetrics,
        stop: CancellationToken,
    ) -> Self {
        Self {
            health_registry,
            process_metrics,
            stop,
            tasks: TaskTracker::new(),
        }
    }

    /// Runs `make(stop)` under `name` and restarts it until the shutdown: a long-lived task
    /// that returns has failed, whatever it returned.
    pub fn start<F, Work>(&self, name: &'static str, make: F)
    where
        F: Fn(CancellationToken) -> Work + Send + 'static,
        Work: Future<Output = anyhow::Result<()>> + Send + 'static,
    {
        let own = self.clone();
        self.tasks
            .spawn(async move { own.keep_running(name, make).await });
    }

    /// Waits until every task has ended.
    pub async fn drain(&self) {
        self.tasks.close();
        self.tasks.wait().await;
    }

    async fn keep_running<F, Work>(self, name: &'static str, make: F)
    where
        F: Fn(CancellationToken) -> Work,
        Work: Future<Output = anyhow::Result<()>> + Send + 'static,
    {
        let mut health = TaskHealth {
            state: TaskState::Running,
            restarts: 0,
            last_error: None,
        };
        let mut backoff = FIRST_BACKOFF;
        loop {
            health.state = TaskState::Running;
            self.health_registry.set_task(name, health.clone());
            let started = Instant::now();
            // Each run is a tokio task of its own, so that a panic ends only that run.
            let ended = tokio::spawn(make(self.stop.clone())).await;
            if self.stop.is_cancelled() {
                break;
            }
            let error = match ended {
                Ok(Ok(())) => "the task ended".to_owned(),
                Ok(Err(error)) => format!("{error:#}"),
                Err(panic) => format!("the task panicked: {panic}"),
            };
            if started.elapsed() > BACKOFF_RESET {
                backoff = FIRST_BACKOFF;
            }
            tracing::error!(task = name, %error, wait = ?backoff, "task ended; restarting it");
            health.restarts = health.restarts.saturating_add(1);
            health.last_error = Some(error);
            health.state = TaskState::Waiting;
            self.health_registry.set_task(name, health.clone());
            self.process_metrics.count_task_restart(name);
            tokio::select! {
                () = self.stop.cancelled() => break,
                () = tokio::time::sleep(backoff) => backoff = (backoff * 2).min(MAX_BACKOFF),
            }
        }
        health.state = TaskState::Stopped;
        self.health_registry.set_task(name, health);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use control::health::HealthStatus;

    use super::*;

    fn supervisor() -> (Supervisor, Arc<HealthRegistry>, CancellationToken) {
        let (health_registry, stop) = (
            Arc::new(HealthRegistry::default()),
            CancellationToken::new(),
        );
        let supervisor = Supervisor::new(
            Arc::clone(&health_registry),
            ProcessMetrics::default(),
            stop.clone(),
        );
        (supervisor, health_registry, stop)
    }

    #[tokio::test(start_paused = true)]
    async fn failing_task_restarts_with_backoff_and_is_reported() {
        let (supervisor, health_registry, stop) = supervisor();
        let (starts, mut seen) = tokio::sync::mpsc::unbounded_channel();
        let tries = Arc::new(AtomicU32::new(0));
        supervisor.start("failing", move |stop| {
            starts.send(Instant::now()).unwrap();
            let count = tries.fetch_add(1, Ordering::Relaxed);
            async move {
                match count {
                    0 => panic!("first"),
                    1 => anyhow::bail!("second"),
                    2 => Ok(()),
                    _ => {
                        stop.cancelled().await;
                        Ok(())
                    }
                }
            }
        });
        let mut times = Vec::new();
        for _ in 0..4 {
            times.push(seen.recv().await.unwrap());
        }
        let waits: Vec<_> = times
            .windows(2)
            .map(|pair| (pair[1] - pair[0]).as_millis())
            .collect();
        assert_eq!(waits, [100, 200, 400]);
        tokio::task::yield_now().await;
        let report = health_registry.report([]);
        assert_eq!(report.tasks["failing"].restarts, 3);
        assert_eq!(
            report.tasks["failing"].last_error.as_deref(),
            Some("the task ended")
        );
        assert_eq!(report.status, HealthStatus::Healthy);
        stop.cancel();
        supervisor.drain().await;
        assert_eq!(
            health_registry.report([]).tasks["failing"].state,
            TaskState::Stopped
        );
    }

    #[tokio::test(start_paused = true)]
    async fn panic_does_not_affect_other_tasks() {
        let (supervisor, health_registry, stop) = supervisor();
        supervisor.start("healthy", |stop| async move {
            stop.cancelled().await;
            Ok(())
        });
        let (failed, mut failures) = tokio::sync::mpsc::unbounded_channel();
        supervisor.start("failing", move |_| {
            failed.send(()).unwrap();
            async { panic!("again") }
        });
        for _ in 0..3 {
            failures.recv().await.unwrap();
        }
        let report = health_registry.report([]);
        assert_eq!(
            report.tasks["healthy"],
            TaskHealth {
                state: TaskState::Running,
                restarts: 0,
                last_error: None,
            }
        );
        assert!(report.tasks["failing"].restarts >= 2);
        stop.cancel();
        supervisor.drain().await;
    }
}
