//! Secrets that are known by their shape: a prefix that a provider chose, a header, a pair of
//! words around a value.
//!
//! Most bytes are looked at by one search for some dozens of keywords and by nothing else.
//! Where a keyword is, its rule's expression is tried on the few hundred bytes around it. No
//! expression backtracks, so nobody can make one slow.

mod table;

use std::ops::Range;

use aho_corasick::{AhoCorasick, MatchKind};
use regex_automata::meta::Regex;
use regex_automata::util::syntax;
use regex_automata::{Anchored, Input};

use crate::detector::{Detector, ScanFinding};

/// What an agent holds in a real credential's place; worth nothing outside its sandbox.
const PLACEHOLDER: &[u8] = b"PALISADE_";

/// A rule as it is written down.
struct ShapeRule {
    /// Its name, which is shown and kept.
    id: &'static str,
    /// What it finds, in words.
    about: &'static str,
    /// One of these must be there.
    keywords: &'static [&'static str],
    /// Where the match begins.
    start: Start,
    /// How far after the keyword's beginning the match may end.
    longest: usize,
    /// The expression; the first group, where there is one, is the secret.
    regex: &'static str,
    /// The least bits of entropy per byte: `xxxx` is no secret.
    entropy: f32,
    /// What the secret does not contain.
    never: &'static [&'static str],
}

/// Where a match begins, seen from its keyword. It is tried from there and from nowhere else, so
/// that a text full of keywords costs little more than one without.
#[derive(Clone, Copy)]
enum Start {
    /// There, unless a letter or digit precedes it.
    Word,
    /// There, unless a byte precedes it that could belong to the same token.
    Token,
    /// There, whatever precedes it.
    Keyword,
    /// Before it, as far as such bytes go, but no further than this.
    Back(fn(u8) -> bool, usize),
}

impl ShapeRule {
    /// A rule whose match begins with its keyword.
    const fn token(
        id: &'static str,
        about: &'static str,
        keywords: &'static [&'static str],
        regex: &'static str,
    ) -> Self {
        Self {
            id,
            about,
            keywords,
            start: Start::Word,
            longest: 300,
            regex,
            entropy: 3.0,
            never: &["EXAMPLE"],
        }
    }

    const fn start(mut self, start: Start) -> Self {
        self.start = start;
        self
    }

    const fn longest(mut self, longest: usize) -> Self {
        self.longest = longest;
        self
    }

    const fn entropy(mut self, entropy: f32) -> Self {
        self.entropy = entropy;
        self
    }

    const fn never(mut self, never: &'static [&'static str]) -> Self {
        self.never = never;
        self
    }
}

/// The built-in rules.
pub struct ShapeDetector {
    keywords: AhoCorasick,
    /// For each keyword, the rules it may mean: places in `rules`.
    meant: Vec<Vec<usize>>,
    rules: Vec<(&'static ShapeRule, Regex)>,
    reach: usize,
}

/// A rule that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RuleError {
    /// Its expression is none.
    #[error("rule '{rule}': {why}")]
    Expression {
        /// The rule.
        rule: String,
        /// What is wrong with it.
        why: String,
    },
    /// The keywords of all rules do not fit one search.
    #[error("the rules' keywords: {0}")]
    Keywords(String),
}

impl ShapeDetector {
    /// Every rule there is.
    pub fn built_in() -> Result<Self, RuleError> {
        let rules = table::SHAPES
            .iter()
            .map(|shape| Ok((shape, compile(shape)?)));
        let rules = rules.collect::<Result<Vec<_>, RuleError>>()?;
        let mut keywords: Vec<&str> = Vec::new();
        let mut meant: Vec<Vec<usize>> = Vec::new();
        for (place, (shape, _)) in rules.iter().enumerate() {
            for &keyword in shape.keywords {
                match keywords
                    .iter()
                    .zip(&mut meant)
                    .find(|(one, _)| **one == keyword)
                {
                    Some((_, rules)) => rules.push(place),
                    None => {
                        keywords.push(keyword);
                        meant.push(vec![place]);
                    }
                }
            }
        }
        let reach = rules.iter().map(|(shape, _)| match shape.start {
            Start::Word | Start::Token | Start::Keyword => shape.longest,
            Start::Back(_, most) => shape.longest + most,
        });
        Ok(Self {
            // And what precedes a match: a byte, or two that are an escape.
            reach: reach.max().unwrap_or_default() + 2,
            keywords: AhoCorasick::builder()
                .match_kind(MatchKind::LeftmostFirst)
                .build(&keywords)
                .map_err(|error| RuleError::Keywords(error.to_string()))?,
            meant,
            rules,
        })
    }

