//! Lookups in the registry and writes to the audit log, as the gate does them.
#![expect(clippy::unwrap_used, reason = "a benchmark that fails should stop")]

use std::net::{IpAddr, Ipv4Addr};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use policy::audit::{AuditEvent, Kind};
use policy::clock::UnixMillis;
use policy::id::{RequestId, SandboxId};
use policy::reason::Reason;
use policy::registration::{AuthMode, Registration};
use policy::verdict::VerdictKind;
use store::audit::AuditOptions;
use store::registry::RegistryLookup;
use store::{Store, StoreOptions};

const ROWS: u32 = 1000;
const THREADS: u32 = 8;

fn ip(n: u32) -> IpAddr {
    Ipv4Addr::from_bits(0x0a00_0000 + n).into()
}

fn row(n: u32) -> Registration {
    Registration {
        id: SandboxId::parse(&format!("sandbox-{n}")).unwrap(),
        ip: Some(ip(n)),
        repos: Vec::new(),
        auth_mode: AuthMode::User,
        credentials: Vec::new(),
        created: UnixMillis::new(0),
        expires: UnixMillis::new(i64::MAX),
        metadata: serde_json::Map::new(),
    }
}

fn refusal(n: u64) -> AuditEvent {
    let mut event = AuditEvent::new(Kind::Http);
    event.sandbox = Some(SandboxId::parse(&format!("sandbox-{}", n % 50)).unwrap());
    event.request_id = Some(RequestId::new(n, n.into()));
    event.method = Some("GET".to_owned());
    event.host = Some(format!("host-{n}.example.com"));
    event.path = Some("/v1/things/42".to_owned());
    event.port = Some(443);
    event.status = Some(403);
    event.stage = Some("authorise".to_owned());
    event.rule = Some("allowlist".into());
    event.verdict = Some(VerdictKind::Deny);
    event.reason = Some(Reason::HostDenied);
    event
}

fn wall_time() -> Duration {
    static BEGAN: LazyLock<Instant> = LazyLock::new(Instant::now);
    BEGAN.elapsed()
}

/// The CPU time of this thread.
fn processor_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    let nanos = text.split(' ').next().unwrap().parse().unwrap();
    Duration::from_nanos(nanos)
}

fn benches(c: &mut Criterion) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .build()
        .unwrap();
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(StoreOptions {
        dir: dir.path().to_owned(),
        audit: AuditOptions::default(),
        now: UnixMillis::new(1),
    })
    .unwrap();
    let now = UnixMillis::new(1);
    runtime.block_on(async {
        for n in 0..ROWS {
            let event = AuditEvent::lifecycle("registered", Some(row(n).id));
            store.register(row(n), event, now).await.unwrap();
        }
    });
    let registry = store.registry();

    c.bench_function("by_ip, 1 thread, 1000 rows", |b| {
        let mut n = 0u32;
        b.iter(|| {
            n = n.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            assert!(matches!(
                registry.by_ip(ip(n % ROWS)),
                RegistryLookup::Found(_)
            ));
        });
    });
    // The mean time of `rounds` lookups in each of eight concurrent threads, by `clock`. With fewer
    // cores than threads, wall time includes waiting for a core; the cost of a lookup under
    // contention is the CPU time of its thread.
    let contended = |rounds: u64, clock: fn() -> Duration| -> Duration {
        let times: Vec<Duration> = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..THREADS)
                .map(|thread| {
                    let registry = &registry;
                    scope.spawn(move || {
                        let mut n = thread;
                        let began = clock();
                        for _ in 0..rounds {
                            n = n.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                            let found = registry.by_ip(ip(n % ROWS));
                            assert!(matches!(found, RegistryLookup::Found(_)));
                        }
                        clock().saturating_sub(began)
                    })
                })
                .collect();
            workers.into_iter().map(|w| w.join().unwrap()).collect()
        });
        // Criterion fails for a time of zero, which the clock may report for few rounds.
        (times.iter().sum::<Duration>() / THREADS).max(Duration::from_nanos(rounds))
    };
    c.bench_function("by_ip, 8 threads, 1000 rows, wall time", |b| {
        b.iter_custom(|rounds| contended(rounds, wall_time));
    });
    c.bench_function("by_ip, 8 threads, 1000 rows, processor time", |b| {
        b.iter_custom(|rounds| contended(rounds, processor_time));
    });

    let mut group = c.benchmark_group("audit");
    group.sample_size(10);
    group.throughput(Throughput::Elements(10_000));
    group.bench_function("10 000 different refusals of 50 sandboxes", |b| {
        let mut n = 0;
        b.iter(|| {
            runtime.block_on(async {
                let log = store.audit();
                for _ in 0..10_000 {
                    n += 1;
                    log.record(refusal(n), now).await.unwrap();
                }
                log.flush().await.unwrap();
            });
        });
    });
    group.throughput(Throughput::Elements(1));
    group.bench_function("one durable record", |b| {
        b.iter(|| {
            runtime.block_on(async {
                store.audit().record_durable(refusal(1), now).await.unwrap();
            });
        });
    });
    group.finish();
    runtime.block_on(store.close()).unwrap();
}

criterion_group!(registry, benches);
criterion_main!(registry);
