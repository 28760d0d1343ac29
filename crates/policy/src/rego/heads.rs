//! The rules a bundle declares, with where they stand.
//!
//! The library keeps its syntax tree to itself. Rules begin at the start of a line, and the
//! library says whether a name is one.

use regorus::Engine;

use super::{BundleError, Module, check_nesting, decision, wrong};

/// One place where a rule is declared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Head {
    /// The package, with `data.` in front.
    pub(super) package: String,
    /// The rule's name.
    pub(super) name: String,
    /// The file.
    pub(super) file: String,
    /// The line, from one.
    pub(super) line: usize,
}

impl Head {
    pub(super) fn path(&self) -> String {
        format!("{}.{}", self.package, self.name)
    }

    pub(super) fn place(&self) -> String {
        format!("{}:{}", self.file, self.line)
    }
}

/// An interpreter with `modules` and `data`, strict, and the rules in it. Functions are left
/// out: they mean nothing by themselves.
pub(super) fn read(
    modules: &[Module],
    data: &serde_json::Value,
) -> Result<(Engine, Vec<Head>), BundleError> {
    if modules.is_empty() {
        return Err(BundleError::Empty);
    }
    let mut engine = Engine::new();
    let mut heads = Vec::new();
    for module in modules {
        check_nesting(module)?;
        let package = engine
            .add_policy(module.name.clone(), module.text.clone())
            .map_err(|error| wrong(&error.to_string()))?;
        let lines = module.text.lines().zip(1..);
        for (name, line) in lines.filter_map(|(text, line)| Some((name_in(text)?, line))) {
            let is_rule = engine.has_declared_rule_rooted_at(&module.name, name);
            if is_rule.unwrap_or(false) {
                heads.push(Head {
                    package: package.clone(),
                    name: name.to_owned(),
                    file: module.name.clone(),
                    line,
                });
            }
        }
    }
    let data = super::value::read(data)
        .ok_or_else(|| BundleError::Data("it is nested too deep".to_owned()))?;
    engine
        .add_data(data)
        .map_err(|error| BundleError::Data(decision::clean(&error.to_string())))?;
    engine.set_strict_builtin_errors(true);
    Ok((engine, heads))
}

/// The word a line begins with, where a rule of that name could begin there.
fn name_in(line: &str) -> Option<&str> {
    let line = line.strip_prefix("default ").unwrap_or(line);
    let end = line.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let (name, rest) = line.split_at_checked(end.unwrap_or(line.len()))?;
    let is_word = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    let is_keyword = matches!(name, "package" | "import" | "default");
    (is_word && !is_keyword && !rest.starts_with('(')).then_some(name)
}
