//! Logs, traces and numbers: set up once, before anything that could fail.
//!
//! Logs go to stderr, or to `gate.log` for a gate in the background. Every line passes
//! the [`redact::Redactor`] on its way, and none comes faster than [`line_limits::LineLimits`]
//! lets it.

mod line_limits;
mod lines;
pub mod log_file;
pub mod otlp;
pub mod process_metrics;
pub mod redact;

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use anyhow::{Context, Result};
use config::Settings;
use opentelemetry::trace::TracerProvider;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::Subscriber;
use tracing_subscriber::filter::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, reload};

use line_limits::LineLimits;
use lines::Lines;
use log_file::LogFile;
use redact::Redactor;

/// How long the end waits for the last lines to be written.
const LAST_LINES: Duration = Duration::from_secs(2);

/// The crates of this workspace, which `-v` raises.
const OWN_CRATES: [&str; 12] = [
    "config",
    "control",
    "decide",
    "egress",
    "listen",
    "mcp",
    "palisade",
    "policy",
    "sandbox",
    "scan",
    "store",
    "workbench",
];

/// What the rest of the gate adjusts after the start.
#[derive(Debug)]
pub struct Telemetry {
    /// The values no line may show.
    pub redactor: Redactor,
    level: reload::Handle<EnvFilter, Registry>,
    verbose: u8,
    traces: Option<SdkTracerProvider>,
    lines: Lines,
    limits: LineLimits,
}

/// Where log lines go.
#[derive(Debug)]
pub enum Sink {
    /// The terminal or whatever stderr is.
    Stderr,
    /// The file of a gate in the background.
    File(LogFile),
}

impl Telemetry {
    /// Starts logging as `settings` say; `verbose` is the count of `-v`.
    ///
    /// Must be called inside the runtime when traces are on: they are sent from it.
    pub fn start(settings: &Settings, verbose: u8, sink: Sink) -> Result<Self> {
        let redactor = Redactor::default();
        let ansi = matches!(sink, Sink::Stderr)
            && io::stderr().is_terminal()
            && std::env::var_os("NO_COLOR").is_none();
        let write: lines::Sink = match sink {
            Sink::Stderr => Box::new(|line| io::stderr().write_all(line)),
            Sink::File(mut file) => Box::new(move |line| file.write_line(line)),
        };
        let writer = Lines::start(write, redactor.clone(), ansi).context("cannot start the log")?;
        let (filter, level) = reload::Layer::new(filter(settings, verbose)?);
        let limits = LineLimits::new();
        let lines = line_layer(settings, writer.clone(), ansi).with_filter(limits.clone());
        let traces = otlp::provider(settings, &redactor)?;
        let spans = traces.as_ref().map(|provider| {
            tracing_opentelemetry::layer()
                .with_tracer(provider.tracer("palisade"))
                .with_filter(tracing_subscriber::filter::LevelFilter::INFO)
        });
        tracing_subscriber::registry()
            .with(filter)
            .with(lines)
            .with(spans)
            .try_init()
            .context("logging was already set up")?;
        log_panics();
        let telemetry = Self {
            redactor,
            level,
            verbose,
            traces,
            lines: writer,
            limits,
        };
        telemetry.learn(settings);
        Ok(telemetry)
    }

    /// Builds the log filter of new settings, for [`Telemetry::apply`]. Nothing changes yet.
    pub fn prepare(&self, settings: &Settings) -> Result<EnvFilter> {
        filter(settings, self.verbose)
    }

    /// Takes over the secrets and the level of new settings.
    pub fn apply(&self, settings: &Settings, filter: EnvFilter) {
        self.learn(settings);
        if let Err(error) = self.level.reload(filter) {
            tracing::error!(%error, "the log level could not be changed");
        }
    }

    fn learn(&self, settings: &Settings) {
        self.redactor.learn(
            settings
                .secret_values()
                .iter()
                .map(|(name, secret)| (name.as_str(), secret.expose())),
        );
    }

    /// Sends what is left. Blocks for as long as the collector takes, a few seconds at most.
    pub fn finish(&self) {
        if let Some(traces) = &self.traces
            && let Err(error) = traces.shutdown()
        {
            tracing::warn!(%error, "the last traces could not be sent");
        }
        self.limits.report();
        self.lines.flush(LAST_LINES);
    }
}

fn line_layer<S>(settings: &Settings, writer: Lines, ansi: bool) -> Box<dyn Layer<S> + Send + Sync>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    let layer = tracing_subscriber::fmt::layer()
        .with_writer(writer)
        .with_ansi(ansi);
    match settings.logging.format {
        config::section::logging::LogFormat::Human => layer.with_target(false).boxed(),
        config::section::logging::LogFormat::Json => layer.json().flatten_event(true).boxed(),
    }
}

/// `PALISADE_LOG` speaks `tracing`'s own filter language and wins; `-v` and `-vv` raise
/// our own crates to debug and trace.
fn filter(settings: &Settings, verbose: u8) -> Result<EnvFilter> {
    if let Ok(directives) = std::env::var("PALISADE_LOG") {
        return EnvFilter::try_new(directives).context("PALISADE_LOG is not a log filter");
    }
    let level = settings.logging.level.as_str();
    let own = match verbose {
        0 => level,
        1 => "debug",
        _ => "trace",
    };
    let others = if own == "trace" { "debug" } else { level };
    let ours = OWN_CRATES.map(|name| format!("{name}={own}"));
    EnvFilter::try_new(format!("{others},hyper=info,{}", ours.join(","))).context("logging.level")
}

/// A panic is a log line like any other, so that it is redacted and lands in the file.
fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let backtrace = std::backtrace::Backtrace::capture();
        tracing::error!(panic = %panic, %backtrace, "a task panicked");
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    // Issue 14, number 11.
    #[test]
    fn every_crate_of_the_workspace_is_raised_by_verbosity() {
        let crates = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
        let manifest = |entry: std::fs::DirEntry| {
            std::fs::read_to_string(entry.path().join("Cargo.toml")).unwrap()
        };
        let name = |manifest: String| {
            let mut lines = manifest.lines();
            let name = lines.find_map(|line| line.strip_prefix("name = "));
            name.unwrap().trim_matches('"').replace('-', "_")
        };
        let entries = std::fs::read_dir(crates).unwrap();
        let mut found: Vec<String> = entries
            .map(|entry| name(manifest(entry.unwrap())))
            .collect();
        // Only tests are built with it.
        found.retain(|name| name != "testkit");
        found.sort();
        assert_eq!(found, OWN_CRATES);
    }
}
