//! The entrypoint of a bundle: the rules that are evaluated.

use regorus::Engine;

use super::BundleError;
use super::decision::Part;

/// The rule that decides, and the rules for its details.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    rule: String,
    details: Vec<(Part, String)>,
}

impl Entry {
    /// Resolves `entrypoint`. It is a rule, or a package: then the package's rule `decision`
    /// decides, or else `action`, or else `allow`, and with the last two the package's rules
    /// `reason` (or `message`), `rule` and `outputs` are the details.
    pub(super) fn find(
        engine: &Engine,
        entrypoint: &str,
        packages: &[(&str, String)],
    ) -> Result<Self, BundleError> {
        let bad = || BundleError::BadEntrypoint(entrypoint.to_owned());
        let parts: Vec<&str> = entrypoint.split('/').collect();
        if !parts.iter().all(|part| is_word(part)) {
            return Err(bad());
        }
        let (last, above) = parts.split_last().ok_or_else(bad)?;
        let has = |package: &str, rule: &str| {
            packages
                .iter()
                .filter(|(_, of)| of == package)
                .any(|(name, _)| {
                    let found = engine.has_declared_rule_rooted_at(name, rule);
                    found.unwrap_or(false)
                })
        };
        let named = std::iter::once("data").chain(above.iter().copied());
        let parent = named.collect::<Vec<_>>().join(".");
        if !above.is_empty() && has(&parent, last) {
            return Ok(Self {
                rule: format!("{parent}.{last}"),
                details: Vec::new(),
            });
        }
        let package = format!("{parent}.{last}");
        let whole = ["decision", "action", "allow"];
        let Some(rule) = whole.into_iter().find(|rule| has(&package, rule)) else {
            return Err(BundleError::NoEntrypoint(entrypoint.to_owned()));
        };
        let mut details = Vec::new();
        if rule != "decision" {
            for (part, names) in Part::ALL {
                let found = names.iter().find(|name| has(&package, name));
                details.extend(found.map(|name| (part, format!("{package}.{name}"))));
            }
        }
        Ok(Self {
            rule: format!("{package}.{rule}"),
            details,
        })
    }

    pub(super) fn rule(&self) -> &str {
        &self.rule
    }

    pub(super) fn details(&self) -> &[(Part, String)] {
        &self.details
    }

    /// The rule that decides, and the rule for outputs, if there is one.
    pub(super) fn deciding_rules(&self) -> Vec<&str> {
        let outputs = self
            .details
            .iter()
            .filter(|(part, _)| *part == Part::Outputs);
        let outputs = outputs.map(|(_, rule)| rule.as_str());
        std::iter::once(self.rule()).chain(outputs).collect()
    }

    /// Every rule, the one that decides first.
    pub(super) fn rules(&self) -> Vec<&str> {
        let details = self.details.iter().map(|(_, rule)| rule.as_str());
        std::iter::once(self.rule()).chain(details).collect()
    }
}

/// Whether `text` is an identifier.
fn is_word(text: &str) -> bool {
    let mut bytes = text.bytes();
    let begins = bytes
        .next()
        .is_some_and(|b| b.is_ascii_alphabetic() || b == b'_');
    begins && bytes.all(|b| b.is_ascii_alphanumeric() || b == b'_')
}
