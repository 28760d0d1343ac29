//! Finds changed paths that run programs, or configure tools, on the operator's machine.

use super::names::quote;

/// A path that needs the operator's confirmation before it is merged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SensitivePath {
    /// The path.
    pub path: Vec<u8>,
    /// A short description of the path's effect.
    pub why: &'static str,
}

impl std::fmt::Display for SensitivePath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", quote(&self.path), self.why)
    }
}

/// Names of sensitive directories at any depth.
const DIRECTORIES: &[(&str, &str)] = &[
    (".vscode", "editor tasks and settings"),
    (".idea", "editor tasks and settings"),
    (".devcontainer", "runs when an editor opens the folder"),
    (".claude", "configures a coding agent"),
    (".codex", "configures a coding agent"),
    (".cursor", "configures a coding agent"),
    (".gemini", "configures a coding agent"),
    (".github", "runs in CI"),
    (".circleci", "runs in CI"),
    (".husky", "git hooks"),
    (".githooks", "git hooks"),
    ("githooks", "git hooks"),
    (".cargo", "configures cargo"),
];

/// Names of sensitive files at any depth.
const FILES: &[(&str, &str)] = &[
    (".palisade.yaml", "configures Palisade"),
    (".palisade.yml", "configures Palisade"),
    (".envrc", "runs when a shell enters the directory"),
    (".mcp.json", "starts tool servers"),
    ("claude.md", "configures a coding agent"),
    ("agents.md", "configures a coding agent"),
    ("gemini.md", "configures a coding agent"),
    (".cursorrules", "configures a coding agent"),
    (".gitattributes", "chooses filters and merge drivers"),
    (".gitmodules", "names other repositories"),
    (".gitconfig", "configures git"),
    (".lfsconfig", "configures git"),
    (".gitlab-ci.yml", "runs in CI"),
    (".pre-commit-config.yaml", "git hooks"),
    ("lefthook.yml", "git hooks"),
    ("package.json", "package scripts"),
    (".npmrc", "configures a package manager"),
    (".yarnrc", "configures a package manager"),
    (".yarnrc.yml", "configures a package manager"),
    (".pnpmfile.cjs", "configures a package manager"),
    ("composer.json", "package scripts"),
    ("setup.py", "package scripts"),
    ("build.rs", "runs when the package is built"),
];

/// The names of git hooks.
const HOOKS: &[&str] = &[
    "applypatch-msg",
    "commit-msg",
    "fsmonitor-watchman",
    "post-checkout",
    "post-commit",
    "post-merge",
    "post-rewrite",
    "pre-applypatch",
    "pre-auto-gc",
    "pre-commit",
    "pre-merge-commit",
    "pre-push",
    "pre-rebase",
    "prepare-commit-msg",
    "sendemail-validate",
];

/// Returns the paths that run programs or configure tools. The case of names is ignored: some file
/// systems do not distinguish `.VSCode` from `.vscode`.
pub fn sensitive_paths<'a>(paths: impl IntoIterator<Item = &'a [u8]>) -> Vec<SensitivePath> {
    let checked = paths.into_iter().map(|path| (path, sensitive_reason(path)));
    checked
        .filter_map(|(path, why)| {
            Some(SensitivePath {
                path: path.to_vec(),
                why: why?,
            })
        })
        .collect()
}

/// Describes what a path runs or configures; `None` for an ordinary path.
pub(crate) fn sensitive_reason(path: &[u8]) -> Option<&'static str> {
    let lower = path.to_ascii_lowercase();
    let mut names: Vec<&[u8]> = lower.split(|b| *b == b'/').collect();
    let file = names.pop()?;
    let found = |table: &[(&str, &'static str)], name: &[u8]| {
        let row = table.iter().find(|(known, _)| known.as_bytes() == name);
        row.map(|(_, why)| *why)
    };
    // A symbolic link or a file with a sensitive directory's name counts as well.
    let directory = names
        .iter()
        .chain([&file])
        .find_map(|name| found(DIRECTORIES, name));
    let hook = names.last().is_some_and(|name| *name == b"hooks")
        && HOOKS.iter().any(|hook| hook.as_bytes() == file);
    directory
        .or_else(|| found(FILES, file))
        .or(hook.then_some("git hooks"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sensitive_paths_are_listed_and_others_are_not() {
        let sensitive = [
            ".palisade.yaml",
            ".envrc",
            "sub/.envrc",
            ".vscode/tasks.json",
            ".VSCode/tasks.json",
            ".vscode",
            ".claude/settings.json",
            ".mcp.json",
            ".github/workflows/ci.yml",
            ".gitattributes",
            "a/b/.gitattributes",
            ".gitmodules",
            ".husky/pre-commit",
            "tools/hooks/pre-commit",
            "web/package.json",
            "build.rs",
        ];
        let found = sensitive_paths(sensitive.iter().map(|path| path.as_bytes()));
        assert_eq!(found.len(), sensitive.len(), "{found:?}");
        let harmless = [
            "src/main.rs",
            "src/hooks/use_state.ts",
            "package.json.md",
            "github/x",
        ];
        let found = sensitive_paths(harmless.iter().map(|path| path.as_bytes()));
        assert_eq!(found, []);
        let shown = sensitive_paths([b".vscode/\x1b[2J".as_slice()]);
        assert_eq!(
            shown.first().map(ToString::to_string).as_deref(),
            Some("\".vscode/\\033[2J\" (editor tasks and settings)")
        );
    }
}
