//! The gate compared with nginx alone, nginx as a reverse proxy, a proxy without decisions,
//! mitmproxy and dnsmasq, in one run on one machine.
//!
//! Run with `just bench-traffic`. Client, proxy and origin share the machine's cores, so a proxy's
//! rate shows how much work it adds. Every case runs round by round through all contenders, and
//! medians are shown, so noise affects all contenders alike. No time makes the benchmark fail.

#![allow(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    clippy::unwrap_used,
    unreachable_pub,
    reason = "a benchmark that cannot continue has failed"
)]

mod instructions;
mod load;
mod names;
mod oha;
mod processes;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use self::load::{CLIENTS, Figures, Route};
use self::oha::Oha;
use self::processes::{Addresses, ChildProcess, Gate, LOCAL, ORIGIN};

/// Number of idle connections, to measure the memory of each.
const IDLE_CONNECTIONS: usize = 2000;

/// A contender: its name, its route to the origin, and the process whose CPU time is measured.
struct Contender<'a> {
    name: &'static str,
    route: Route,
    process: Option<&'a ChildProcess>,
}

/// One row of the printed table.
struct Row {
    name: &'static str,
    rate: f64,
    p50: f64,
    p99: f64,
    /// Processor time of the proxy per response, in microseconds.
    work: Option<f64>,
}

/// Starts a peer with its binary, a directory and an address. Returns its root certificate.
type Start = fn(&Path, &Path, SocketAddr) -> (ChildProcess, String);

struct Options {
    palisade: PathBuf,
    /// Another build of the gate, for the case `instructions`.
    before: Option<PathBuf>,
    mitmdump: Option<PathBuf>,
    noop: Option<PathBuf>,
    oha: Option<PathBuf>,
    seconds: u64,
    rounds: usize,
    cases: Vec<String>,
}

impl Options {
    /// `--palisade FILE [--before FILE] [--mitmdump FILE] [--noop FILE] [--oha FILE] [--seconds N] [--rounds N] [CASE…]`
    fn read() -> Self {
        let mut options = Self {
            palisade: "palisade".into(),
            before: None,
            mitmdump: None,
            noop: None,
            oha: None,
            seconds: 4,
            rounds: 3,
            cases: Vec::new(),
        };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().unwrap();
            match argument.as_str() {
                "--palisade" => options.palisade = value().into(),
                "--before" => options.before = Some(value().into()),
                "--mitmdump" => options.mitmdump = Some(value().into()),
                "--noop" => options.noop = Some(value().into()),
                "--oha" => options.oha = Some(value().into()),
                "--seconds" => options.seconds = value().parse().unwrap(),
                "--rounds" => options.rounds = value().parse().unwrap(),
                _ => options.cases.push(argument),
            }
        }
        options
    }

    fn wants(&self, case: &str) -> bool {
        self.cases.is_empty() || self.is_named(case)
    }

    /// Whether a case is named explicitly; some cases need additional programs.
    fn is_named(&self, case: &str) -> bool {
        self.cases.iter().any(|wanted| wanted == case)
    }
}

