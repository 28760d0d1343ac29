//! Throughput for input without secrets. The goal on one core: at least 400 MB/s with every rule,
//! and a URL of 200 bytes in less than 5 µs.

#![expect(
    clippy::expect_used,
    reason = "a benchmark with wrong input should stop"
)]

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use scan::detector::Detector;
use scan::formats::FormatDetector;
use scan::stream::StreamScanner;

/// Source code of this repository, repeated: code with prose, URLs and texts that resemble secrets.
fn source() -> Vec<u8> {
    let files = [
        include_str!("../src/formats.rs"),
        include_str!("../src/stream.rs"),
        include_str!("../../policy/src/refs.rs"),
        include_str!("../../policy/src/push.rs"),
    ];
    files.concat().into_bytes().repeat(20)
}

/// JSON as in an API's response.
fn json() -> Vec<u8> {
    let items = (0..20_000).map(|number| {
        format!(
            r#"{{"id":{number},"name":"item-{number}","url":"https://api.example.com/v1/items/{number}","tags":["task","disk-{number}"],"done":false}}"#
        )
    });
    format!("[{}]", items.collect::<Vec<_>>().join(",")).into_bytes()
}

fn scan_clean(c: &mut Criterion) {
    let detector = FormatDetector::built_in().expect("rules");
    for (name, text) in [("source", source()), ("json", json())] {
        let mut group = c.benchmark_group(name);
        group.throughput(Throughput::Bytes(text.len() as u64));
        group.bench_function("copy", |b| {
            let mut to = vec![0; text.len()];
            b.iter(|| to.copy_from_slice(black_box(&text)));
        });
        group.bench_function("scan", |b| {
            b.iter(|| detector.scan(black_box(&text), &mut |_| {}));
        });
        group.bench_function("stream in pieces of 16 KiB", |b| {
            let mut stream = StreamScanner::new(&detector);
            b.iter(|| {
                for piece in black_box(&text).chunks(16 << 10) {
                    stream.feed(piece, &mut |_| {});
                }
                stream.finish(&mut |_| {});
            });
        });
        group.finish();
    }
    let url = format!(
        "https://api.example.com/v1/items?{}",
        "page=2&size=50&".repeat(11)
    );
    c.bench_function("a URL of 200 bytes", |b| {
        b.iter(|| detector.scan(black_box(url.as_bytes()), &mut |_| {}));
    });
}

criterion_group!(benches, scan_clean);
criterion_main!(benches);
