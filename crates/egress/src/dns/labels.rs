//! How much a name may say.
//!
//! Under a wildcard every label is free text, and whoever runs the zone reads it: a name
//! that is resolved is a message that left. So each sandbox may have so many different
//! names below one base domain resolved in a stretch of time, and far fewer that look like
//! data.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use policy::host::HostName;
use policy::id::SandboxId;
use policy::reason::Reason;
use policy::verdict::Denial;
use tokio::time::Instant;

/// The rule's name in denials.
const RULE: &str = "dns:labels";

/// A label that nobody types.
const LONG_LABEL: usize = 40;

/// All labels in front of the base domain together.
const LONG_FRONT: usize = 80;

/// Shorter labels are words too often for their letters to say anything.
const SHORTEST_JUDGED: usize = 24;

/// Bits per character. Words joined by hyphens have about 3.5; hexadecimal digits come
/// close to 4, base 32 to 5.
const HIGH_ENTROPY: f64 = 3.6;

/// How many names in what time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LabelLimits {
    /// The stretch of time.
    pub window: Duration,
    /// Different names below one base domain.
    pub names: usize,
    /// Those among them that look like data.
    pub odd_names: usize,
    /// Base domains of one sandbox.
    pub bases: usize,
}

impl Default for LabelLimits {
    fn default() -> Self {
        Self {
            window: Duration::from_secs(600),
            names: 256,
            odd_names: 16,
            bases: 512,
        }
    }
}

/// Why a name looks like data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Oddity {
    /// A label, or all of them, is longer than people make them.
    Long,
    /// A label's characters are spread as those of encoded data are.
    Entropy,
}

/// What sandboxes had resolved of late. Shared by DNS and the dialer, so that one name
/// counts once.
#[derive(Debug)]
pub struct LabelBudget {
    limits: LabelLimits,
    /// Hashes names with a secret, so that none can be made to look seen.
    hasher: RandomState,
    sandboxes: Mutex<HashMap<SandboxId, Bases>>,
}

/// What one sandbox had resolved, by base domain.
type Bases = HashMap<Box<str>, Window>;

#[derive(Debug)]
struct Window {
    began: Instant,
    seen: HashSet<u64>,
    odd: usize,
}

impl LabelBudget {
    /// Nobody has asked yet.
    pub fn new(limits: LabelLimits) -> Self {
        Self {
            limits,
            hasher: RandomState::new(),
            sandboxes: Mutex::default(),
        }
    }

    /// Whether `sandbox` may have `name` resolved now. A name that was admitted stays so
    /// until its window ends.
    pub fn admit(&self, sandbox: &SandboxId, name: &HostName) -> Result<(), Denial> {
        let now = Instant::now();
        let base = base_domain(name.as_str());
        let hash = self.hasher.hash_one(name.as_str());
        let mut sandboxes = self.lock();
        let bases = sandboxes.entry(sandbox.clone()).or_default();
        let over =
            |window: &Window| now.saturating_duration_since(window.began) >= self.limits.window;
        if !bases.contains_key(base) && bases.len() >= self.limits.bases {
            bases.retain(|_, window| !over(window));
            if bases.len() >= self.limits.bases {
                return Err(refuse(format!(
                    "This sandbox asked for names of more than {} domains in a short time. \
                     Wait a few minutes.",
                    self.limits.bases
                )));
            }
        }
        let fresh = || Window {
            began: now,
            seen: HashSet::new(),
            odd: 0,
        };
        let window = bases.entry(base.into()).or_insert_with(fresh);
        if over(window) {
            *window = fresh();
        }
        if window.seen.contains(&hash) {
            return Ok(());
        }
        let oddity = oddity(name);
        if window.seen.len() >= self.limits.names {
            return Err(refuse(format!(
                "Too many different names below {base} in a short time. Wait a few minutes."
            ))
            .because(format!("{} names", window.seen.len())));
        }
        if let Some(oddity) = oddity {
            if window.odd >= self.limits.odd_names {
                return Err(refuse(format!(
                    "Too many names below {base} that look like data rather than names. \
                     Wait a few minutes."
                ))
                .because(format!("{oddity:?}, after {} others", window.odd)));
            }
            window.odd += 1;
        }
        window.seen.insert(hash);
        Ok(())
    }

    /// Forgets a sandbox that is gone.
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

/// Whether a name looks like data, as far as its labels in front of the base domain go.
pub fn oddity(name: &HostName) -> Option<Oddity> {
    let base = base_domain(name.as_str());
    let front = name.as_str().strip_suffix(base)?.trim_end_matches('.');
    let labels = || front.split('.').filter(|label| !label.is_empty());
    if front.len() > LONG_FRONT || labels().any(|label| label.len() > LONG_LABEL) {
        return Some(Oddity::Long);
    }
    labels()
        .any(|label| {
            label.len() >= SHORTEST_JUDGED
                && label.bytes().any(|b| b.is_ascii_digit())
                && entropy(label) >= HIGH_ENTROPY
        })
        .then_some(Oddity::Entropy)
}

/// The part of a name that somebody had to register: two labels, or three where the two
/// are a country's own division (`co.uk`). Without the list of public suffixes this is a
/// guess; a wrong one makes a budget shared or, for suffixes of three labels, split.
fn base_domain(name: &str) -> &str {
    let mut dots = name.rmatch_indices('.').map(|(at, _)| at);
    let (top, second, third) = (dots.next(), dots.next(), dots.next());
    let after = |dot: Option<usize>| dot.and_then(|at| name.get(at + 1..)).unwrap_or(name);
    let division = top.zip(second).is_some_and(|(top, second)| {
        let country = name.len() - top - 1 == 2;
        country && top - second - 1 <= 3
    });
    if division {
        after(third)
    } else {
        after(second)
    }
}

/// Shannon's bits per character.
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

fn refuse(sentence: String) -> Denial {
    Denial::new(Reason::RateLimited, RULE).saying(sentence)
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
    fn the_base_of_a_name_is_what_was_registered() {
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
    fn encoded_data_looks_odd_and_names_in_daily_use_do_not() {
        for plain in [
            "example.com",
            "api.github.com",
            "r3---sn-4g5e6nsz.googlevideo.com",
            "my-company-production-cluster.eu-central-1.example.com",
            "objects-origin.githubusercontent.com",
            "files.pythonhosted.org",
        ] {
            assert_eq!(oddity(&name(plain)), None, "{plain}");
        }
        for (odd, why) in [
            (
                "4d7a1f09c3b85e6240da97f1b3c8e5.example.com",
                Oddity::Entropy,
            ),
            ("mfrggzdfmztwq2lknnwg23tpobyx.example.com", Oddity::Entropy),
            (&format!("{}.example.com", "a".repeat(41)), Oddity::Long),
            (
                &format!("{}example.com", "some-words-here.".repeat(6)),
                Oddity::Long,
            ),
        ] {
            assert_eq!(oddity(&name(odd)), Some(why), "{odd}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn names_below_one_domain_run_out_and_come_back_with_time() {
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
    async fn odd_names_run_out_sooner() {
        let limits = LabelLimits {
            odd_names: 1,
            ..LabelLimits::default()
        };
        let budget = LabelBudget::new(limits);
        let one = sandbox("one");
        let odd = |letter: &str| name(&format!("{}.x.test", letter.repeat(50)));
        budget.admit(&one, &odd("a")).unwrap();
        budget.admit(&one, &odd("b")).unwrap_err();
        budget.admit(&one, &odd("a")).unwrap();
        budget.admit(&one, &name("plain.x.test")).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn domains_without_end_are_refused_rather_than_forgotten() {
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
