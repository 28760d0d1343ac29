//! Issue 14, number 4: rate limits of log lines, with a manual clock.

use std::sync::atomic::{AtomicU64, Ordering};

use tracing::subscriber::DefaultGuard;
use tracing_subscriber::layer::{Layer, SubscriberExt};

use super::*;

/// A log of JSON lines in memory, with a manual clock.
struct Log {
    written: Arc<Mutex<Vec<u8>>>,
    now: Arc<AtomicU64>,
    limits: LineLimits,
    _default: DefaultGuard,
}

impl Log {
    fn new() -> Self {
        let now = Arc::new(AtomicU64::new(1_000_000_000));
        let clock = Arc::clone(&now);
        let limits = LineLimits::with_clock(move || Tick::from_nanos(clock.load(Ordering::SeqCst)));
        // The test calls `report` itself: no thread is started.
        limits.table().is_reporting = true;
        let written = Arc::new(Mutex::new(Vec::new()));
        let writer = Arc::clone(&written);
        let lines = tracing_subscriber::fmt::layer()
            .json()
            .flatten_event(true)
            .with_writer(move || Writer(Arc::clone(&writer)))
            .with_filter(limits.clone());
        let default = tracing::subscriber::set_default(tracing_subscriber::registry().with(lines));
        Self {
            written,
            now,
            limits,
            _default: default,
        }
    }

    fn advance(&self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap();
        self.now.fetch_add(nanos, Ordering::SeqCst);
    }

    /// The lines since the last call.
    fn lines(&self) -> Vec<serde_json::Value> {
        let written = std::mem::take(&mut *self.written.lock().unwrap());
        let lines = str::from_utf8(&written).unwrap().lines();
        lines
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }
}

struct Writer(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Writer {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Logs a warning, always from the same call site.
fn warn_of(sandbox: &str) {
    tracing::warn!(%sandbox, "a warning");
}

#[test]
fn flood_is_limited_to_its_burst_and_summarised() {
    let log = Log::new();
    (0..1000).for_each(|_| warn_of("one"));
    assert_eq!(log.lines().len(), 200);
    assert!(log.limits.report());
    let [summary] = &log.lines()[..] else {
        panic!("one summary");
    };
    assert_eq!(summary["message"], "similar log lines suppressed");
    assert_eq!(summary["suppressed"], 800, "{summary}");
    assert_eq!(summary["like"], "a warning");
    assert_eq!(summary["sandbox"], "one");
    assert_eq!(summary["level"], "WARN");
    assert_eq!(summary.get("tool"), None);
    assert!(!log.limits.report(), "reported once");

    log.advance(Duration::from_secs(3));
    (0..10).for_each(|_| warn_of("one"));
    assert_eq!(log.lines().len(), 3, "one line per second is written");
    log.advance(Duration::from_secs(3600));
    (0..1000).for_each(|_| warn_of("one"));
    assert_eq!(log.lines().len(), 200);
}

#[test]
fn flooding_sandbox_or_tool_suppresses_no_other_line() {
    let log = Log::new();
    (0..1000).for_each(|_| warn_of("one"));
    log.lines();
    warn_of("two");
    tracing::warn!(sandbox = "one", "another warning");
    assert_eq!(log.lines().len(), 2);
    let tool_line = |tool: &str| tracing::info!(tool, "a line");
    (0..1000).for_each(|_| tool_line("noisy"));
    assert_eq!(log.lines().len(), 200);
    tool_line("quiet");
    let lines = log.lines();
    assert_eq!(lines.len(), 1);
    assert_eq!(lines[0]["tool"], "quiet");
}

#[test]
fn debug_lines_have_a_wide_limit() {
    let log = Log::new();
    (0..20_000).for_each(|_| tracing::debug!("a detail"));
    assert_eq!(log.lines().len(), 10_000);
}

#[test]
fn bucket_count_is_bounded_and_idle_buckets_are_removed() {
    let log = Log::new();
    let many = MAX_BUCKETS + 1000;
    (0..many).for_each(|n| warn_of(&format!("sandbox-{n}")));
    assert_eq!(
        log.lines().len(),
        MAX_BUCKETS + 200,
        "the other lines share a bucket"
    );
    assert_eq!(log.limits.table().buckets.len(), MAX_BUCKETS + 1);
    warn_of(&"long".repeat(1000));
    log.advance(Duration::from_secs(3600));
    warn_of("new");
    let table = log.limits.table();
    assert_eq!(
        table.buckets.len(),
        2,
        "the new bucket, and the shared bucket with its count"
    );
    assert!(
        table
            .buckets
            .keys()
            .all(|source| source.sandbox.len() <= MAX_TEXT)
    );
}
