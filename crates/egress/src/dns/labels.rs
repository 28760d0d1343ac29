//! Budget of different names that a sandbox may resolve, against exfiltration through DNS.
//!
//! Under a wildcard every label is free text, and the operator of the zone can read it: resolving
//! a name sends it out. So each sandbox may resolve a limited number of different names below one
//! base domain per time window, and far fewer that look like encoded data.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use policy::host::HostName;
use policy::id::SandboxId;
use policy::reason::Reason;
use policy::verdict::Denial;
use tokio::time::Instant;

/// Rule name in the denials of this budget.
const RULE: &str = "dns:labels";

/// Longest label, in characters, that does not look like encoded data.
const MAX_ORDINARY_LABEL: usize = 40;

/// Longest text before the base domain, in characters, that does not look like encoded data.
const MAX_ORDINARY_PREFIX: usize = 80;

/// Shortest label whose entropy is measured. In shorter labels high entropy is no sign of data.
const MIN_ENTROPY_LABEL: usize = 24;

/// Entropy in bits per character from which a label looks like data. Words joined by hyphens have
/// about 3.5; hexadecimal digits come close to 4, base 32 to 5.
const MIN_DATA_ENTROPY: f64 = 3.6;

/// How many names a sandbox may resolve per time window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LabelLimits {
    /// The time window.
    pub window: Duration,
    /// Different names below one base domain.
    pub names: usize,
    /// Different names below one base domain that look like encoded data.
    pub data_like_names: usize,
    /// Different base domains per sandbox.
    pub bases: usize,
}

impl Default for LabelLimits {
    fn default() -> Self {
        Self {
            window: Duration::from_secs(600),
            names: 256,
            data_like_names: 16,
            bases: 512,
        }
    }
}

/// Why a name looks like data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataPattern {
    /// A label, or all labels together, are unusually long.
    Long,
    /// A label has the entropy of encoded data.
    Entropy,
}

/// The names that sandboxes resolved recently. DNS and the dialer share it, so that a name counts
/// once.
#[derive(Debug)]
pub struct LabelBudget {
    limits: LabelLimits,
    /// Hashes names with a random key, so that an agent cannot construct collisions.
    hasher: RandomState,
    sandboxes: Mutex<HashMap<SandboxId, Bases>>,
}

/// The recently resolved names of one sandbox, by base domain.
type Bases = HashMap<Box<str>, Window>;

#[derive(Debug)]
struct Window {
    began: Instant,
    /// Hashes of the names that were resolved in this window.
    seen: HashSet<u64>,
    data_like: usize,
}

impl LabelBudget {
    /// Creates an unused budget.
    pub fn new(limits: LabelLimits) -> Self {
        Self {
            limits,
            hasher: RandomState::new(),
            sandboxes: Mutex::default(),
        }
    }

    /// Checks whether `sandbox` may resolve `name` now. An admitted name stays admitted until its
    /// window ends.
    pub fn admit(&self, sandbox: &SandboxId, name: &HostName) -> Result<(), Denial> {
        let now = Instant::now();
        let base = base_domain(name.as_str());
        let hash = self.hasher.hash_one(name.as_str());
        let mut sandboxes = self.lock();
        let bases = sandboxes.entry(sandbox.clone()).or_default();
        let has_ended =
            |window: &Window| now.saturating_duration_since(window.began) >= self.limits.window;
        if !bases.contains_key(base) && bases.len() >= self.limits.bases {
            bases.retain(|_, window| !has_ended(window));
            if bases.len() >= self.limits.bases {
                return Err(label_denial(format!(
                    "This sandbox resolved names of more than {} domains in a short time. \
                     Wait a few minutes.",
                    self.limits.bases
                )));
            }
        }
        let new_window = || Window {
            began: now,
            seen: HashSet::new(),
            data_like: 0,
        };
        let window = bases.entry(base.into()).or_insert_with(new_window);
        if has_ended(window) {
            *window = new_window();
        }
        if window.seen.contains(&hash) {
            return Ok(());
        }
        let data_pattern = data_pattern(name);
        if window.seen.len() >= self.limits.names {
            return Err(label_denial(format!(
                "Too many different names below {base} in a short time. Wait a few minutes."
            ))
            .with_evidence(format!("{} names were resolved", window.seen.len())));
        }
        if let Some(data_pattern) = data_pattern {
            if window.data_like >= self.limits.data_like_names {
                return Err(label_denial(format!(
                    "Too many names below {base} that look like data rather than names. \
                     Wait a few minutes."
                ))
                .with_evidence(format!(
                    "{data_pattern:?}; {} earlier names also looked like data",
                    window.data_like
                )));
            }
            window.data_like += 1;
        }
        window.seen.insert(hash);
        Ok(())
    }

