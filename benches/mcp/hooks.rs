//! Latency of the interceptor's hooks at a constant request rate.

use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use crate::client::Http;

/// Number of connections that share the request rate.
const CONNECTIONS: u32 = 8;

/// Body of a request to the hook `before`, as Docker's gateway sends it.
const BEFORE_BODY: &str = r#"{"method":"tools/call","params":{"name":"search_files","arguments":{"path":"src","pattern":"TODO","limit":100}}}"#;
/// Body of a request to the hook `after`, as Docker's gateway sends it.
const AFTER_BODY: &str = r#"{"content":[{"type":"text","text":"src/main.rs:10: // TODO: tidy up\nsrc/lib.rs:99: // TODO: test"}]}"#;

/// Sends requests at a constant rate and returns their latencies in microseconds, each measured
/// from the scheduled time of its request, so waiting for an earlier response counts.
pub fn measure_at_rate(at: SocketAddr, hook: &str, rate: u64, time: Duration) -> Vec<f64> {
    let body = if hook == "before" {
        BEFORE_BODY
    } else {
        AFTER_BODY
    };
    let path = format!("/intercept/{hook}");
    let step = Duration::from_secs(1) * CONNECTIONS / u32::try_from(rate).unwrap();
    let begin = Instant::now() + Duration::from_millis(100);
    let end = begin + time;
    thread::scope(|scope| {
        let threads: Vec<_> = (0..CONNECTIONS)
            .map(|number| {
                let path = &path;
                scope.spawn(move || {
                    let mut http = Http::connect(at);
                    let mut due = begin + step * number / CONNECTIONS;
                    let mut latencies = Vec::new();
                    while due < end {
                        while let Some(left) = due.checked_duration_since(Instant::now()) {
                            if left.is_zero() {
                                break;
                            }
                            thread::park_timeout(left);
                        }
                        let answer = http.post(path, "", body);
                        assert_eq!(answer.status, 200, "{}", answer.body);
                        latencies.push(due.elapsed().as_secs_f64() * 1e6);
                        due += step;
                    }
                    latencies
                })
            })
            .collect();
        let latencies = threads.into_iter().map(|thread| thread.join().unwrap());
        latencies.flatten().collect()
    })
}
