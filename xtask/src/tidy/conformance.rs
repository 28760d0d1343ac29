//! Checks docs/conformance.md: the table of all requirements of the product's original
//! specifications, called seeds, and the tests that verify each requirement.
//!
//! ```text
//!   | 003-17 | the requirement | done | `tests/traffic/seed.rs`: `a_test`, `another` |
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The path of the document.
pub(super) const FILE: &str = "docs/conformance.md";

/// The numbers of the specifications (seeds). Each must have rows in the document.
const SEEDS: &[&str] = &["000", "001", "002", "003", "004"];

/// Features that are not available yet; a row in the state 'planned' names one of them.
const PLANNED: &[&str] = &[
    "approvals",
    "bundle",
    "compose",
    "credentials",
    "Docker backend",
    "scanner",
];

/// The violations of the document: rows whose evidence is missing or does not exist, repeated
/// numbers, and specifications without rows.
pub(super) fn check(root: &Path, text: &str) -> Vec<String> {
    let mut sources = Sources::new(root);
    let mut seen = BTreeSet::new();
    let mut violations = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let Some(row) = Row::read(line) else { continue };
        let problem = if seen.insert(row.id) {
            row.find_problem(&mut sources)
        } else {
            Some("the number is used twice".to_owned())
        };
        if let Some(problem) = problem {
            violations.push(format!("{FILE}:{number}: {}: {problem}", row.id));
        }
    }
    for seed in SEEDS {
        if !seen.iter().any(|id| seed_of(id) == Some(seed)) {
            violations.push(format!("{FILE}: seed {seed} has no row"));
        }
    }
    violations
}

/// The specification of a row's number: 003 for 003-17.
fn seed_of(id: &str) -> Option<&str> {
    let (seed, number) = id.split_once('-')?;
    number.parse::<u32>().ok().map(|_| seed)
}

struct Row<'a> {
    id: &'a str,
    state: &'a str,
    evidence: &'a str,
}

impl<'a> Row<'a> {
    /// Parses a line of the table. None for lines that do not start with a row's number.
    fn read(line: &'a str) -> Option<Self> {
        let cells: Vec<&str> = line
            .strip_prefix('|')?
            .trim_end()
            .strip_suffix('|')?
            .split('|')
            .map(str::trim)
            .collect();
        let id = *cells.first()?;
        seed_of(id).filter(|seed| seed.len() == 3)?;
        let (state, evidence) = match cells.as_slice() {
            [_, _, state, evidence] => (*state, *evidence),
            // `find_problem` reports the empty state.
            _ => ("", ""),
        };
        Some(Self {
            id,
            state,
            evidence,
        })
    }

    /// What is wrong with the row, if anything is.
    fn find_problem(&self, sources: &mut Sources<'_>) -> Option<String> {
        if !SEEDS.contains(&seed_of(self.id)?) {
            return Some("there is no such seed".to_owned());
        }
        let tests = match tests(self.evidence) {
            Ok(tests) => tests,
            Err(problem) => return Some(problem),
        };
        for (file, test) in &tests {
            if !sources.has_test(file, test) {
                return Some(format!("{file} has no test {test}"));
            }
        }
        let has_evidence = match self.state {
            "done" => !tests.is_empty(),
            "differs" => self.evidence.contains("](adr/"),
            "planned" => PLANNED.contains(&self.evidence),
            "measured" => self.evidence.contains("](benchmarks.md)"),
            "open" => self.evidence.starts_with("TODO("),
            other => return Some(format!("there is no state '{other}'")),
        };
        (!has_evidence).then(|| format!("no evidence for the state '{}'", self.state))
    }
}

/// The tests that a cell names: words in backticks, each file followed by its tests.
fn tests(evidence: &str) -> Result<Vec<(&str, &str)>, String> {
    let mut tests = Vec::new();
    let mut current: Option<(&str, bool)> = None;
    for word in evidence.split('`').skip(1).step_by(2) {
        match current {
            _ if word.ends_with(".rs") => {
                if let Some((file, false)) = current {
                    return Err(format!("{file} is named without a test"));
                }
                current = Some((word, false));
            }
            Some((file, _)) => {
                tests.push((file, word));
                current = Some((file, true));
            }
            None => return Err(format!("{word} is named without its file")),
        }
    }
    match current {
        Some((file, false)) => Err(format!("{file} is named without a test")),
        _ => Ok(tests),
    }
}

