//! Sandbox names, and the names of branches and containers derived from them.

use serde::{Deserialize, Serialize};

/// A sandbox's name that is valid for git, Docker and file systems: 1 to 63 characters of `a-z 0-9
/// -`, without a dash at either end.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Slug(String);

/// A name from which no slug can be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "Invalid sandbox name: '{shown}'. Use 1 to 63 letters, digits and dashes, with at least one \
     letter or digit.", shown = .0.escape_debug()
)]
pub struct InvalidName(String);

/// Maximum length of a slug, as for a DNS label.
const MAX_LENGTH: usize = 63;

impl Slug {
    /// Converts a name that a person typed: lower case, every run of other characters replaced by a
    /// dash, trimmed.
    pub fn from_name(name: &str) -> Result<Self, InvalidName> {
        let mut slug = String::with_capacity(name.len().min(MAX_LENGTH));
        let mut gap = false;
        for c in name.chars() {
            if c.is_ascii_alphanumeric() {
                if gap && !slug.is_empty() {
                    slug.push('-');
                }
                slug.push(c.to_ascii_lowercase());
                gap = false;
            } else {
                gap = true;
            }
        }
        if slug.is_empty() || slug.len() > MAX_LENGTH {
            return Err(InvalidName(name.chars().take(100).collect()));
        }
        Ok(Self(slug))
    }

    /// The slug as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The sandbox's branch.
    pub fn branch(&self) -> String {
        format!("palisade/{}", self.0)
    }

    /// The container's name for a sandbox of this repository.
    pub fn container(&self, repository: &str) -> String {
        match Slug::from_name(repository) {
            Ok(repository) => format!("palisade-{}-{}", repository.0, self.0),
            Err(_) => format!("palisade-repo-{}", self.0),
        }
    }
}

impl TryFrom<String> for Slug {
    type Error = InvalidName;

    /// Accepts only a text that is a slug already.
    fn try_from(text: String) -> Result<Self, InvalidName> {
        match Self::from_name(&text) {
            Ok(slug) if slug.0 == text => Ok(slug),
            _ => Err(InvalidName(text.chars().take(100).collect())),
        }
    }
}

impl From<Slug> for String {
    fn from(slug: Slug) -> String {
        slug.0
    }
}

impl std::fmt::Display for Slug {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn name_converts_to_slug_branch_and_container() {
        for (name, slug) in [
            ("fix", "fix"),
            ("Fix The Bug!", "fix-the-bug"),
            ("--a__b..c--", "a-b-c"),
            ("Ünïcode 7", "n-code-7"),
            (&"x".repeat(63), &"x".repeat(63)),
        ] {
            assert_eq!(Slug::from_name(name).unwrap().as_str(), slug);
        }
        let slug = Slug::from_name("Fix It").unwrap();
        assert_eq!(slug.branch(), "palisade/fix-it");
        assert_eq!(slug.container("My.Repo"), "palisade-my-repo-fix-it");
    }

    #[test]
    fn name_without_letters_or_digits_is_refused() {
        for bad in ["", "---", "!!!", "é", &"x".repeat(64)] {
            let error = Slug::from_name(bad).unwrap_err().to_string();
            assert!(error.starts_with("Invalid sandbox name: '"), "{error}");
        }
        let hostile = Slug::from_name("\u{1b}[2J").map(|slug| slug.0);
        assert_eq!(hostile.as_deref(), Ok("2j"));
        let error = Slug::from_name("\n\u{202e}").unwrap_err().to_string();
        assert!(
            !error.contains('\n') && !error.contains('\u{202e}'),
            "{error}"
        );
    }

    proptest! {
        #[test]
        fn slug_converts_to_itself(name in ".{0,80}") {
            if let Ok(slug) = Slug::from_name(&name) {
                let text = slug.as_str();
                prop_assert!((1..=63).contains(&text.len()));
                prop_assert!(!text.starts_with('-') && !text.ends_with('-') && !text.contains("--"));
                prop_assert_eq!(Slug::from_name(text), Ok(slug.clone()));
                prop_assert_eq!(Slug::try_from(text.to_owned()), Ok(slug));
            }
        }
    }
}
