//! Which changed paths would run something, or steer a tool, on the operator's machine.

use super::names::quote;

/// A path that wants a yes before it comes home.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Steering {
    /// The path.
    pub path: Vec<u8>,
    /// What it does, in a few words.
    pub why: &'static str,
}

impl std::fmt::Display for Steering {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", quote(&self.path), self.why)
    }
}

/// A directory of this name, anywhere.
const DIRECTORIES: &[(&str, &str)] = &[
    (".vscode", "editor tasks and settings"),
    (".idea", "editor tasks and settings"),
    (".devcontainer", "runs when an editor opens the folder"),
    (".claude", "steers a coding agent"),
    (".codex", "steers a coding agent"),
    (".cursor", "steers a coding agent"),
    (".gemini", "steers a coding agent"),
    (".github", "runs in CI"),
    (".circleci", "runs in CI"),
    (".husky", "git hooks"),
    (".githooks", "git hooks"),
    ("githooks", "git hooks"),
    (".cargo", "steers cargo"),
];

/// A file of this name, anywhere.
const FILES: &[(&str, &str)] = &[
    (".palisade.yaml", "steers Palisade"),
    (".palisade.yml", "steers Palisade"),
    (".envrc", "runs when a shell enters the directory"),
    (".mcp.json", "starts tool servers"),
    ("claude.md", "steers a coding agent"),
    ("agents.md", "steers a coding agent"),
    ("gemini.md", "steers a coding agent"),
    (".cursorrules", "steers a coding agent"),
    (".gitattributes", "chooses filters and merge drivers"),
    (".gitmodules", "names other repositories"),
    (".gitconfig", "steers git"),
    (".lfsconfig", "steers git"),
    (".gitlab-ci.yml", "runs in CI"),
    (".pre-commit-config.yaml", "git hooks"),
    ("lefthook.yml", "git hooks"),
    ("package.json", "package scripts"),
    (".npmrc", "steers a package manager"),
    (".yarnrc", "steers a package manager"),
    (".yarnrc.yml", "steers a package manager"),
    (".pnpmfile.cjs", "steers a package manager"),
    ("composer.json", "package scripts"),
    ("setup.py", "package scripts"),
    ("build.rs", "runs when the package is built"),
];

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

/// The paths among these that run or steer tools, whatever their case: some file systems
/// do not tell `.VSCode` from `.vscode`.
pub fn steering<'a>(paths: impl IntoIterator<Item = &'a [u8]>) -> Vec<Steering> {
    let judged = paths.into_iter().map(|path| (path, judge(path)));
    judged
        .filter_map(|(path, why)| {
            Some(Steering {
                path: path.to_vec(),
                why: why?,
            })
        })
        .collect()
}

/// What a path runs or steers, in a few words.
pub(crate) fn judge(path: &[u8]) -> Option<&'static str> {
    let lower = path.to_ascii_lowercase();
    let mut names: Vec<&[u8]> = lower.split(|b| *b == b'/').collect();
    let file = names.pop()?;
    let found = |table: &[(&str, &'static str)], name: &[u8]| {
        let row = table.iter().find(|(known, _)| known.as_bytes() == name);
        row.map(|(_, why)| *why)
    };
    // A link or a file in the place of a directory steers as well.
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
    fn what_steers_is_listed_and_the_rest_is_not() {
        let steers = [
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
        let found = steering(steers.iter().map(|path| path.as_bytes()));
        assert_eq!(found.len(), steers.len(), "{found:?}");
        let harmless = [
            "src/main.rs",
            "src/hooks/use_state.ts",
            "package.json.md",
            "github/x",
        ];
        let found = steering(harmless.iter().map(|path| path.as_bytes()));
        assert_eq!(found, []);
        let shown = steering([b".vscode/\x1b[2J".as_slice()]);
        assert_eq!(
            shown.first().map(ToString::to_string).as_deref(),
            Some("\".vscode/\\033[2J\" (editor tasks and settings)")
        );
    }
}
