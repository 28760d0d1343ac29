//! Benchmark: reads the settings in force, as every request does at least once.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use arc_swap::ArcSwap;
use config::Settings;
use criterion::{Criterion, criterion_group, criterion_main};

fn read_snapshot(c: &mut Criterion) {
    let settings = Arc::new(ArcSwap::from_pointee(Settings::default()));
    c.bench_function("settings snapshot, one thread", |b| {
        b.iter(|| black_box(settings.load().egress.timeouts.connect));
    });

    // Seven more readers of the same pointer. With fewer cores than threads, the wall time per
    // read includes the time slices of the others.
    let done = Arc::new(AtomicBool::new(false));
    let readers: Vec<_> = (0..7)
        .map(|_| {
            let (settings, done) = (Arc::clone(&settings), Arc::clone(&done));
            thread::spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    black_box(settings.load().egress.timeouts.connect);
                }
            })
        })
        .collect();
    c.bench_function("settings snapshot, eight threads", |b| {
        b.iter(|| black_box(settings.load().egress.timeouts.connect));
    });
    done.store(true, Ordering::Relaxed);
    for reader in readers {
        if reader.join().is_err() {
            eprintln!("a reader panicked");
        }
    }
}

criterion_group!(benches, read_snapshot);
criterion_main!(benches);
