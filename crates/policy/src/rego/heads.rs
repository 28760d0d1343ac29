//! The rules that a bundle declares, with their locations.
//!
//! The library's syntax tree has no public interface for this. So candidates are the names at the
//! start of lines, and the library confirms whether a name is a rule.

use regorus::Engine;

use super::{BundleError, Module, check_nesting, decision, policy_error};

/// A declaration of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Head {
    /// The package, with the prefix `data.`.
    pub(super) package: String,
    /// The rule's name.
    pub(super) name: String,
    /// The file.
    pub(super) file: String,
    /// The line, starting at one.
    pub(super) line: usize,
}

impl Head {
    pub(super) fn path(&self) -> String {
        format!("{}.{}", self.package, self.name)
    }

    pub(super) fn location(&self) -> String {
        format!("{}:{}", self.file, self.line)
    }
}

/// An interpreter with `modules` and `data`, with strict errors of built-ins, and the declared
/// rules. Functions are left out, because they have no value without arguments.
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
            .map_err(|error| policy_error(&error.to_string()))?;
        let lines = module.text.lines().zip(1..);
        for (name, line) in lines.filter_map(|(text, line)| Some((rule_name_in(text)?, line))) {
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
    let data = super::value::from_json(data)
        .ok_or_else(|| BundleError::Data("it is nested too deeply".to_owned()))?;
    engine
        .add_data(data)
        .map_err(|error| BundleError::Data(decision::sanitise(&error.to_string())))?;
    engine.set_strict_builtin_errors(true);
    Ok((engine, heads))
}

/// The name at the start of a line, if a rule of that name could be declared there.
fn rule_name_in(line: &str) -> Option<&str> {
    let line = line.strip_prefix("default ").unwrap_or(line);
    let end = line.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let (name, rest) = line.split_at_checked(end.unwrap_or(line.len()))?;
    let is_word = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    let is_keyword = matches!(name, "package" | "import" | "default");
    (is_word && !is_keyword && !rest.starts_with('(')).then_some(name)
}
