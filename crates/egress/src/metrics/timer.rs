//! Duration histogram for the hot path: sharded by thread, so that threads that count at the same
//! time neither wait for each other nor share a cache line.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::{MetricType, TypedMetric};

/// Number of shards. With more threads, several threads share a shard.
const SHARDS: usize = 16;

/// Maximum number of buckets, besides the one for longer durations.
const MAX_BUCKETS: usize = 14;

/// A histogram. Clones share their state.
#[derive(Clone, Debug)]
pub(super) struct Timer(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// The upper ends of the buckets, in nanoseconds.
    bucket_ends: Vec<u64>,
    shards: [Shard; SHARDS],
}

/// The counts of some threads.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Shard {
    counts: [AtomicU64; MAX_BUCKETS + 1],
    nanoseconds: AtomicU64,
}

impl Timer {
    /// Creates buckets whose upper bounds are `first`, `first` × `factor` and so on.
    pub(super) fn new(first: Duration, factor: u64, buckets: usize) -> Self {
        let first = nanoseconds(first);
        let bucket_ends = std::iter::successors(Some(first), |end| end.checked_mul(factor));
        Self(Arc::new(Inner {
            bucket_ends: bucket_ends.take(buckets.min(MAX_BUCKETS)).collect(),
            shards: Default::default(),
        }))
    }

    /// Records a duration.
    pub(super) fn observe(&self, duration: Duration) {
        let duration = nanoseconds(duration);
        let Inner {
            bucket_ends,
            shards,
        } = &*self.0;
        let bucket = bucket_ends.iter().position(|end| duration <= *end);
        let Some(shard) = shards.get(own_shard()) else {
            return;
        };
        if let Some(count) = shard.counts.get(bucket.unwrap_or(bucket_ends.len())) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        shard.nanoseconds.fetch_add(duration, Ordering::Relaxed);
    }

    /// The sum in seconds, the count, and each bucket's upper bound in seconds and count.
    fn read(&self) -> (f64, u64, Vec<(f64, u64)>) {
        let Inner {
            bucket_ends,
            shards,
        } = &*self.0;
        let counted = |bucket: usize| {
            let counts = shards.iter().filter_map(|shard| shard.counts.get(bucket));
            counts.map(|count| count.load(Ordering::Relaxed)).sum()
        };
        let bucket_ends = bucket_ends.iter().map(|end| seconds(*end));
        let bucket_ends = bucket_ends.chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bucket_ends.zip((0..).map(counted)).collect();
        let all = buckets.iter().map(|(_, count)| count).sum();
        let duration = shards.iter().map(|shard| &shard.nanoseconds);
        let duration = duration
            .map(|duration| duration.load(Ordering::Relaxed))
            .sum();
        (seconds(duration), all, buckets)
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn seconds(nanoseconds: u64) -> f64 {
    Duration::from_nanos(nanoseconds).as_secs_f64()
}

/// The shard of this thread.
fn own_shard() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static OWN: usize = NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS;
    }
    OWN.with(|own| *own)
}

impl TypedMetric for Timer {
    const TYPE: MetricType = MetricType::Histogram;
}

impl EncodeMetric for Timer {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
        let (duration, all, buckets) = self.read();
        encoder.encode_histogram::<NoLabelSet>(duration, all, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_counted_in_their_buckets() {
        let timer = Timer::new(Duration::from_micros(1), 4, 3);
        for micros in [0, 1, 2, 4, 5, 16, 17, 5_000_000] {
            timer.observe(Duration::from_micros(micros));
        }
        timer.observe(Duration::from_nanos(1001));
        let (duration, all, buckets) = timer.read();
        assert!((duration - 5.000_046_001).abs() < 1e-9, "{duration}");
        assert_eq!(all, 9);
        let bucket_ends = [0.000_001, 0.000_004, 0.000_016, f64::INFINITY];
        let expected: Vec<_> = bucket_ends.into_iter().zip([2, 3, 2, 2]).collect();
        assert_eq!(buckets, expected);
    }

    #[test]
    fn timer_is_encoded_as_a_prometheus_histogram() {
        let timer = Timer::new(Duration::from_micros(1), 4, 2);
        timer.observe(Duration::from_micros(2));
        timer.observe(Duration::from_secs(1));
        let mut registry = prometheus_client::registry::Registry::default();
        registry.register("took_seconds", "How long it took", timer);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(
            lines,
            [
                "took_seconds_sum 1.000002",
                "took_seconds_count 2",
                "took_seconds_bucket{le=\"0.000001\"} 0",
                "took_seconds_bucket{le=\"0.000004\"} 1",
                "took_seconds_bucket{le=\"+Inf\"} 2",
            ]
        );
    }

    #[test]
    fn counts_of_all_threads_are_summed() {
        let timer = Timer::new(Duration::from_micros(1), 4, 3);
        std::thread::scope(|scope| {
            for _ in 0..2 * SHARDS {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        timer.observe(Duration::from_micros(3));
                    }
                });
            }
        });
        let (duration, all, buckets) = timer.read();
        assert_eq!(all, 2000 * u64::try_from(SHARDS).unwrap());
        assert_eq!(buckets.get(1), Some(&(0.000_004, all)));
        assert!((duration - 0.096).abs() < 1e-9, "{duration}");
    }
}
