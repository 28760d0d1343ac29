//! Detector of secrets with a recognisable format: a provider's prefix, a PEM header, or a value
//! beside its name.
//!
//! Most bytes are only searched for some dozens of keywords. Where a keyword matches, the regular
//! expression of its rule is tried on the few hundred bytes around it. The regular expressions do
//! not backtrack, so no input can make them slow.

mod table;

use std::ops::Range;

use aho_corasick::{AhoCorasick, MatchKind};
use regex_automata::meta::Regex;
use regex_automata::util::syntax;
use regex_automata::{Anchored, Input};

use crate::detector::{Detector, ScanFinding};

/// Prefix of the placeholder that an agent has instead of a real credential; it is useless outside
/// its sandbox.
const PLACEHOLDER: &[u8] = b"PALISADE_";

/// A rule of the table.
struct FormatRule {
    /// Name of the rule, which is shown and stored.
    id: &'static str,
    /// Description of what the rule finds.
    description: &'static str,
    /// Texts of which at least one must be present.
    keywords: &'static [&'static str],
    /// Where the match starts.
    start: MatchStart,
    /// Maximum distance from the start of the keyword to the end of the match.
    max_len: usize,
    /// The regular expression; its first group, if any, is the secret.
    regex: &'static str,
    /// Minimum entropy in bits per byte, which excludes texts such as `xxxx`.
    entropy: f32,
    /// Texts that the secret must not contain.
    excluded: &'static [&'static str],
}

/// Where a match starts, relative to its keyword. The expression is tried only there, so that a
/// text full of keywords costs little more than one without.
#[derive(Clone, Copy)]
enum MatchStart {
    /// At the keyword, unless a letter or digit precedes it.
    Word,
    /// At the keyword, unless a byte precedes it that could belong to the same token.
    Token,
    /// At the keyword, regardless of the byte before it.
    Keyword,
    /// Before the keyword: at the first of the preceding bytes that match the function, at most this
    /// number of them.
    Back(fn(u8) -> bool, usize),
}

impl FormatRule {
    /// A rule whose match starts with its keyword, with the default limits.
    const fn token(
        id: &'static str,
        description: &'static str,
        keywords: &'static [&'static str],
        regex: &'static str,
    ) -> Self {
        Self {
            id,
            description,
            keywords,
            start: MatchStart::Word,
            max_len: 300,
            regex,
            entropy: 3.0,
            excluded: &["EXAMPLE"],
        }
    }

    const fn start(mut self, start: MatchStart) -> Self {
        self.start = start;
        self
    }

    const fn max_len(mut self, max_len: usize) -> Self {
        self.max_len = max_len;
        self
    }

    const fn entropy(mut self, entropy: f32) -> Self {
        self.entropy = entropy;
        self
    }

    const fn excluded(mut self, excluded: &'static [&'static str]) -> Self {
        self.excluded = excluded;
        self
    }
}

/// The detector with the built-in rules.
pub struct FormatDetector {
    keywords: AhoCorasick,
    /// For each keyword, the indices of its rules in `rules`.
    rules_of_keyword: Vec<Vec<usize>>,
    rules: Vec<(&'static FormatRule, Regex)>,
    reach: usize,
}

/// A rule that cannot be compiled.
#[derive(Debug, thiserror::Error)]
pub enum RuleError {
    /// The regular expression is invalid.
    #[error("rule '{rule}': {why}")]
    Expression {
        /// The name of the rule.
        rule: String,
        /// The error.
        why: String,
    },
    /// The keywords of all rules do not fit into one search.
    #[error("the rules' keywords: {0}")]
    Keywords(String),
}

impl FormatDetector {
    /// The detector with all built-in rules.
    pub fn built_in() -> Result<Self, RuleError> {
        let rules = table::FORMAT_RULES
            .iter()
            .map(|rule| Ok((rule, compile(rule)?)));
        let rules = rules.collect::<Result<Vec<_>, RuleError>>()?;
        let mut keywords: Vec<&str> = Vec::new();
        let mut rules_of_keyword: Vec<Vec<usize>> = Vec::new();
        for (index, (rule, _)) in rules.iter().enumerate() {
            for &keyword in rule.keywords {
                match keywords
                    .iter()
                    .zip(&mut rules_of_keyword)
                    .find(|(known, _)| **known == keyword)
                {
                    Some((_, rules)) => rules.push(index),
                    None => {
                        keywords.push(keyword);
                        rules_of_keyword.push(vec![index]);
                    }
                }
            }
        }
        let reach = rules.iter().map(|(rule, _)| match rule.start {
            MatchStart::Word | MatchStart::Token | MatchStart::Keyword => rule.max_len,
            MatchStart::Back(_, most) => rule.max_len + most,
        });
        Ok(Self {
            // In addition, the context before a match: one byte, or two for an escape sequence.
            reach: reach.max().unwrap_or_default() + 2,
            keywords: AhoCorasick::builder()
                .match_kind(MatchKind::LeftmostFirst)
                .build(&keywords)
                .map_err(|error| RuleError::Keywords(error.to_string()))?,
            rules_of_keyword,
            rules,
        })
    }

