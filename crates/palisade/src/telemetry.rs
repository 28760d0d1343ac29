//! Logs, traces and numbers: set up once, before anything that could fail.
//!
//! Logs go to stderr, or to `gate.log` for a gate in the background. Every line passes
//! the [`redact::Redactor`] on its way.

pub mod log_file;
pub mod numbers;
pub mod otlp;
pub mod redact;

use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use config::Settings;
use opentelemetry::trace::TracerProvider;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::Subscriber;
use tracing_subscriber::filter::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, reload};

use crate::output;
use log_file::LogFile;
use redact::Redactor;

/// What the rest of the gate adjusts after the start.
#[derive(Debug)]
pub struct Telemetry {
    /// The values no line may show.
    pub redactor: Redactor,
    level: reload::Handle<EnvFilter, Registry>,
    verbose: u8,
    traces: Option<SdkTracerProvider>,
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
        let writer = SafeWriter {
            sink: Arc::new(Mutex::new(sink)),
            redactor: redactor.clone(),
            ansi,
        };
        let (filter, level) = reload::Layer::new(filter(settings, verbose)?);
        let lines = line_layer(settings, writer, ansi);
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
        };
        telemetry.follow(settings)?;
        Ok(telemetry)
    }

    /// Takes over the level and the secrets of new settings.
    pub fn follow(&self, settings: &Settings) -> Result<()> {
        self.redactor.learn(
            settings
                .secret_values()
                .iter()
                .map(|(name, secret)| (name.as_str(), secret.expose())),
        );
        self.level
            .reload(filter(settings, self.verbose)?)
            .context("cannot change the log level")
    }

    /// Sends what is left. Blocks for as long as the collector takes, a few seconds at most.
    pub fn finish(&self) {
        if let Some(traces) = &self.traces
            && let Err(error) = traces.shutdown()
        {
            tracing::warn!(%error, "the last traces could not be sent");
        }
    }
}

fn line_layer<S>(
    settings: &Settings,
    writer: SafeWriter,
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
    let ours =
        ["palisade", "control", "store", "config", "policy"].map(|name| format!("{name}={own}"));
    EnvFilter::try_new(format!("{others},hyper=info,{}", ours.join(","))).context("logging.level")
}

/// A panic is a log line like any other, so that it is redacted and lands in the file.
fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let backtrace = std::backtrace::Backtrace::capture();
        tracing::error!(panic = %panic, %backtrace, "a task panicked");
    }));
}

/// Writes whole lines without secrets and without control characters: text that a
/// sandbox chose must not move the cursor or forge a second line.
#[derive(Clone, Debug)]
struct SafeWriter {
    sink: Arc<Mutex<Sink>>,
    redactor: Redactor,
    ansi: bool,
}

impl<'a> MakeWriter<'a> for SafeWriter {
    type Writer = &'a SafeWriter;

    fn make_writer(&'a self) -> Self::Writer {
        self
    }
}

impl Write for &SafeWriter {
    /// `tracing_subscriber` hands over one whole event at a time.
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let line = self.redactor.redact(event);
        let line = one_line(&line, self.ansi);
        match &mut *self.sink.lock().unwrap_or_else(PoisonError::into_inner) {
            Sink::Stderr => io::stderr().write_all(&line)?,
            Sink::File(file) => file.write_line(&line)?,
        }
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// `event` as one line without anything a terminal would obey. Our own colours are the
/// only escapes that stay, and those only on a terminal: `tracing_subscriber` escapes the
/// ones inside values itself. The escapes are valid inside JSON strings, too.
fn one_line(event: &[u8], ansi: bool) -> Vec<u8> {
    let body = event.strip_suffix(b"\n").unwrap_or(event);
    let mut line = String::with_capacity(body.len() + 1);
    for c in String::from_utf8_lossy(body).chars() {
        match c {
            '\t' => line.push(c),
            '\u{1b}' if ansi => line.push(c),
            _ if output::is_unsafe(c) => {
                let mut units = [0; 2];
                for unit in c.encode_utf16(&mut units) {
                    line.push_str(&format!("\\u{unit:04x}"));
                }
            }
            _ => line.push(c),
        }
    }
    line.push('\n');
    line.into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_line_whatever_its_values_hold() {
        assert_eq!(
            one_line(b"a\nb\r\x1b[31mc\0\n", false),
            b"a\\u000ab\\u000d\\u001b[31mc\\u0000\n"
        );
        let hostile = one_line("\u{9b}31m\u{202e}\u{7f}\u{e0041}\n".as_bytes(), true);
        assert_eq!(hostile, b"\\u009b31m\\u202e\\u007f\\udb40\\udc41\n");
        let json = format!("\"{}\"", String::from_utf8(hostile).unwrap().trim_end());
        assert!(serde_json::from_str::<String>(&json).is_ok(), "{json}");
        assert_eq!(
            one_line(b"\x1b[32mINFO\x1b[0m hi\n", true),
            b"\x1b[32mINFO\x1b[0m hi\n"
        );
        assert_eq!(one_line("größe\n".as_bytes(), false), "größe\n".as_bytes());
    }
}