#[tokio::main]
async fn main() {
    let options = Options::read();
    let temp = tempfile::Builder::new().prefix("pal").tempdir().unwrap();
    let dir = temp.path();
    let at = Addresses {
        origin: processes::free_address(),
        proxy: processes::free_address(),
        names: processes::free_address(),
        resolver: processes::free_address(),
    };
    let _origin = processes::origin(dir, at.origin);
    let _resolver = processes::dnsmasq(at.resolver, None);
    if options.is_named("instructions") {
        measure_instructions(&options, dir, &at).await;
        if options.cases.len() == 1 {
            return;
        }
    }
    let gate = Gate::start(&[], &options.palisade, dir, &at);
    let proxy = processes::free_address();
    let reverse_proxy = processes::reverse_proxy(dir, proxy, at.origin);
    let mut roots = vec![std::fs::read_to_string(dir.join("root.pem")).unwrap()];
    roots.push(gate.root.clone());
    let mut others = Vec::new();
    for (name, binary, start) in [
        ("no-op", &options.noop, processes::noop as Start),
        (
            "mitmproxy",
            &options.mitmdump,
            processes::mitmproxy as Start,
        ),
    ] {
        let Some(binary) = binary else { continue };
        let at = processes::free_address();
        let (process, root) = start(binary, dir, at);
        roots.push(root);
        others.push((name, process, at));
    }
    println!("{CLIENTS} clients; medians of {} rounds", options.rounds);

    let contenders = |resumes: bool| {
        let tls = load::client(&roots, resumes);
        let route = |at, tunnel: Option<String>, name| Route {
            at,
            tunnel,
            name,
            tls: tls.clone(),
        };
        let mut all = vec![
            Contender {
                name: "nginx direct",
                route: route(at.origin, None, ORIGIN),
                process: None,
            },
            Contender {
                name: "palisade",
                route: route(at.proxy, Some(format!("{ORIGIN}:443")), ORIGIN),
                process: Some(&gate.process),
            },
            Contender {
                name: "nginx proxy",
                route: route(proxy, None, ORIGIN),
                process: Some(&reverse_proxy),
            },
        ];
        for (name, process, proxy) in &others {
            let tunnel = format!("{LOCAL}:{}", at.origin.port());
            all.push(Contender {
                name,
                route: route(*proxy, Some(tunnel), LOCAL),
                process: Some(process),
            });
        }
        all
    };

    if options.wants("memory") {
        measure_memory(&gate.process, &contenders(true)[1].route).await;
    }
    if options.wants("kept") {
        let rows = measure_rates(&options, &contenders(true), load::measure_persistent).await;
        show("kept connections, 1 KiB", "req/s", &rows);
    }
    for (case, resumes) in [("new", true), ("fresh", false)] {
        if options.wants(case) {
            let rows = measure_rates(&options, &contenders(resumes), load::measure_new).await;
            let how = if resumes {
                "resumes"
            } else {
                "does not resume"
            };
            let title = format!("a new connection each time, client {how} sessions");
            show(&title, "req/s", &rows);
        }
    }
    if options.wants("large") {
        let rates = measure_large(&options, &contenders(true), load::measure_large).await;
        show_large("one body of 100 MB", &rates);
    }
    if let Some(binary) = options.oha.as_deref() {
        let path = dir.join("roots.pem");
        std::fs::write(&path, roots.concat()).unwrap();
        let oha = Oha {
            binary,
            roots: &path,
        };
        measure_with_oha(&options, &contenders(true), &oha).await;
    }
    if options.wants("names") {
        let peer = processes::free_address();
        let dnsmasq = processes::dnsmasq(peer, Some(at.resolver));
        let contenders = [
            ("dnsmasq", peer, &dnsmasq),
            ("palisade", at.names, &gate.process),
        ];
        measure_dns(&options, &contenders).await;
    }
    println!(
        "\npalisade at the end: {:.1} MB",
        gate.process.memory() / 1e3
    );
}

/// Instructions and allocations per request, of this build and of the previous one.
async fn measure_instructions(options: &Options, dir: &Path, at: &Addresses) {
    println!("kept connections, 1 KiB, counted by callgrind");
    println!("{:14} {:>13} {:>13}", "", "instructions", "allocations");
    let before = options.before.iter().map(|binary| ("before", binary));
    for (name, binary) in before.chain([("palisade", &options.palisade)]) {
        let dir = dir.join(name);
        std::fs::create_dir(&dir).unwrap();
        std::fs::copy(dir.join("../root.pem"), dir.join("root.pem")).unwrap();
        let at = Addresses {
            proxy: processes::free_address(),
            names: processes::free_address(),
            ..*at
        };
        let gate = Gate::start(&instructions::wrapper(&dir), binary, &dir, &at);
        let origin = std::fs::read_to_string(dir.join("root.pem")).unwrap();
        let route = Route {
            at: at.proxy,
            tunnel: Some(format!("{ORIGIN}:443")),
            name: ORIGIN,
            tls: load::client(&[origin, gate.root.clone()], true),
        };
        let cost = instructions::count(&gate, &route, &dir).await;
        println!(
            "{name:14} {:13.0} {:13.2}",
            cost.instructions, cost.allocations
        );
    }
}

