//! What a sandbox is called, and what its branch and container are called after it.

use serde::{Deserialize, Serialize};

/// A sandbox's name as git, Docker and file systems take it: 1 to 63 of `a-z 0-9 -`, not
/// starting or ending with a dash.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Slug(String);

/// A name from which no slug can be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "Invalid sandbox name: '{shown}'. A name needs a letter or digit, and at most 63 of \
     them with dashes in between.", shown = .0.escape_debug()
)]
pub struct InvalidName(String);

const LONGEST: usize = 63;

impl Slug {
    /// Makes a slug from what a person typed: lower case, every run of other characters a
    /// dash, trimmed.
    pub fn from_name(name: &str) -> Result<Self, InvalidName> {
        let mut slug = String::with_capacity(name.len().min(LONGEST));
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
        if slug.is_empty() || slug.len() > LONGEST {
            return Err(InvalidName(name.chars().take(100).collect()));
        }
        Ok(Self(slug))
    }

    /// The slug as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The branch the sandbox works on.
    pub fn branch(&self) -> String {
        format!("palisade/{}", self.0)
    }

    /// The container of a sandbox for a repository of that name.
    pub fn container(&self, repository: &str) -> String {
        match Slug::from_name(repository) {
            Ok(repository) => format!("palisade-{}-{}", repository.0, self.0),
            Err(_) => format!("palisade-repo-{}", self.0),
        }
    }
}

impl TryFrom<String> for Slug {
    type Error = InvalidName;

    /// Takes a slug that was made before, and nothing else.
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
    fn a_name_becomes_a_slug_a_branch_and_a_container() {
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
    fn a_name_without_substance_is_refused_in_words() {
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
        fn a_slug_is_its_own_slug_and_a_safe_word(name in ".{0,80}") {
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
