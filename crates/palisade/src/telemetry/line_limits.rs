//! Rate limits of log lines: an agent must not be able to rotate the log out, nor to hide a
//! line among millions.
//!
//! Every line of every crate passes here, so that no call site has to know whether an agent
//! can cause its line, and a line that is added later is limited from the start. A bucket
//! belongs to one place in the sources together with the line's fields `sandbox` and `tool`:
//! one agent silences neither another's lines nor lines of other places. What was left out is
//! counted, and a summary line says how much it was.
//!
//! Debug and trace lines are limited as well, because an operator who looks at a hostile agent
//! needs the log most; but their limit is so wide that only a flood reaches it, since the
//! operator asked for them.

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

/// Errors, warnings and information: 200 lines at once, and one a second. What one agent can
/// cause at a handful of places then takes most of a day to fill the log.
const LINES: Rate = Rate::every(
    NonZeroU64::new(1_000_000_000).unwrap(),
    NonZeroU32::new(200).unwrap(),
);

/// Debug and trace: 10 000 lines at once, and 100 a second.
const DETAILS: Rate = Rate::every(
    NonZeroU64::new(10_000_000).unwrap(),
    NonZeroU32::new(10_000).unwrap(),
);

/// Buckets of lines with a sandbox or tool. Beyond that, lines of one place share a bucket.
const MAX_BUCKETS: usize = 2048;

/// How often a summary line is written.
const REPORT_EVERY: Duration = Duration::from_secs(10);

/// The longest text that is kept of a field.
const MAX_TEXT: usize = 128;

/// Refuses lines that come too fast. Cloning shares the buckets.
#[derive(Clone)]
pub struct LineLimits(Arc<Shared>);

struct Shared {
    clock: Box<dyn Fn() -> Tick + Send + Sync>,
    table: Mutex<Table>,
}

impl LineLimits {
    /// Full buckets.
    pub fn new() -> Self {
        let origin = Instant::now();
        // A bucket that was never used must lie in the past.
        let begin = Tick::default() + Duration::from_secs(1);
        Self::with_clock(move || begin + origin.elapsed())
    }

    fn with_clock(clock: impl Fn() -> Tick + Send + Sync + 'static) -> Self {
        Self(Arc::new(Shared {
            clock: Box::new(clock),
            table: Mutex::default(),
        }))
    }

    /// Writes a line about every bucket that refused lines since the last time. False where
    /// there was none.
    pub fn report(&self) -> bool {
        let suppressed = self.table().take_suppressed((self.0.clock)());
        for one in &suppressed {
            one.log();
        }
        !suppressed.is_empty()
    }

    /// Reports on a thread of its own for as long as lines are refused: a line that is written
    /// while another is judged would be judged inside of it.
    fn report_later(&self) {
        let limits = self.clone();
        let reporting = move || {
            loop {
                #[expect(
                    clippy::disallowed_methods,
                    reason = "a thread that has nothing else to do"
                )]
                std::thread::sleep(REPORT_EVERY);
                if !limits.report() && limits.table().end_reporting() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("log-limits".to_owned());
        if thread.spawn(reporting).is_err() {
            // The counts stay; the next line that is refused tries again.
            self.table().is_reporting = false;
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for LineLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LineLimits").finish_non_exhaustive()
    }
}

impl<S> Filter<S> for LineLimits {
    /// Asked for every line: `tracing_subscriber` wants a filter that looks at events to be asked
    /// here first, so what places it lets pass is not remembered.
    fn enabled(&self, _: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        true
    }

    fn event_enabled(&self, event: &Event<'_>, _: &Context<'_, S>) -> bool {
        // Our own summaries, of which there are only so many.
        if event.metadata().target() == module_path!() {
            return true;
        }
        // Read before the table is locked: a value that panics where it is written is logged
        // on this very thread.
        let line = Line::of(event);
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

/// What lines have in common that share a bucket.
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

    /// The same without whose line it is.
    fn shared(self) -> Self {
        Self {
            sandbox: String::new(),
            tool: String::new(),
            ..self
        }
    }
}

/// What is looked at of an event.
struct Line {
    source: Source,
    level: Level,
    message: String,
}

impl Line {
    fn of(event: &Event<'_>) -> Self {
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
            "sandbox" => self.source.sandbox = short(value),
            "tool" => self.source.tool = short(value),
            "message" => self.message = short(value),
            _ => {}
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }
}

/// As much of a value's text as is kept.
fn short(value: &dyn fmt::Debug) -> String {
    let mut text = Short(String::new());
    // Stops where it is full.
    let _ = write!(text, "{value:?}");
    text.0
}

struct Short(String);

impl Write for Short {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = MAX_TEXT.saturating_sub(self.0.len());
        let end = text.floor_char_boundary(room);
        self.0.push_str(text.get(..end).unwrap_or_default());
        if end < text.len() {
            return Err(fmt::Error);
        }
        Ok(())
    }
}

#[derive(Default)]
struct Table {
    buckets: HashMap<Source, Bucket>,
    /// Whether the thread runs that reports.
    is_reporting: bool,
}

struct Bucket {
    tokens: TokenBucket,
    level: Level,
    /// Of the first line that was refused.
    message: String,
    suppressed: u64,
}

impl Bucket {
    fn rate(&self) -> &'static Rate {
        if self.level <= Level::INFO {
            &LINES
        } else {
            &DETAILS
        }
    }

    /// Whether a new one would be the same.
    fn is_idle(&self, now: Tick) -> bool {
        self.suppressed == 0 && self.tokens.is_full(self.rate(), now)
    }
}

impl Table {
    /// Whether a line may be written now.
    fn admit(&mut self, line: Line, now: Tick) -> bool {
        let Line {
            source,
            level,
            message,
        } = line;
        let source = self.with_room(source, now);
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

    /// The source whose bucket counts: its own, or the one its place shares where there are
    /// too many. Places are as many as the sources have, which is the bound of the rest.
    fn with_room(&mut self, source: Source, now: Tick) -> Source {
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

    fn take_suppressed(&mut self, now: Tick) -> Vec<Suppressed> {
        let mut all = Vec::new();
        for (source, bucket) in &mut self.buckets {
            if bucket.suppressed > 0 {
                all.push(Suppressed {
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

    /// Ends reporting, unless a line was refused since the last report.
    fn end_reporting(&mut self) -> bool {
        self.is_reporting = self.buckets.values().any(|bucket| bucket.suppressed > 0);
        !self.is_reporting
    }
}

/// Lines of one bucket that were not written.
#[derive(Debug)]
struct Suppressed {
    source: Source,
    level: Level,
    message: String,
    count: u64,
}

impl Suppressed {
    /// Writes the summary, on the level of the suppressed lines, so that a filter that shows
    /// those shows it as well.
    fn log(&self) {
        let Source { sandbox, tool, .. } = &self.source;
        let given = |text: &String| (!text.is_empty()).then(|| text.clone());
        let (sandbox, tool) = (given(sandbox), given(tool));
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
