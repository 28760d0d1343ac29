//! The module graph of each crate: which top-level module uses which.
//!
//! A module is a file of `src/` and the directory of its name; uses between a module and its
//! submodules are not counted. Uses are read from the source text: `crate::name` outside
//! comments and tests.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The modules of one crate, each with the modules that it uses.
pub type Graph = BTreeMap<String, BTreeSet<String>>;

/// Cycles that are accepted, by crate: a cycle may only contain the listed modules. The cycle of
/// `sandbox` remains until the crate is split.
const ACCEPTED_CYCLES: &[(&str, &[&str])] = &[(
    "sandbox",
    &["checkpoint", "contract", "namespace", "transfer", "worker"],
)];

/// The graph of every crate that `files` belong to.
pub fn read(root: &Path, files: &[String]) -> BTreeMap<String, Graph> {
    let mut crates: BTreeMap<String, Graph> = BTreeMap::new();
    for file in files {
        let Some((name, module)) = module_of(file) else {
            continue;
        };
        let Ok(text) = std::fs::read_to_string(root.join(file)) else {
            continue;
        };
        let graph = crates.entry(name.to_owned()).or_default();
        let used = graph.entry(module.to_owned()).or_default();
        used.extend(used_modules(&text).filter(|used| used != module));
    }
    for graph in crates.values_mut() {
        // Removes items of the crate's root and macros, which are not modules.
        let modules: BTreeSet<String> = graph.keys().cloned().collect();
        for used in graph.values_mut() {
            used.retain(|name| modules.contains(name));
        }
    }
    crates
}

/// A violation for each cycle that is not accepted.
pub fn check(crates: &BTreeMap<String, Graph>) -> Vec<String> {
    let mut violations = Vec::new();
    for (name, graph) in crates {
        let is_accepted = |cycle: &[String]| {
            let mut own = ACCEPTED_CYCLES.iter().filter(|(known, _)| known == name);
            own.any(|(_, modules)| cycle.iter().all(|module| modules.contains(&&**module)))
        };
        for cycle in cycles(graph) {
            if !is_accepted(&cycle) {
                violations.push(format!(
                    "crate {name}: modules use each other in a cycle: {}",
                    cycle.join(", ")
                ));
            }
        }
    }
    violations
}

/// The graphs as text: a line for each module that uses others.
pub fn render(crates: &BTreeMap<String, Graph>) -> String {
    let mut text = String::new();
    for (name, graph) in crates {
        for (module, used) in graph.iter().filter(|(_, used)| !used.is_empty()) {
            let used: Vec<&str> = used.iter().map(String::as_str).collect();
            text.push_str(&format!("{name}::{module} -> {}\n", used.join(" ")));
        }
    }
    text
}

/// Crate and top-level module of a source file. None for roots, binaries and tests.
fn module_of(file: &str) -> Option<(&str, &str)> {
    let (name, path) = file.strip_prefix("crates/")?.split_once("/src/")?;
    let path = path.strip_suffix(".rs")?;
    let mut parts = path.split('/');
    let module = parts.next()?;
    let is_test = path.split('/').any(|part| part == "tests");
    (!is_test && !matches!(module, "lib" | "main" | "bin")).then_some((name, module))
}

/// The modules that a source text uses.
fn used_modules(text: &str) -> impl Iterator<Item = String> {
    // The tests are at the end of a file.
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    let lines = code
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    let names = lines.flat_map(|line| line.split("crate::").skip(1));
    names
        .map(|rest| {
            let is_word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
            rest.chars().take_while(|c| is_word(*c)).collect::<String>()
        })
        .filter(|name| !name.is_empty())
        .collect::<Vec<_>>()
        .into_iter()
}

/// The groups of modules in which each module uses every other, directly or indirectly.
fn cycles(graph: &Graph) -> Vec<Vec<String>> {
    let reach: BTreeMap<&str, BTreeSet<&str>> = graph
        .keys()
        .map(|from| (from.as_str(), reachable(graph, from)))
        .collect();
    let mut found: Vec<Vec<String>> = Vec::new();
    for (from, to) in &reach {
        let is_mutual = |other: &&&str| reach.get(**other).is_some_and(|back| back.contains(from));
        let group: Vec<String> = to
            .iter()
            .filter(is_mutual)
            .map(|module| (*module).to_owned())
            .collect();
        if group.len() > 1 && !found.contains(&group) {
            found.push(group);
        }
    }
    found
}

/// The modules that `from` uses, directly or indirectly.
fn reachable<'a>(graph: &'a Graph, from: &str) -> BTreeSet<&'a str> {
    let mut seen = BTreeSet::new();
    let mut todo: Vec<&str> = graph
        .get(from)
        .into_iter()
        .flatten()
        .map(String::as_str)
        .collect();
    while let Some(next) = todo.pop() {
        if seen.insert(next) {
            todo.extend(graph.get(next).into_iter().flatten().map(String::as_str));
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(edges: &[(&str, &[&str])]) -> Graph {
        let owned = |(from, to): &(&str, &[&str])| {
            let to = to.iter().map(|module| (*module).to_owned()).collect();
            ((*from).to_owned(), to)
        };
        edges.iter().map(owned).collect()
    }

    #[test]
    fn module_cycles_are_reported() {
        let straight = graph(&[("a", &["b", "c"]), ("b", &["c"]), ("c", &[])]);
        assert!(cycles(&straight).is_empty());
        let round = graph(&[("a", &["b"]), ("b", &["c"]), ("c", &["a"]), ("d", &["a"])]);
        assert_eq!(cycles(&round), [["a", "b", "c"]]);
        let crates = BTreeMap::from([("x".to_owned(), round)]);
        let violations = check(&crates);
        assert!(violations[0].ends_with("cycle: a, b, c"), "{violations:?}");
        assert_eq!(
            render(&crates),
            "x::a -> b\nx::b -> c\nx::c -> a\nx::d -> a\n"
        );
    }

    #[test]
    fn cycle_with_more_than_the_accepted_modules_is_reported() {
        let two = graph(&[("namespace", &["worker"]), ("worker", &["namespace"])]);
        assert!(check(&BTreeMap::from([("sandbox".to_owned(), two)])).is_empty());
        let more = graph(&[("namespace", &["git"]), ("git", &["namespace"])]);
        assert_eq!(
            check(&BTreeMap::from([("sandbox".to_owned(), more)])).len(),
            1
        );
    }

    #[test]
    fn module_uses_are_read_outside_comments_and_tests() {
        let text = "//! See [`crate::nothing`].\nuse crate::one::Thing;\n\
                    fn f() { crate::two::g(); crate::Root::h() }\n\
                    #[cfg(test)]\nmod tests { use crate::three; }\n";
        assert_eq!(used_modules(text).collect::<Vec<_>>(), ["one", "two"]);
    }

    #[test]
    fn submodule_counts_as_its_top_level_module() {
        for (file, expected) in [
            ("crates/egress/src/git.rs", Some(("egress", "git"))),
            ("crates/egress/src/git/receive.rs", Some(("egress", "git"))),
            ("crates/egress/src/git/tests/one.rs", None),
            ("crates/egress/src/lib.rs", None),
            ("crates/egress/tests/gate.rs", None),
            ("crates/testkit/src/bin/fixture/main.rs", None),
            ("docs/cli.md", None),
        ] {
            assert_eq!(module_of(file), expected, "{file}");
        }
    }
}