    /// The name and description of every rule.
    pub fn rules(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        self.rules
            .iter()
            .map(|(rule, _)| (rule.id, rule.description))
    }
}

impl Detector for FormatDetector {
    fn scan<'d>(&'d self, bytes: &[u8], report: &mut dyn FnMut(ScanFinding<'d>)) {
        // Two keywords may be in one secret, which is reported once.
        let mut last: Option<(usize, usize)> = None;
        let mut from = 0;
        while let Some(hit) = self
            .keywords
            .find(aho_corasick::Input::new(bytes).range(from..))
        {
            from = hit.start() + 1;
            let rules_of_keyword = self.rules_of_keyword.get(hit.pattern().as_usize());
            for &index in rules_of_keyword.into_iter().flatten() {
                if last.is_some_and(|(rule, end)| rule == index && hit.start() < end) {
                    continue;
                }
                let Some((rule, regex)) = self.rules.get(index) else {
                    continue;
                };
                if let Some(span) = find(rule, regex, bytes, hit.start()) {
                    last = Some((index, span.end));
                    report(ScanFinding {
                        rule: rule.id,
                        span: span.start as u64..span.end as u64,
                    });
                }
            }
        }
    }

    fn reach(&self) -> usize {
        self.reach
    }
}

fn compile(rule: &FormatRule) -> Result<Regex, RuleError> {
    Regex::builder()
        // Matches bytes, not text: a file with a key may not be UTF-8.
        .syntax(syntax::Config::new().unicode(false).utf8(false))
        .configure(Regex::config().utf8_empty(false))
        .build(rule.regex)
        .map_err(|error| RuleError::Expression {
            rule: rule.id.to_owned(),
            why: error.to_string(),
        })
}

/// The secret around a keyword at `hit`, if there is one.
fn find(rule: &FormatRule, regex: &Regex, bytes: &[u8], hit: usize) -> Option<Range<usize>> {
    let begin = match_start(rule.start, bytes, hit)?;
    let end = hit.saturating_add(rule.max_len).min(bytes.len());
    let input = Input::new(bytes).span(begin..end).anchored(Anchored::Yes);
    let mut slots = [None; 4];
    regex.search_slots(&input, &mut slots)?;
    let span = match slots {
        [_, _, Some(start), Some(end)] | [Some(start), Some(end), _, _] => start.get()..end.get(),
        _ => return None,
    };
    let secret = bytes.get(span.clone())?;
    let is_fake = rule
        .excluded
        .iter()
        .any(|word| contains(secret, word.as_bytes()))
        || contains(secret, PLACEHOLDER)
        || entropy(secret) < rule.entropy;
    (!is_fake).then_some(span)
}

/// The offset at which a match must start whose keyword is at `hit`; None if the preceding byte
/// excludes a match.
fn match_start(start: MatchStart, bytes: &[u8], hit: usize) -> Option<usize> {
    let precedes = |at: usize, belongs: fn(u8) -> bool| {
        let before = at.checked_sub(1)?;
        let byte = bytes.get(before).copied().filter(|byte| belongs(*byte))?;
        // In a JSON or source string, the `n` of `\nTOKEN` belongs to an escape sequence.
        let is_escape = matches!(byte, b'n' | b'r' | b't')
            && before.checked_sub(1).and_then(|at| bytes.get(at)) == Some(&b'\\');
        (!is_escape).then_some(before)
    };
    let is_word = |byte: u8| byte.is_ascii_alphanumeric();
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    let starts_a_word = bytes.get(hit).copied().is_some_and(is_word);
    match start {
        MatchStart::Word if starts_a_word && precedes(hit, is_word).is_some() => None,
        MatchStart::Token if precedes(hit, is_token).is_some() => None,
        MatchStart::Word | MatchStart::Token | MatchStart::Keyword => Some(hit),
        MatchStart::Back(belongs, most) => {
            let mut at = hit;
            while let Some(before) = precedes(at, belongs) {
                if hit - before > most {
                    return None;
                }
                at = before;
            }
            Some(at)
        }
    }
}

fn contains(text: &[u8], word: &[u8]) -> bool {
    text.windows(word.len()).any(|part| part == word)
}

/// Shannon entropy, in bits per byte.
fn entropy(bytes: &[u8]) -> f32 {
    let mut counts = [0_u16; 256];
    for &byte in bytes {
        if let Some(count) = counts.get_mut(usize::from(byte)) {
            *count = count.saturating_add(1);
        }
    }
    #[expect(
        clippy::cast_precision_loss,
        reason = "a match is a few thousand bytes at most"
    )]
    let all = bytes.len() as f32;
    counts
        .iter()
        .filter(|count| **count > 0)
        .map(|&count| {
            let share = f32::from(count) / all;
            -share * share.log2()
        })
        .sum()
}

#[cfg(test)]
mod tests;
