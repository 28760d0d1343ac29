//! Names that some file system takes for a restricted one.
//!
//! A forge reads `.github/workflows` and nothing else; a runner on Windows or macOS also finds
//! it as `.GitHub`, `GITHUB~1`, `.github.` or with letters that nobody sees. Protecting more is
//! the safe side: a name that was there before is no change.

use policy::refs::is_invisible;

/// The distinct components of the restricted paths, and each path as places among them.
pub(super) struct Spelling {
    components: Vec<String>,
    pub(super) paths: Vec<Vec<usize>>,
}

impl Spelling {
    pub(super) fn of(restricted: &[String]) -> Self {
        let mut components = Vec::new();
        let mut paths = Vec::new();
        for path in restricted {
            let parts = path.split('/').filter(|part| !part.is_empty());
            let places = parts.map(|part| {
                let part = fold(part);
                components
                    .iter()
                    .position(|known| *known == part)
                    .unwrap_or_else(|| {
                        components.push(part);
                        components.len() - 1
                    })
            });
            let places: Vec<usize> = places.collect();
            if !places.is_empty() {
                paths.push(places);
            }
        }
        Self { components, paths }
    }

    /// The components that a tree's entry could mean.
    pub(super) fn meanings<'a>(&'a self, name: &'a [u8]) -> impl Iterator<Item = usize> + 'a {
        let plain = is_plain(name);
        let folded = (!plain).then(|| fold(&String::from_utf8_lossy(name)));
        self.components
            .iter()
            .enumerate()
            .filter(move |(_, component)| match &folded {
                None => component.as_bytes().eq_ignore_ascii_case(name),
                Some(folded) => {
                    folded.as_str() == component.as_str() || is_short_name(component, folded)
                }
            })
            .map(|(place, _)| place)
    }
}

/// Whether nothing but its case could make a name mean another.
fn is_plain(name: &[u8]) -> bool {
    name.iter()
        .all(|byte| byte.is_ascii_graphic() && !matches!(byte, b'~' | b':' | b'\\'))
        && name.last() != Some(&b'.')
}

/// A name as the most forgiving file system would compare it: without case, without what HFS+
/// ignores and nobody sees, without the stream and the dots and spaces at the end that NTFS
/// drops.
fn fold(name: &str) -> String {
    let stream = name.find(':').filter(|at| *at > 0);
    let name = name.get(..stream.unwrap_or(name.len())).unwrap_or(name);
    let seen: String = name.chars().filter(|c| !is_invisible(*c)).collect();
    policy::refs::fold(&seen)
        .trim_end_matches(['.', ' '])
        .to_owned()
}

/// Whether Windows could have made `name` as the short one of `component`: six letters and a
/// number, or two letters and a sum.
fn is_short_name(component: &str, name: &str) -> bool {
    let Some((front, number)) = name.split_once('~') else {
        return false;
    };
    let number = number.split('.').next().unwrap_or_default();
    if number.is_empty() || !number.bytes().all(|digit| digit.is_ascii_digit()) {
        return false;
    }
    let letters: String = component.chars().filter(|c| !". ".contains(*c)).collect();
    let is_front = !front.is_empty() && letters.starts_with(front);
    let is_sum = front.len() == 6
        && front.get(..2) == letters.get(..2)
        && front.bytes().skip(2).all(|digit| digit.is_ascii_hexdigit());
    is_front || is_sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_of_a_directory_is_known() {
        let spelling =
            Spelling::of(&[".github/workflows".to_owned(), ".github/actions".to_owned()]);
        assert_eq!(spelling.paths, [[0, 1], [0, 2]]);
        for (name, place) in [
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
            let meant: Vec<_> = spelling.meanings(name.as_bytes()).collect();
            assert_eq!(meant, [place], "{name:?}");
        }
        for name in [
            "github", ".git", ".githubs", "x.github", "GITLAB~1", "github~x", "~1", "a:b",
            "workflow",
        ] {
            let meant: Vec<_> = spelling.meanings(name.as_bytes()).collect();
            assert_eq!(meant, [0; 0], "{name:?}");
        }
        assert_eq!(spelling.meanings(b".github\xff").count(), 0);
    }

    #[test]
    fn a_path_of_nothing_restricts_nothing() {
        assert_eq!(
            Spelling::of(&["/".to_owned(), String::new()]).paths.len(),
            0
        );
    }
}
