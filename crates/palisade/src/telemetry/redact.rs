//! Redactor of log lines: the log writer replaces known secret values.
//!
//! Redaction at each call site would depend on every author; the writer sees every byte,
//! whichever module wrote it.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use aho_corasick::{AhoCorasick, MatchKind};
use arc_swap::ArcSwapOption;

/// Minimum length of a secret: shorter values would match ordinary words.
const MIN_LENGTH: usize = 4;

/// Maximum number of values, including those of earlier settings, which requests in flight may
/// hold.
const MAX_REMEMBERED: usize = 256;

/// Replaces secret values by their names. Cloning shares the list.
#[derive(Clone, Debug, Default)]
pub struct Redactor {
    patterns: Arc<ArcSwapOption<SecretPatterns>>,
    values: Arc<Mutex<VecDeque<(String, String)>>>,
}

struct SecretPatterns {
    automaton: AhoCorasick,
    replacements: Vec<String>,
}

impl std::fmt::Debug for SecretPatterns {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SecretPatterns({} spellings)", self.replacements.len())
    }
}

impl Redactor {
    /// Adds the `(name, value)` pairs of new settings. Values of earlier settings stay
    /// redacted, because requests that began under them may be in flight.
    pub fn add_secrets<'a>(&self, secrets: impl IntoIterator<Item = (&'a str, &'a str)>) {
        let mut values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, value) in secrets {
            if value.len() >= MIN_LENGTH && !values.iter().any(|(_, known)| known == value) {
                values.push_back((name.to_owned(), value.to_owned()));
            }
        }
        while values.len() > MAX_REMEMBERED {
            values.pop_front();
        }
        let mut patterns = Vec::new();
        let mut replacements = Vec::new();
        for (name, value) in values.iter() {
            for spelling in spellings(value) {
                patterns.push(spelling);
                replacements.push(format!("[redacted: {name}]"));
            }
        }
        // Building fails only for lists of a size that no configuration reaches. Then all text
        // is withheld.
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(&patterns);
        let known = match automaton {
            Ok(automaton) if !patterns.is_empty() => Some(SecretPatterns {
                automaton,
                replacements,
            }),
            Ok(_) => None,
            Err(_) => withhold_everything(),
        };
        self.patterns.store(known.map(Arc::new));
    }

    /// `line` without secret values.
    pub fn redact<'a>(&self, line: &'a [u8]) -> Cow<'a, [u8]> {
        let known = self.patterns.load();
        match known.as_deref() {
            Some(known) if known.automaton.is_match(line) => {
                Cow::Owned(known.automaton.replace_all_bytes(line, &known.replacements))
            }
            _ => Cow::Borrowed(line),
        }
    }
}

/// The forms of a value in log lines: unchanged, as a Rust debug string, and either of them in
/// a JSON string.
fn spellings(value: &str) -> Vec<String> {
    let unquoted = |quoted: String| {
        let inner = quoted.strip_prefix('"').and_then(|q| q.strip_suffix('"'));
        inner.map(str::to_owned).unwrap_or(quoted)
    };
    let in_json = |text: &str| unquoted(serde_json::to_string(text).unwrap_or_default());
    let debug = unquoted(format!("{value:?}"));
    let mut forms = vec![value.to_owned(), in_json(value), in_json(&debug), debug];
    forms.sort();
    forms.dedup();
    forms.retain(|form| !form.is_empty());
    forms
}

fn withhold_everything() -> Option<SecretPatterns> {
    let every_byte: Vec<[u8; 1]> = (0..=255_u8).map(|byte| [byte]).collect();
    let replacements = vec![String::new(); every_byte.len()];
    AhoCorasick::new(&every_byte)
        .ok()
        .map(|automaton| SecretPatterns {
            automaton,
            replacements,
        })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn redactor(name: &str, value: &str) -> Redactor {
        let redactor = Redactor::default();
        redactor.add_secrets([(name, value)]);
        redactor
    }

    #[test]
    fn value_is_replaced_by_its_name() {
        let redactor = redactor("e2b_api_key", "tok-123456");
        let line = redactor.redact(b"calling with tok-123456, then tok-123456\n");
        assert_eq!(
            line.as_ref(),
            b"calling with [redacted: e2b_api_key], then [redacted: e2b_api_key]\n"
        );
    }

    #[test]
    fn line_without_secrets_is_not_copied() {
        let redactor = redactor("k", "tok-123456");
        assert!(matches!(redactor.redact(b"nothing here"), Cow::Borrowed(_)));
    }

    #[test]
    fn longest_matching_value_is_replaced() {
        let redactor = Redactor::default();
        redactor.add_secrets([("short", "abcd"), ("long", "abcdefgh")]);
        assert_eq!(redactor.redact(b"abcdefgh").as_ref(), b"[redacted: long]");
    }

    #[test]
    fn rotated_value_stays_redacted() {
        let redactor = redactor("k", "first-value");
        redactor.add_secrets([("k", "second-value")]);
        let line = redactor.redact(b"first-value second-value");
        assert_eq!(line.as_ref(), b"[redacted: k] [redacted: k]");
        for n in 0..MAX_REMEMBERED {
            redactor.add_secrets([("k", format!("value-{n:04}").as_str())]);
        }
        let line = redactor.redact(b"first-value value-0255");
        assert_eq!(
            line.as_ref(),
            b"first-value [redacted: k]",
            "bounded, oldest first"
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        // **Feature: unified-sidecar, Property 14: Secret Redaction in Logs**
        #[test]
        fn property_14_secret_redaction_in_logs(
            before in ".{0,20}", secret in "[ -~\\n\"'\\\\é\u{7}]{8,40}", after in ".{0,20}",
        ) {
            prop_assume!(!"[redacted: key]".contains(&secret));
            let redactor = redactor("key", &secret);
            for text in [
                format!("{before}{secret}{after}"),
                serde_json::to_string(&format!("{before}{secret}{after}")).unwrap(),
                format!("{:?}", format!("{before}{secret}{after}")),
                serde_json::to_string(&format!("{:?}", format!("{before}{secret}{after}"))).unwrap(),
            ] {
                let line = redactor.redact(text.as_bytes());
                let line = String::from_utf8_lossy(&line);
                prop_assert!(!line.contains(&secret), "{line}");
                prop_assert!(line.contains("[redacted: key]"));
            }
        }
    }
}