/// The texts of files with tests; each file is read once.
struct Sources<'a> {
    root: &'a Path,
    texts: BTreeMap<String, String>,
}

impl<'a> Sources<'a> {
    fn new(root: &'a Path) -> Self {
        Self {
            root,
            texts: BTreeMap::new(),
        }
    }

    fn has_test(&mut self, file: &str, test: &str) -> bool {
        let text = self.texts.entry(file.to_owned()).or_insert_with(|| {
            let text = std::fs::read_to_string(self.root.join(file));
            text.unwrap_or_default()
        });
        let declaration = format!("fn {test}(");
        text.contains(&declaration)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The violations for `row`, added to valid rows for every seed.
    fn violations_of(row: &str) -> Vec<String> {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("a.rs"), "#[test]\nfn one() {}\n").unwrap();
        let mut text = format!("{row}\n");
        for seed in SEEDS {
            text.push_str(&format!("| {seed}-1 | kept | done | `a.rs`: `one` |\n"));
        }
        let start = format!("{FILE}:1: ");
        let found = check(root.path(), &text).into_iter();
        found
            .map(|one| one.strip_prefix(&start).unwrap_or(&one).to_owned())
            .collect()
    }

    #[test]
    fn evidence_of_every_state_is_accepted() {
        for row in [
            "| 000-2 | p | done | `a.rs`: `one` |",
            "| 000-2 | p | differs | [ADR 1](adr/0001-a.md); `a.rs`: `one` |",
            "| 000-2 | p | planned | Docker backend |",
            "| 000-2 | p | measured | [benchmarks](benchmarks.md) |",
            "| 000-2 | p | open | TODO(15.3) |",
            "| promise | state | shown by |",
            "| --- | --- | --- | --- |",
            "Text about `a.rs`.",
        ] {
            assert_eq!(violations_of(row), [""; 0], "{row}");
        }
    }

    #[test]
    fn row_without_evidence_is_reported() {
        for (row, violation) in [
            (
                "| 000-2 | p | done | |",
                "000-2: no evidence for the state 'done'",
            ),
            (
                "| 000-2 | p | differs | `a.rs`: `one` |",
                "000-2: no evidence for the state 'differs'",
            ),
            (
                "| 000-2 | p | planned | soon |",
                "000-2: no evidence for the state 'planned'",
            ),
            (
                "| 000-2 | p | open | |",
                "000-2: no evidence for the state 'open'",
            ),
            (
                "| 000-2 | p | maybe | |",
                "000-2: there is no state 'maybe'",
            ),
            ("| 000-2 | p | done |", "000-2: there is no state ''"),
            (
                "| 007-2 | p | done | `a.rs`: `one` |",
                "007-2: there is no such seed",
            ),
        ] {
            assert_eq!(violations_of(row), [violation], "{row}");
        }
    }

    #[test]
    fn missing_test_is_reported() {
        for (evidence, violation) in [
            ("`a.rs`: `two`", "000-2: a.rs has no test two"),
            ("`a.rs`: `on`", "000-2: a.rs has no test on"),
            ("`b.rs`: `one`", "000-2: b.rs has no test one"),
            ("`a.rs`", "000-2: a.rs is named without a test"),
            (
                "`a.rs`; `a.rs`: `one`",
                "000-2: a.rs is named without a test",
            ),
            ("`one`", "000-2: one is named without its file"),
        ] {
            let row = format!("| 000-2 | p | done | {evidence} |");
            assert_eq!(violations_of(&row), [violation], "{evidence}");
        }
    }

    #[test]
    fn repeated_number_and_seed_without_rows_are_reported() {
        let root = tempfile::tempdir().unwrap();
        let row = "| 000-1 | p | open | TODO(1) |\n";
        let found = check(root.path(), &row.repeat(2));
        assert_eq!(found.len(), SEEDS.len());
        assert_eq!(
            found.first().map(String::as_str),
            Some("docs/conformance.md:2: 000-1: the number is used twice")
        );
        assert_eq!(
            found.last().map(String::as_str),
            Some("docs/conformance.md: seed 004 has no row")
        );
    }
}
