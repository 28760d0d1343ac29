//! Known secrets leave no log line: they are replaced in the writer itself, by value.
//!
//! Redacting where a value is logged depends on everyone remembering; the writer sees
//! every byte, whoever wrote it.

use std::borrow::Cow;
use std::sync::Arc;

use aho_corasick::{AhoCorasick, MatchKind};
use arc_swap::ArcSwapOption;

/// Values shorter than this would tear ordinary words out of every line.
const SHORTEST: usize = 4;

/// Replaces known values by their names. Cloning shares the list.
#[derive(Clone, Debug, Default)]
pub struct Redactor {
    known: Arc<ArcSwapOption<Known>>,
}

#[derive(Debug)]
struct Known {
    automaton: AhoCorasick,
    replacements: Vec<String>,
}

impl Redactor {
    /// Takes the whole list of `(name, value)` anew.
    pub fn set<'a>(&self, secrets: impl IntoIterator<Item = (&'a str, &'a str)>) {
        let mut patterns = Vec::new();
        let mut replacements = Vec::new();
        for (name, value) in secrets {
            if value.len() < SHORTEST {
                continue;
            }
            for spelling in spellings(value) {
                patterns.push(spelling);
                replacements.push(format!("[redacted: {name}]"));
            }
        }
        // Building fails only for lists of a size no configuration reaches. Then every
        // line is withheld, which `redact` does when there are names but no automaton.
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(&patterns);
        let known = match automaton {
            Ok(automaton) if !patterns.is_empty() => Some(Known {
                automaton,
                replacements,
            }),
            Ok(_) => None,
            Err(_) => withhold_everything(),
        };
        self.known.store(known.map(Arc::new));
    }

    /// `line` without any known value.
    pub fn redact<'a>(&self, line: &'a [u8]) -> Cow<'a, [u8]> {
        let known = self.known.load();
        match known.as_deref() {
            Some(known) if known.automaton.is_match(line) => {
                Cow::Owned(known.automaton.replace_all_bytes(line, &known.replacements))
            }
            _ => Cow::Borrowed(line),
        }
    }
}

/// The forms one value takes on its way through a formatter: as it is, inside a JSON
/// string, inside a Rust debug string.
fn spellings(value: &str) -> Vec<String> {
    let mut forms = vec![value.to_owned(), value.escape_debug().to_string()];
    if let Ok(quoted) = serde_json::to_string(value)
        && let Some(inner) = quoted
            .strip_prefix('"')
            .and_then(|rest| rest.strip_suffix('"'))
    {
        forms.push(inner.to_owned());
    }
    forms.sort();
    forms.dedup();
    forms
}

fn withhold_everything() -> Option<Known> {
    let every_byte: Vec<[u8; 1]> = (0..=255_u8).map(|byte| [byte]).collect();
    let replacements = vec![String::new(); every_byte.len()];
    AhoCorasick::new(&every_byte).ok().map(|automaton| Known {
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
        redactor.set([(name, value)]);
        redactor
    }

    #[test]
    fn the_name_is_shown_in_the_values_place() {
        let redactor = redactor("e2b_api_key", "tok-123456");
        let line = redactor.redact(b"calling with tok-123456, then tok-123456\n");
        assert_eq!(
            line.as_ref(),
            b"calling with [redacted: e2b_api_key], then [redacted: e2b_api_key]\n"
        );
    }

    #[test]
    fn a_clean_line_is_not_copied() {
        let redactor = redactor("k", "tok-123456");
        assert!(matches!(redactor.redact(b"nothing here"), Cow::Borrowed(_)));
    }

    #[test]
    fn of_two_values_the_longer_one_is_taken_whole() {
        let redactor = Redactor::default();
        redactor.set([("short", "abcd"), ("long", "abcdefgh")]);
        assert_eq!(redactor.redact(b"abcdefgh").as_ref(), b"[redacted: long]");
    }

    #[test]
    fn a_new_list_replaces_the_old_one() {
        let redactor = redactor("k", "first-value");
        redactor.set([("k", "second-value")]);
        assert_eq!(redactor.redact(b"first-value").as_ref(), b"first-value");
        assert_eq!(redactor.redact(b"second-value").as_ref(), b"[redacted: k]");
        redactor.set([]);
        assert_eq!(redactor.redact(b"second-value").as_ref(), b"second-value");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        /// Feature: unified-sidecar, Property 14: secret redaction in logs.
        #[test]
        fn property_14_no_spelling_of_a_secret_survives(
            before in ".{0,20}", secret in "[ -~\\n\"\\\\é]{8,40}", after in ".{0,20}",
        ) {
            prop_assume!(!"[redacted: key]".contains(&secret));
            let redactor = redactor("key", &secret);
            for text in [
                format!("{before}{secret}{after}"),
                serde_json::to_string(&format!("{before}{secret}{after}")).unwrap(),
                format!("{:?}", format!("{before}{secret}{after}")),
            ] {
                let line = redactor.redact(text.as_bytes());
                let line = String::from_utf8_lossy(&line);
                prop_assert!(!line.contains(&secret), "{line}");
                prop_assert!(line.contains("[redacted: key]"));
            }
        }
    }
}
