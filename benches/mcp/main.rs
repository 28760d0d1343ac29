//! Tool calls through the bridge, compared with direct pipes, supergateway and mcp-proxy, and the
//! hooks at a constant rate, in one run on one machine.
//!
//! Run with `just bench-mcp`. The same `mcp-fixture` serves all of them. One client calls in a
//! closed loop, round by round through all contenders, and medians are shown, so noise affects
//! all contenders alike. No time makes the benchmark fail.

#![allow(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    clippy::unwrap_used,
    unreachable_pub,
    reason = "a benchmark that cannot continue has failed"
)]

mod client;
mod hooks;
mod processes;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use self::client::{Caller, Era, Pipes, Session};
use self::processes::ChildProcess;

/// Number of calls of a round that are not measured: they open connections and fill caches.
const WARMUP_CALLS: usize = 200;

struct Options {
    palisade: PathBuf,
    fixture: PathBuf,
    supergateway: Option<PathBuf>,
    mcp_proxy: Option<PathBuf>,
    calls: usize,
    rounds: usize,
    rate: u64,
    seconds: u64,
}

impl Options {
    /// `--palisade FILE --fixture FILE [--supergateway FILE] [--mcp-proxy FILE] [--calls N]
    /// [--rounds N] [--rate N] [--seconds N]`
    fn read() -> Self {
        let mut options = Self {
            palisade: "palisade".into(),
            fixture: "mcp-fixture".into(),
            supergateway: None,
            mcp_proxy: None,
            calls: 2000,
            rounds: 5,
            rate: 2000,
            seconds: 10,
        };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().unwrap();
            match argument.as_str() {
                "--palisade" => options.palisade = value().into(),
                "--fixture" => options.fixture = value().into(),
                "--supergateway" => options.supergateway = Some(value().into()),
                "--mcp-proxy" => options.mcp_proxy = Some(value().into()),
                "--calls" => options.calls = value().parse().unwrap(),
                "--rounds" => options.rounds = value().parse().unwrap(),
                "--rate" => options.rate = value().parse().unwrap(),
                "--seconds" => options.seconds = value().parse().unwrap(),
                _ => panic!("unknown argument: {argument}"),
            }
        }
        options
    }
}

/// A contender: its name, its client, and the process whose CPU time is measured.
struct Contender<'a> {
    name: &'static str,
    caller: Box<dyn Caller>,
    process: Option<&'a ChildProcess>,
    rounds: Vec<Round>,
}

/// The result of one round, in microseconds.
#[derive(Clone, Copy)]
struct Round {
    p50: f64,
    p99: f64,
    /// Processor time of the bridge per call.
    work: Option<f64>,
}

fn main() {
    let options = Options::read();
    let temp = tempfile::Builder::new().prefix("pal").tempdir().unwrap();
    let start = |name: &str, with_policy: bool| {
        let dir = temp.path().join(name);
        processes::gate(&options.palisade, &options.fixture, &dir, with_policy)
    };
    let (gate, gate_without_policy) = (start("policy", true), start("no-policy", false));
    let supergateway = options
        .supergateway
        .as_deref()
        .map(|program| processes::supergateway(program, &options.fixture));
    let mcp_proxy = options
        .mcp_proxy
        .as_deref()
        .map(|program| processes::mcp_proxy(program, &options.fixture));

    let pipes = Pipes::start(&options.fixture);
    let mut contenders = vec![Contender::new("raw stdio", pipes, None)];
    for (name, gate, era) in [
        (
            "palisade, 2025-11-25, no policy",
            &gate_without_policy,
            Era::Sessions,
        ),
        (
            "palisade, 2026-07-28, no policy",
            &gate_without_policy,
            Era::Stateless,
        ),
        ("palisade, 2025-11-25, 50 rules", &gate, Era::Sessions),
        ("palisade, 2026-07-28, 50 rules", &gate, Era::Stateless),
    ] {
        let session = Session::open(gate.at, "/mcp/fixture", era);
        contenders.push(Contender::new(name, session, Some(&gate.process)));
    }
    for (name, peer) in [("supergateway", &supergateway), ("mcp-proxy", &mcp_proxy)] {
        if let Some(peer) = peer {
            let session = Session::open(peer.at, "/mcp", Era::Sessions);
            contenders.push(Contender::new(name, session, Some(&peer.process)));
        }
    }
    println!(
        "one client, {} calls a round, medians of {} rounds",
        options.calls, options.rounds
    );
    for _ in 0..options.rounds {
        for contender in &mut contenders {
            contender.run_round(options.calls);
        }
    }
    show(&contenders);
    for hook in ["before", "after"] {
        let time = Duration::from_secs(options.seconds);
        let mut latencies = hooks::measure_at_rate(gate.at, hook, options.rate, time);
        latencies.sort_by(f64::total_cmp);
        println!(
            "/intercept/{hook} at {} a second: {} answers, p50 {:.0} µs, p99 {:.0} µs, p99.9 {:.0} µs",
            options.rate,
            latencies.len(),
            percentile(&latencies, 0.5),
            percentile(&latencies, 0.99),
            percentile(&latencies, 0.999),
        );
    }
    println!("palisade at the end: {:.1} MB", gate.process.memory() / 1e3);
}

impl<'a> Contender<'a> {
    fn new(
        name: &'static str,
        caller: impl Caller + 'static,
        process: Option<&'a ChildProcess>,
    ) -> Self {
        Self {
            name,
            caller: Box::new(caller),
            process,
            rounds: Vec::new(),
        }
    }

    fn run_round(&mut self, calls: usize) {
        for _ in 0..WARMUP_CALLS {
            self.caller.call();
        }
        let work = self.process.map(ChildProcess::processor);
        let mut latencies: Vec<f64> = (0..calls)
            .map(|_| {
                let started = Instant::now();
                self.caller.call();
                started.elapsed().as_secs_f64() * 1e6
            })
            .collect();
        let spent = self.process.map(ChildProcess::processor);
        latencies.sort_by(f64::total_cmp);
        let count = u32::try_from(calls).unwrap();
        self.rounds.push(Round {
            p50: percentile(&latencies, 0.5),
            p99: percentile(&latencies, 0.99),
            work: work
                .zip(spent)
                .map(|(before, after)| (after - before) / f64::from(count)),
        });
    }

    fn median(&self, value: impl Fn(&Round) -> f64) -> f64 {
        let mut figures: Vec<f64> = self.rounds.iter().map(value).collect();
        figures.sort_by(f64::total_cmp);
        percentile(&figures, 0.5)
    }
}

/// The value at a share of the sorted values: 0.99 for the 99th percentile.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "an index into a list"
)]
fn percentile(sorted: &[f64], share: f64) -> f64 {
    let index = (sorted.len() as f64 * share) as usize;
    sorted[index.min(sorted.len() - 1)]
}

fn show(contenders: &[Contender<'_>]) {
    println!("\n| tools/call | p50 | p99 | adds to raw, p50 | p50 to raw | processor time |");
    println!("| --- | --- | --- | --- | --- | --- |");
    let raw = contenders[0].median(|round| round.p50);
    for contender in contenders {
        let p50 = contender.median(|round| round.p50);
        let p99 = contender.median(|round| round.p99);
        let work = contender.process.map_or_else(String::new, |_| {
            format!(
                "{:.0} µs",
                contender.median(|round| round.work.unwrap_or(0.0))
            )
        });
        println!(
            "| {} | {p50:.0} µs | {p99:.0} µs | {:.0} µs | {:.1} × | {work} |",
            contender.name,
            p50 - raw,
            p50 / raw,
        );
    }
    println!();
}
