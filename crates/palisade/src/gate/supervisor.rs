//! Every long-lived task of the gate is started here, by name.
//!
//! ```text
//!            start                 ends or panics
//!   (none) ────────▶ running ──────────────────────▶ waiting
//!                      ▲   │                            │
//!                      │   │ told to stop               │ after the backoff
//!                      │   ▼                            │
//!                      │ stopped ◀── told to stop ──────┤
//!                      └────────────────────────────────┘
//! ```
//!
//! One sick task never takes the others down; its state is in the health registry.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use control::health::{HealthRegistry, TaskHealth, TaskState};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::telemetry::process_metrics::ProcessMetrics;

const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const LONGEST_BACKOFF: Duration = Duration::from_secs(30);

/// A task that ran this long was well: its next failure starts from the first backoff.
const WELL_AFTER: Duration = Duration::from_secs(60);

/// Starts tasks, restarts them, and waits for them at the end.
#[derive(Clone, Debug)]
pub struct Supervisor {
    health_registry: Arc<HealthRegistry>,
    numbers: ProcessMetrics,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Supervisor {
    /// A supervisor whose tasks end when `stop` is cancelled.
    pub fn new(
        health_registry: Arc<HealthRegistry>,
        numbers: ProcessMetrics,
        stop: CancellationToken,
    ) -> Self {
        Self {
            health_registry,
            numbers,
            stop,
            tasks: TaskTracker::new(),
        }
    }

    /// Runs `make(stop)` under `name`, again and again until the stop: a long-lived task
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
            self.health_registry.task(name, health.clone());
            let started = Instant::now();
            // A task of its own, so that a panic ends it and nothing else.
            let ended = tokio::spawn(make(self.stop.clone())).await;
            if self.stop.is_cancelled() {
                break;
            }
            let error = match ended {
                Ok(Ok(())) => "it ended by itself".to_owned(),
                Ok(Err(error)) => format!("{error:#}"),
                Err(panic) => format!("it panicked: {panic}"),
            };
            if started.elapsed() > WELL_AFTER {
                backoff = FIRST_BACKOFF;
            }
            tracing::error!(task = name, %error, wait = ?backoff, "a task ended; it is started again");
            health.restarts = health.restarts.saturating_add(1);
            health.last_error = Some(error);
            health.state = TaskState::Waiting;
            self.health_registry.task(name, health.clone());
            self.numbers.task_restarted(name);
            tokio::select! {
                () = self.stop.cancelled() => break,
                () = tokio::time::sleep(backoff) => backoff = (backoff * 2).min(LONGEST_BACKOFF),
            }
        }
        health.state = TaskState::Stopped;
        self.health_registry.task(name, health);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use control::health::Status;

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
    async fn a_failing_task_comes_back_later_and_later_and_is_shown() {
        let (supervisor, health_registry, stop) = supervisor();
        let (starts, mut seen) = tokio::sync::mpsc::unbounded_channel();
        let tries = Arc::new(AtomicU32::new(0));
        supervisor.start("sick", move |stop| {
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
        assert_eq!(report.tasks["sick"].restarts, 3);
        assert_eq!(
            report.tasks["sick"].last_error.as_deref(),
            Some("it ended by itself")
        );
        assert_eq!(report.status, Status::Healthy);
        stop.cancel();
        supervisor.drain().await;
        assert_eq!(
            health_registry.report([]).tasks["sick"].state,
            TaskState::Stopped
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_panic_leaves_the_other_tasks_alone() {
        let (supervisor, health_registry, stop) = supervisor();
        supervisor.start("well", |stop| async move {
            stop.cancelled().await;
            Ok(())
        });
        let (failed, mut failures) = tokio::sync::mpsc::unbounded_channel();
        supervisor.start("sick", move |_| {
            failed.send(()).unwrap();
            async { panic!("again") }
        });
        for _ in 0..3 {
            failures.recv().await.unwrap();
        }
        let report = health_registry.report([]);
        assert_eq!(
            report.tasks["well"],
            TaskHealth {
                state: TaskState::Running,
                restarts: 0,
                last_error: None,
            }
        );
        assert!(report.tasks["sick"].restarts >= 2);
        stop.cancel();
        supervisor.drain().await;
    }
}