    /// Every rule's name and what it finds.
    pub fn rules(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        self.rules.iter().map(|(shape, _)| (shape.id, shape.about))
    }
}

impl Detector for ShapeDetector {
    fn scan<'d>(&'d self, bytes: &[u8], found: &mut dyn FnMut(ScanFinding<'d>)) {
        // Two keywords may stand in one secret; it is told once.
        let mut last: Option<(usize, usize)> = None;
        let mut from = 0;
        while let Some(hit) = self
            .keywords
            .find(aho_corasick::Input::new(bytes).range(from..))
        {
            from = hit.start() + 1;
            let meant = self.meant.get(hit.pattern().as_usize());
            for &place in meant.into_iter().flatten() {
                if last.is_some_and(|(rule, end)| rule == place && hit.start() < end) {
                    continue;
                }
                let Some((shape, regex)) = self.rules.get(place) else {
                    continue;
                };
                if let Some(span) = find(shape, regex, bytes, hit.start()) {
                    last = Some((place, span.end));
                    found(ScanFinding {
                        rule: shape.id,
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

fn compile(shape: &ShapeRule) -> Result<Regex, RuleError> {
    Regex::builder()
        // Bytes, not text: a file need not be UTF-8 to hold a key.
        .syntax(syntax::Config::new().unicode(false).utf8(false))
        .configure(Regex::config().utf8_empty(false))
        .build(shape.regex)
        .map_err(|error| RuleError::Expression {
            rule: shape.id.to_owned(),
            why: error.to_string(),
        })
}

/// The secret around a keyword at `hit`, if there is one.
fn find(shape: &ShapeRule, regex: &Regex, bytes: &[u8], hit: usize) -> Option<Range<usize>> {
    let begin = begin(shape.start, bytes, hit)?;
    let end = hit.saturating_add(shape.longest).min(bytes.len());
    let input = Input::new(bytes).span(begin..end).anchored(Anchored::Yes);
    let mut slots = [None; 4];
    regex.search_slots(&input, &mut slots)?;
    let span = match slots {
        [_, _, Some(start), Some(end)] | [Some(start), Some(end), _, _] => start.get()..end.get(),
        _ => return None,
    };
    let secret = bytes.get(span.clone())?;
    let is_fake = shape.never.iter().any(|word| has(secret, word.as_bytes()))
        || has(secret, PLACEHOLDER)
        || entropy(secret) < shape.entropy;
    (!is_fake).then_some(span)
}

/// Where a match must begin whose keyword is at `hit`.
fn begin(start: Start, bytes: &[u8], hit: usize) -> Option<usize> {
    let precedes = |at: usize, belongs: fn(u8) -> bool| {
        let before = at.checked_sub(1)?;
        let byte = bytes.get(before).copied().filter(|byte| belongs(*byte))?;
        // `\nTOKEN` in a string of JSON or source is a line of its own.
        let is_escape = matches!(byte, b'n' | b'r' | b't')
            && before.checked_sub(1).and_then(|at| bytes.get(at)) == Some(&b'\\');
        (!is_escape).then_some(before)
    };
    let is_word = |byte: u8| byte.is_ascii_alphanumeric();
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    let starts_a_word = bytes.get(hit).copied().is_some_and(is_word);
    match start {
        Start::Word if starts_a_word && precedes(hit, is_word).is_some() => None,
        Start::Token if precedes(hit, is_token).is_some() => None,
        Start::Word | Start::Token | Start::Keyword => Some(hit),
        Start::Back(belongs, most) => {
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

fn has(text: &[u8], word: &[u8]) -> bool {
    text.windows(word.len()).any(|part| part == word)
}

/// Shannon's, in bits per byte.
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
