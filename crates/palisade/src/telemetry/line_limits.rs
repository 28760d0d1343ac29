//! Rate limits of log lines: an agent must not be able to rotate lines out of the log, nor to
//! hide a line among millions.
//!
//! The limits apply to every line of every crate, so that no call site must know whether an
//! agent can cause its line. A bucket belongs to one call site together with the line's fields
//! `sandbox` and `tool`: an agent suppresses neither lines of other agents nor lines of other
//! call sites. Suppressed lines are counted, and a summary line reports their number.
//!
//! Debug and trace lines are limited as well, because an operator who investigates a hostile
//! agent needs the log most; but the operator enabled them, so only a flood reaches their
//! limit.

use std::collections::HashMap;
use std::fmt::{self, Write};
use std::num::{NonZeroU32, NonZeroU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use policy::bucket::{Rate, TokenBucket};
use policy::clock::Tick;
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata};
use tracing_subscriber::layer::{Context, Filter};

/// Errors, warnings and information: a burst of 200 lines, and one per second. One agent at a
/// handful of call sites then needs most of a day to fill the log.
const LINE_RATE: Rate = Rate::every(
    NonZeroU64::new(1_000_000_000).unwrap(),
    NonZeroU32::new(200).unwrap(),
);

/// Debug and trace: a burst of 10 000 lines, and 100 per second.
const DETAIL_RATE: Rate = Rate::every(
    NonZeroU64::new(10_000_000).unwrap(),
    NonZeroU32::new(10_000).unwrap(),
);

/// Maximum number of buckets. Beyond it, the lines of one call site share a bucket.
const MAX_BUCKETS: usize = 2048;

/// How often a summary line is written.
const REPORT_EVERY: Duration = Duration::from_secs(10);

/// Maximum length of a field's text that is kept.
const MAX_TEXT: usize = 128;

/// Suppresses lines above their rate. Cloning shares the buckets.
#[derive(Clone)]
pub struct LineLimits(Arc<LimitState>);

struct LimitState {
    clock: Box<dyn Fn() -> Tick + Send + Sync>,
    table: Mutex<BucketTable>,
}

impl LineLimits {
    /// Limits without suppressed lines.
    pub fn new() -> Self {
        let origin = Instant::now();
        // The last use of a new bucket must be in the past.
        let begin = Tick::default() + Duration::from_secs(1);
        Self::with_clock(move || begin + origin.elapsed())
    }

    fn with_clock(clock: impl Fn() -> Tick + Send + Sync + 'static) -> Self {
        Self(Arc::new(LimitState {
            clock: Box::new(clock),
            table: Mutex::default(),
        }))
    }

    /// Writes a summary line for every bucket that suppressed lines since the last report. Returns
    /// whether there was such a bucket.
    pub fn report(&self) -> bool {
        let suppressed = self.table().take_suppressed((self.0.clock)());
        for lines in &suppressed {
            lines.log();
        }
        !suppressed.is_empty()
    }

    /// Reports on a separate thread for as long as lines are suppressed: writing a line inside
    /// the filter would call the filter recursively.
    fn report_later(&self) {
        let limits = self.clone();
        let reporting = move || {
            loop {
                #[expect(
                    clippy::disallowed_methods,
                    reason = "a thread that only waits and reports"
                )]
                std::thread::sleep(REPORT_EVERY);
                if !limits.report() && limits.table().end_reporting() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("log-limits".to_owned());
        if thread.spawn(reporting).is_err() {
            // The counts stay; the next suppressed line tries again.
            self.table().is_reporting = false;
        }
    }

    fn table(&self) -> MutexGuard<'_, BucketTable> {
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for LineLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LineLimits").finish_non_exhaustive()
    }
}

impl<S> Filter<S> for LineLimits {
    /// Always true, so that `tracing_subscriber` does not cache the result for a call site and
    /// calls `event_enabled` for every line.
    fn enabled(&self, _: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        true
    }

    fn event_enabled(&self, event: &Event<'_>, _: &Context<'_, S>) -> bool {
        // The line is a summary of this module; the number of summaries is bounded.
        if event.metadata().target() == module_path!() {
            return true;
        }
        // The values are formatted before the table is locked: a value whose `Debug` panics is
        // logged on this thread, which would lock the table again.
        let line = Line::from_event(event);
        let now = (self.0.clock)();
        let mut table = self.table();
        if table.admit(line, now) {
            return true;
        }
        let is_first = !std::mem::replace(&mut table.is_reporting, true);
        drop(table);
        if is_first {
            self.report_later();
        }
        false
    }
}

/// The key of a bucket.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Source {
    callsite: Identifier,
    sandbox: String,
    tool: String,
}

impl Source {
    fn is_shared(&self) -> bool {
        self.sandbox.is_empty() && self.tool.is_empty()
    }

    /// The key of the call site without sandbox and tool.
    fn shared(self) -> Self {
        Self {
            sandbox: String::new(),
            tool: String::new(),
            ..self
        }
    }
}

