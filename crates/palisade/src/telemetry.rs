//! Logs, traces and metrics, set up at the start of the process.
//!
//! Logs go to stderr, or to `gate.log` for a gate in the background. Every line passes the
//! [`redact::Redactor`], and [`line_limits::LineLimits`] limits the rate of lines.

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
use lines::LogQueue;
use log_file::LogFile;
use redact::Redactor;

/// How long the shutdown waits for the last log lines.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// The crates of this workspace, whose log level `-v` raises.
const OWN_CRATES: [&str; 13] = [
    "config",
    "control",
    "credentials",
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

/// Handles to the logging setup, for reloads and the shutdown.
#[derive(Debug)]
pub struct Telemetry {
    /// Replaces secrets in log lines.
    pub redactor: Redactor,
    level: reload::Handle<EnvFilter, Registry>,
    verbose: u8,
    traces: Option<SdkTracerProvider>,
    lines: LogQueue,
    limits: LineLimits,
}

/// Where log lines go.
#[derive(Debug)]
pub enum LogSink {
    /// Standard error.
    Stderr,
    /// The log file of a gate in the background.
    File(LogFile),
}

impl Telemetry {
    /// Starts logging by `settings`; `verbose` is the count of `-v`.
    ///
    /// Must be called in the runtime if traces are enabled: they are sent from it.
    pub fn start(settings: &Settings, verbose: u8, sink: LogSink) -> Result<Self> {
        let redactor = Redactor::default();
        let ansi = matches!(sink, LogSink::Stderr)
            && io::stderr().is_terminal()
            && std::env::var_os("NO_COLOR").is_none();
        let write: lines::LineWriter = match sink {
            LogSink::Stderr => Box::new(|line| io::stderr().write_all(line)),
            LogSink::File(mut file) => Box::new(move |line| file.write_line(line)),
        };
        let writer =
            LogQueue::start(write, redactor.clone(), ansi).context("cannot start the log")?;
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
        telemetry.add_secrets(settings);
        Ok(telemetry)
    }

    /// Builds the log filter of new settings, for [`Telemetry::apply`]. Nothing changes yet.
    pub fn prepare(&self, settings: &Settings) -> Result<EnvFilter> {
        filter(settings, self.verbose)
    }

    /// Applies the secrets and the log level of new settings.
    pub fn apply(&self, settings: &Settings, filter: EnvFilter) {
        self.add_secrets(settings);
        if let Err(error) = self.level.reload(filter) {
            tracing::error!(%error, "changing the log level failed");
        }
    }

    fn add_secrets(&self, settings: &Settings) {
        self.redactor.add_secrets(
            settings
                .secret_values()
                .iter()
                .map(|(name, secret)| (name.as_str(), secret.expose())),
        );
    }

    /// Exports the remaining traces and writes the remaining lines. Blocks for a few seconds at
    /// most.
    pub fn finish(&self) {
        if let Some(traces) = &self.traces
            && let Err(error) = traces.shutdown()
        {
            tracing::warn!(%error, "exporting the last traces failed");
        }
        self.limits.report();
        self.lines.flush(FLUSH_TIMEOUT);
    }
}

fn line_layer<S>(
    settings: &Settings,
    writer: LogQueue,
    ansi: bool,
) -> Box<dyn Layer<S> + Send + Sync>
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

/// The log filter. `PALISADE_LOG` has the syntax of `tracing` filters and takes precedence;
/// `-v` and `-vv` raise the crates of this workspace to debug and trace.
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

/// Logs panics, so that they are redacted and written to the log file.
fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let backtrace = std::backtrace::Backtrace::capture();
        tracing::error!(panic = %panic, %backtrace, "task panicked");
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    // Issue 14, number 11.
    #[test]
    fn verbose_raises_every_crate_of_the_workspace() {
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
        // Only tests use this crate.
        found.retain(|name| name != "testkit");
        found.sort();
        assert_eq!(found, OWN_CRATES);
    }
}
