//! File names that some file system treats as a restricted name.
//!
//! A forge reads exactly `.github/workflows`; a runner on Windows or macOS also finds the directory
//! as `.GitHub`, `GITHUB~1`, `.github.` or with invisible characters. Matching too many names is
//! safe, because an entry that upstream has counts as unchanged.

use policy::refs::is_invisible;

/// The distinct components of the restricted paths, and each path as indices into them.
pub(super) struct RestrictedNames {
    components: Vec<String>,
    pub(super) paths: Vec<Vec<usize>>,
}

impl RestrictedNames {
    pub(super) fn from_paths(restricted: &[String]) -> Self {
        let mut components = Vec::new();
        let mut paths = Vec::new();
        for path in restricted {
            let parts = path.split('/').filter(|part| !part.is_empty());
            let indices = parts.map(|part| {
                let part = fold(part);
                components
                    .iter()
                    .position(|known| *known == part)
                    .unwrap_or_else(|| {
                        components.push(part);
                        components.len() - 1
                    })
            });
            let indices: Vec<usize> = indices.collect();
            if !indices.is_empty() {
                paths.push(indices);
            }
        }
        Self { components, paths }
    }

    /// Returns the components that the name of a tree entry matches.
    pub(super) fn matching_components<'a>(
        &'a self,
        name: &'a [u8],
    ) -> impl Iterator<Item = usize> + 'a {
        let ordinary = is_ordinary(name);
        let folded = (!ordinary).then(|| fold(&String::from_utf8_lossy(name)));
        self.components
            .iter()
            .enumerate()
            .filter(move |(_, component)| match &folded {
                None => component.as_bytes().eq_ignore_ascii_case(name),
                Some(folded) => {
                    folded.as_str() == component.as_str() || is_short_name(component, folded)
                }
            })
            .map(|(index, _)| index)
    }
}

/// Whether only the case of a name can make it match another.
fn is_ordinary(name: &[u8]) -> bool {
    name.iter()
        .all(|byte| byte.is_ascii_graphic() && !matches!(byte, b'~' | b':' | b'\\'))
        && name.last() != Some(&b'.')
}

/// Normalises a name as the most lenient file system compares it: without case, without characters
/// that HFS+ ignores, without the NTFS stream name and trailing dots and spaces.
fn fold(name: &str) -> String {
    let stream = name.find(':').filter(|at| *at > 0);
    let name = name.get(..stream.unwrap_or(name.len())).unwrap_or(name);
    let visible: String = name.chars().filter(|c| !is_invisible(*c)).collect();
    policy::refs::fold_case(&visible)
        .trim_end_matches(['.', ' '])
        .to_owned()
}

/// Whether `name` may be the 8.3 short name of `component`: up to six letters and a number, or two
/// letters and a checksum.
fn is_short_name(component: &str, name: &str) -> bool {
    let Some((front, number)) = name.split_once('~') else {
        return false;
    };
    let number = number.split('.').next().unwrap_or_default();
    if number.is_empty() || !number.bytes().all(|digit| digit.is_ascii_digit()) {
        return false;
    }
    let letters: String = component.chars().filter(|c| !". ".contains(*c)).collect();
    let is_shortened = !front.is_empty() && letters.starts_with(front);
    let has_checksum = front.len() == 6
        && front.get(..2) == letters.get(..2)
        && front.bytes().skip(2).all(|digit| digit.is_ascii_hexdigit());
    is_shortened || has_checksum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restricted_names_match_every_file_system_spelling() {
        let restricted_names = RestrictedNames::from_paths(&[
            ".github/workflows".to_owned(),
            ".github/actions".to_owned(),
        ]);
        assert_eq!(restricted_names.paths, [[0, 1], [0, 2]]);
        for (name, index) in [
            (".github", 0),
            (".GitHub", 0),
            (".GITHUB", 0),
            (".g\u{200c}ithub", 0),
            ("\u{feff}.github", 0),
            (".gıthub", 0),
            (".github.", 0),
            (".github ", 0),
            (".github . .", 0),
            (".github::$INDEX_ALLOCATION", 0),
            ("GITHUB~1", 0),
            ("github~2", 0),
            ("GI7D4A~1", 0),
            ("WORKFL~1", 1),
            ("Workflows", 1),
            ("worKflows", 1),
            ("worflows\u{200d}".replace("worf", "workf").as_str(), 1),
            ("ACTIONS", 2),
        ] {
            let matched: Vec<_> = restricted_names
                .matching_components(name.as_bytes())
                .collect();
            assert_eq!(matched, [index], "{name:?}");
        }
        for name in [
            "github", ".git", ".githubs", "x.github", "GITLAB~1", "github~x", "~1", "a:b",
            "workflow",
        ] {
            let matched: Vec<_> = restricted_names
                .matching_components(name.as_bytes())
                .collect();
            assert_eq!(matched, [0; 0], "{name:?}");
        }
        assert_eq!(
            restricted_names.matching_components(b".github\xff").count(),
            0
        );
    }

    #[test]
    fn empty_path_restricts_nothing() {
        assert_eq!(
            RestrictedNames::from_paths(&["/".to_owned(), String::new()])
                .paths
                .len(),
            0
        );
    }
}