    /// Removes the state of a sandbox.
    pub fn forget(&self, sandbox: &SandboxId) {
        self.lock().remove(sandbox);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SandboxId, Bases>> {
        self.sandboxes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for LabelBudget {
    fn default() -> Self {
        Self::new(LabelLimits::default())
    }
}

/// Whether the labels before the base domain look like encoded data, and why.
pub fn data_pattern(name: &HostName) -> Option<DataPattern> {
    let base = base_domain(name.as_str());
    let prefix = name.as_str().strip_suffix(base)?.trim_end_matches('.');
    let labels = || prefix.split('.').filter(|label| !label.is_empty());
    if prefix.len() > MAX_ORDINARY_PREFIX || labels().any(|label| label.len() > MAX_ORDINARY_LABEL)
    {
        return Some(DataPattern::Long);
    }
    labels()
        .any(|label| {
            label.len() >= MIN_ENTROPY_LABEL
                && label.bytes().any(|b| b.is_ascii_digit())
                && entropy(label) >= MIN_DATA_ENTROPY
        })
        .then_some(DataPattern::Entropy)
}

/// The registered domain of a name: two labels, or three below a second-level suffix of a country
/// (`co.uk`). Without the public suffix list this is a guess; a wrong one makes names share a
/// budget or, for suffixes of three labels, splits it.
fn base_domain(name: &str) -> &str {
    let mut dots = name.rmatch_indices('.').map(|(at, _)| at);
    let (top, second, third) = (dots.next(), dots.next(), dots.next());
    let after = |dot: Option<usize>| dot.and_then(|at| name.get(at + 1..)).unwrap_or(name);
    let has_country_suffix = top.zip(second).is_some_and(|(top, second)| {
        let country = name.len() - top - 1 == 2;
        country && top - second - 1 <= 3
    });
    if has_country_suffix {
        after(third)
    } else {
        after(second)
    }
}

/// Shannon entropy in bits per character.
fn entropy(label: &str) -> f64 {
    let mut counts = [0_u32; 256];
    for byte in label.bytes() {
        if let Some(count) = counts.get_mut(usize::from(byte)) {
            *count += 1;
        }
    }
    let length = f64::from(u32::try_from(label.len()).unwrap_or(u32::MAX));
    counts
        .iter()
        .filter(|count| **count > 0)
        .map(|count| f64::from(*count) / length)
        .map(|share| -share * share.log2())
        .sum()
}

fn label_denial(sentence: String) -> Denial {
    Denial::new(Reason::RateLimited, RULE).with_message(sentence)
}

#[cfg(test)]
mod tests {
    use policy::host::Host;

    use super::*;

    fn name(text: &str) -> HostName {
        Host::parse(text).unwrap().as_name().unwrap().clone()
    }

    fn sandbox(text: &str) -> SandboxId {
        SandboxId::parse(text).unwrap()
    }

    #[test]
    fn base_domain_is_the_registered_domain() {
        for (text, base) in [
            ("com", "com"),
            ("example.com", "example.com"),
            ("a.b.example.com", "example.com"),
            ("example.co.uk", "example.co.uk"),
            ("a.b.example.com.au", "example.com.au"),
            ("co.uk", "co.uk"),
            ("a.example.de", "example.de"),
        ] {
            assert_eq!(base_domain(text), base, "{text}");
        }
    }

    #[test]
    fn encoded_data_is_detected_and_ordinary_names_are_not() {
        for plain in [
            "example.com",
            "api.github.com",
            "r3---sn-4g5e6nsz.googlevideo.com",
            "my-company-production-cluster.eu-central-1.example.com",
            "objects-origin.githubusercontent.com",
            "files.pythonhosted.org",
        ] {
            assert_eq!(data_pattern(&name(plain)), None, "{plain}");
        }
        for (data_like, why) in [
            (
                "4d7a1f09c3b85e6240da97f1b3c8e5.example.com",
                DataPattern::Entropy,
            ),
            (
                "mfrggzdfmztwq2lknnwg23tpobyx.example.com",
                DataPattern::Entropy,
            ),
            (
                &format!("{}.example.com", "a".repeat(41)),
                DataPattern::Long,
            ),
            (
                &format!("{}example.com", "some-words-here.".repeat(6)),
                DataPattern::Long,
            ),
        ] {
            assert_eq!(data_pattern(&name(data_like)), Some(why), "{data_like}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn names_below_one_domain_are_limited_per_window() {
        let limits = LabelLimits {
            names: 3,
            ..LabelLimits::default()
        };
        let budget = LabelBudget::new(limits);
        let one = sandbox("one");
        for n in 0..3 {
            budget.admit(&one, &name(&format!("n{n}.x.test"))).unwrap();
        }
        let refused = budget.admit(&one, &name("n3.x.test")).unwrap_err();
        assert_eq!(refused.reason, Reason::RateLimited);
        assert!(refused.message.contains("x.test"), "{}", refused.message);
        budget.admit(&one, &name("n0.x.test")).unwrap();
        budget.admit(&one, &name("n3.y.test")).unwrap();
        budget.admit(&sandbox("two"), &name("n3.x.test")).unwrap();
        tokio::time::advance(limits.window).await;
        budget.admit(&one, &name("n3.x.test")).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn data_like_names_have_a_smaller_limit() {
        let limits = LabelLimits {
            data_like_names: 1,
            ..LabelLimits::default()
        };
        let budget = LabelBudget::new(limits);
        let one = sandbox("one");
        let data_like = |letter: &str| name(&format!("{}.x.test", letter.repeat(50)));
        budget.admit(&one, &data_like("a")).unwrap();
        budget.admit(&one, &data_like("b")).unwrap_err();
        budget.admit(&one, &data_like("a")).unwrap();
        budget.admit(&one, &name("plain.x.test")).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn base_domains_above_the_limit_are_refused() {
        let limits = LabelLimits {
            bases: 2,
            ..LabelLimits::default()
        };
        let budget = LabelBudget::new(limits);
        let one = sandbox("one");
        budget.admit(&one, &name("a.test")).unwrap();
        budget.admit(&one, &name("b.test")).unwrap();
        budget.admit(&one, &name("c.test")).unwrap_err();
        tokio::time::advance(limits.window).await;
        budget.admit(&one, &name("c.test")).unwrap();
        budget.forget(&one);
        assert!(budget.lock().is_empty());
    }
}