/// The cases as oha measures them.
async fn measure_with_oha(options: &Options, contenders: &[Contender<'_>], oha: &Oha<'_>) {
    if options.wants("kept") {
        let rows = measure_rates(options, contenders, async |route, time| {
            oha.measure_persistent(route, time).await
        });
        show("oha: kept connections, 1 KiB", "req/s", &rows.await);
    }
    if options.wants("new") {
        let rows = measure_rates(options, contenders, async |route, time| {
            oha.measure_new(route, time).await
        });
        show("oha: a new connection each time", "req/s", &rows.await);
    }
    if options.wants("large") {
        let rates = measure_large(options, contenders, async |route| {
            oha.measure_large(route).await
        })
        .await;
        show_large("oha: one body of 100 MB", &rates);
    }
}

/// Memory after the allocator has returned unused pages.
async fn settled_memory(gate: &ChildProcess) -> f64 {
    let mut last = f64::INFINITY;
    loop {
        tokio::time::sleep(Duration::from_secs(2)).await;
        let now = gate.memory();
        if now >= last {
            return now;
        }
        last = now;
    }
}

/// Memory of an idle gate, and of each connection that is idle after a request.
async fn measure_memory(gate: &ChildProcess, route: &Route) {
    let before = settled_memory(gate).await;
    let mut connections = Vec::new();
    for _ in 0..IDLE_CONNECTIONS {
        let mut connection = route.open().await;
        connection.get("/small").await;
        connections.push(connection);
    }
    let after = settled_memory(gate).await;
    println!("\nmemory: idle {:.1} MB", before / 1e3);
    println!(
        "with {IDLE_CONNECTIONS} kept connections {:.1} MB, {:.1} KiB each",
        after / 1e3,
        (after - before) / f64::from(u32::try_from(IDLE_CONNECTIONS).unwrap())
    );
}

async fn measure_rates(
    options: &Options,
    contenders: &[Contender<'_>],
    case: impl AsyncFn(&Route, Duration) -> Figures,
) -> Vec<Row> {
    let mut runs: Vec<Vec<Row>> = contenders.iter().map(|_| Vec::new()).collect();
    for contender in contenders {
        case(&contender.route, Duration::from_secs(1)).await;
    }
    for _ in 0..options.rounds {
        for (contender, runs) in contenders.iter().zip(&mut runs) {
            let before = contender.process.map(ChildProcess::processor);
            let run = case(&contender.route, Duration::from_secs(options.seconds)).await;
            let after = contender.process.map(ChildProcess::processor);
            let work = after.zip(before);
            runs.push(Row {
                name: contender.name,
                rate: run.rate,
                p50: run.p50,
                p99: run.p99,
                work: work.map(|(after, before)| (after - before) / run.answers),
            });
        }
    }
    runs.iter().map(|runs| median_row(runs)).collect()
}

fn median_row(runs: &[Row]) -> Row {
    let median_of = |value: fn(&Row) -> f64| median(runs.iter().map(value).collect());
    Row {
        name: runs[0].name,
        rate: median_of(|row| row.rate),
        p50: median_of(|row| row.p50),
        p99: median_of(|row| row.p99),
        work: runs[0]
            .work
            .map(|_| median_of(|row| row.work.unwrap_or_default())),
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Prints a case. Ratios are relative to the first contender.
fn show(title: &str, unit: &str, rows: &[Row]) {
    println!("\n{title}");
    println!(
        "{:14} {unit:>9} {:>7} {:>9} {:>9} {:>13}",
        "", "ratio", "p50 ms", "p99 ms", "CPU µs each"
    );
    for row in rows {
        let work = row.work.map_or(String::new(), |work| format!("{work:.1}"));
        println!(
            "{:14} {:9.0} {:7.3} {:9.2} {:9.2} {work:>13}",
            row.name,
            row.rate,
            row.rate / rows[0].rate,
            row.p50,
            row.p99
        );
    }
}

async fn measure_large(
    options: &Options,
    contenders: &[Contender<'_>],
    case: impl AsyncFn(&Route) -> f64,
) -> Vec<(&'static str, f64)> {
    let mut rates: Vec<Vec<f64>> = contenders.iter().map(|_| Vec::new()).collect();
    for _ in 0..options.rounds * 2 + 1 {
        for (contender, rates) in contenders.iter().zip(&mut rates) {
            rates.push(case(&contender.route).await);
        }
    }
    let names = contenders.iter().map(|contender| contender.name);
    names.zip(rates.into_iter().map(median)).collect()
}

fn show_large(title: &str, rates: &[(&'static str, f64)]) {
    println!("\n{title}");
    println!("{:14} {:>9} {:>7}", "", "MB/s", "ratio");
    for (name, rate) in rates {
        println!("{name:14} {rate:9.0} {:7.3}", rate / rates[0].1);
    }
}

async fn measure_dns(options: &Options, contenders: &[(&'static str, SocketAddr, &ChildProcess)]) {
    let mut runs: Vec<Vec<Row>> = contenders.iter().map(|_| Vec::new()).collect();
    for _ in 0..options.rounds {
        for ((name, at, process), runs) in contenders.iter().zip(&mut runs) {
            let before = process.processor();
            let run = names::query_repeatedly(*at, Duration::from_secs(options.seconds)).await;
            runs.push(Row {
                name,
                rate: run.rate,
                p50: run.p50,
                p99: run.p99,
                work: Some((process.processor() - before) / run.answers),
            });
        }
    }
    let rows: Vec<Row> = runs.iter().map(|runs| median_row(runs)).collect();
    show("DNS queries, forwarded and cached", "query/s", &rows);
}