/// The parts of an event that the limits use.
struct Line {
    source: Source,
    level: Level,
    message: String,
}

impl Line {
    fn from_event(event: &Event<'_>) -> Self {
        let mut line = Self {
            source: Source {
                callsite: event.metadata().callsite(),
                sandbox: String::new(),
                tool: String::new(),
            },
            level: *event.metadata().level(),
            message: String::new(),
        };
        event.record(&mut line);
        line
    }
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "sandbox" => self.source.sandbox = bounded_text(value),
            "tool" => self.source.tool = bounded_text(value),
            "message" => self.message = bounded_text(value),
            _ => {}
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }
}

/// Formats a value, truncated to [`MAX_TEXT`].
fn bounded_text(value: &dyn fmt::Debug) -> String {
    let mut text = BoundedText(String::new());
    // The error means that the text is full.
    let _ = write!(text, "{value:?}");
    text.0
}

struct BoundedText(String);

impl Write for BoundedText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let left = MAX_TEXT.saturating_sub(self.0.len());
        let end = text.floor_char_boundary(left);
        self.0.push_str(text.get(..end).unwrap_or_default());
        if end < text.len() {
            return Err(fmt::Error);
        }
        Ok(())
    }
}

#[derive(Default)]
struct BucketTable {
    buckets: HashMap<Source, Bucket>,
    /// Whether the reporting thread runs.
    is_reporting: bool,
}

struct Bucket {
    tokens: TokenBucket,
    level: Level,
    /// Message of the first suppressed line.
    message: String,
    suppressed: u64,
}

impl Bucket {
    fn rate(&self) -> &'static Rate {
        if self.level <= Level::INFO {
            &LINE_RATE
        } else {
            &DETAIL_RATE
        }
    }

    /// Whether the bucket is full and has no suppressed lines, like a new bucket.
    fn is_idle(&self, now: Tick) -> bool {
        self.suppressed == 0 && self.tokens.is_full(self.rate(), now)
    }
}

impl BucketTable {
    /// Whether a line may be written now.
    fn admit(&mut self, line: Line, now: Tick) -> bool {
        let Line {
            source,
            level,
            message,
        } = line;
        let source = self.bucket_key(source, now);
        let bucket = self.buckets.entry(source).or_insert_with(|| Bucket {
            tokens: TokenBucket::new(),
            level,
            message: String::new(),
            suppressed: 0,
        });
        if bucket.tokens.take(bucket.rate(), now).is_ok() {
            return true;
        }
        if bucket.suppressed == 0 {
            bucket.message = message;
        }
        bucket.suppressed += 1;
        false
    }

    /// The key of the bucket to use: the line's own, or the shared one of its call site if
    /// there are too many buckets. The number of call sites bounds the number of shared
    /// buckets.
    fn bucket_key(&mut self, source: Source, now: Tick) -> Source {
        let is_full = |buckets: &HashMap<_, _>| buckets.len() >= MAX_BUCKETS;
        if source.is_shared() || !is_full(&self.buckets) || self.buckets.contains_key(&source) {
            return source;
        }
        self.buckets.retain(|_, bucket| !bucket.is_idle(now));
        if is_full(&self.buckets) {
            source.shared()
        } else {
            source
        }
    }

    fn take_suppressed(&mut self, now: Tick) -> Vec<SuppressedLines> {
        let mut all = Vec::new();
        for (source, bucket) in &mut self.buckets {
            if bucket.suppressed > 0 {
                all.push(SuppressedLines {
                    source: source.clone(),
                    level: bucket.level,
                    message: std::mem::take(&mut bucket.message),
                    count: std::mem::take(&mut bucket.suppressed),
                });
            }
        }
        self.buckets.retain(|_, bucket| !bucket.is_idle(now));
        all
    }

    /// Ends reporting, unless a line was suppressed since the last report.
    fn end_reporting(&mut self) -> bool {
        self.is_reporting = self.buckets.values().any(|bucket| bucket.suppressed > 0);
        !self.is_reporting
    }
}

/// Suppressed lines of one bucket.
#[derive(Debug)]
struct SuppressedLines {
    source: Source,
    level: Level,
    message: String,
    count: u64,
}

impl SuppressedLines {
    /// Writes the summary on the level of the suppressed lines, so that the same filter shows
    /// it.
    fn log(&self) {
        let Source { sandbox, tool, .. } = &self.source;
        let non_empty = |text: &String| (!text.is_empty()).then(|| text.clone());
        let (sandbox, tool) = (non_empty(sandbox), non_empty(tool));
        let (suppressed, like) = (self.count, self.message.as_str());
        macro_rules! summary {
            ($level:ident) => {
                tracing::$level!(
                    suppressed,
                    like,
                    sandbox,
                    tool,
                    "similar log lines suppressed"
                )
            };
        }
        match self.level {
            Level::ERROR => summary!(error),
            Level::WARN => summary!(warn),
            Level::INFO => summary!(info),
            Level::DEBUG => summary!(debug),
            _ => summary!(trace),
        }
    }
}

#[cfg(test)]
mod tests;
