//! `palisade mcp install` with a temporary home directory.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;

use serde_json::{Value, json};
use testkit::output;

use crate::agent_fixture::AgentFixture;

/// Each client: its file in a home and in a repository, and the key of the entry.
const CLIENTS: [(&str, &str, &str, &str); 6] = [
    ("claude", ".claude.json", ".mcp.json", "mcpServers"),
    (
        "codex",
        ".codex/config.toml",
        ".codex/config.toml",
        "mcp_servers",
    ),
    (
        "gemini",
        ".gemini/settings.json",
        ".gemini/settings.json",
        "mcpServers",
    ),
    (
        "cursor",
        ".cursor/mcp.json",
        ".cursor/mcp.json",
        "mcpServers",
    ),
    (
        "vscode",
        ".config/Code/User/mcp.json",
        ".vscode/mcp.json",
        "servers",
    ),
    (
        "zed",
        ".config/zed/settings.json",
        ".zed/settings.json",
        "context_servers",
    ),
];

/// A settings file, parsed as another program would.
fn read(file: &PathBuf) -> Value {
    let text = std::fs::read_to_string(file).unwrap();
    if file.extension().is_some_and(|kind| kind == "toml") {
        let script =
            "import json, sys, tomllib; print(json.dumps(tomllib.loads(sys.stdin.read())))";
        let mut command = std::process::Command::new("python3");
        command
            .args(["-c", script])
            .stdin(std::fs::File::open(file).unwrap());
        return serde_json::from_slice(&command.output().unwrap().stdout).unwrap();
    }
    serde_json::from_str(&text).unwrap()
}

#[test]
fn every_client_is_told_in_its_own_file() {
    let fixture = AgentFixture::new();
    for (client, user, project, section) in CLIENTS {
        let file = fixture.gate_dir.path().join(user);
        let said = fixture.ok(&["mcp", "install", client, "--yes"]);
        assert!(said.contains(&format!("Installed for {client}")), "{said}");
        let entry = &read(&file)[section]["palisade"];
        let command = entry["command"].as_str().unwrap();
        assert!(command.ends_with("/palisade"), "{entry}");
        let words: Vec<&str> = entry["args"]
            .as_array()
            .unwrap()
            .iter()
            .map(|word| word.as_str().unwrap())
            .collect();
        assert!(words.starts_with(&["--config"]), "{words:?}");
        assert!(
            words.contains(&"mcp") && words.contains(&"--state-dir"),
            "{words:?}"
        );
        let mode = file.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{client}");
        let said = fixture.ok(&["mcp", "install", client, "--yes"]);
        assert!(said.contains("nothing to change"), "{said}");

        fixture.ok(&["mcp", "install", client, "--scope", "project", "--yes"]);
        let entry = &read(&fixture.repo.path(project))[section]["palisade"];
        assert_eq!(entry["command"], "palisade");
        assert_eq!(entry["args"][0], "mcp");
        let folder = entry["args"].get(2) == Some(&json!("${workspaceFolder}"));
        assert_eq!(folder, matches!(client, "cursor" | "vscode"), "{entry}");
    }
}

#[test]
fn a_client_that_was_moved_is_told_where_it_is() {
    let fixture = AgentFixture::new();
    for (client, variable, file) in [
        ("claude", "CLAUDE_CONFIG_DIR", ".claude.json"),
        ("codex", "CODEX_HOME", "config.toml"),
        ("gemini", "GEMINI_CLI_HOME", ".gemini/settings.json"),
        ("vscode", "XDG_CONFIG_HOME", "Code/User/mcp.json"),
        ("zed", "XDG_CONFIG_HOME", "zed/settings.json"),
    ] {
        let moved = fixture.gate_dir.path().join(format!("moved-{client}"));
        let words = ["mcp", "install", client, "--yes"];
        let mut command = fixture.gate_dir.palisade(&words);
        let output = command.env(variable, &moved).output().unwrap();
        assert!(output.status.success(), "{}", output::stderr(&output));
        assert!(moved.join(file).is_file(), "{client}");
    }
}

#[test]
fn what_is_installed_starts_and_serves() {
    let fixture = AgentFixture::new();
    fixture.ok(&["mcp", "install", "gemini", "--yes"]);
    let entry =
        &read(&fixture.gate_dir.path().join(".gemini/settings.json"))["mcpServers"]["palisade"];
    let words: Vec<String> = std::iter::once(&entry["command"])
        .chain(entry["args"].as_array().unwrap())
        .map(|word| word.as_str().unwrap().to_owned())
        .collect();
    fixture.drive_with("describes", "auto", &words, &["describes"]);
}

#[test]
fn what_else_is_in_a_file_stays_and_the_change_is_shown_first() {
    let fixture = AgentFixture::new();
    let file = fixture.gate_dir.path().join(".config/zed/settings.json");
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    let text = "// Mine\n{\n  \"theme\": \"One Dark\", // nice\n  \"context_servers\": {\n    \"other\": { \"command\": \"x\" },\n  },\n}\n";
    std::fs::write(&file, text).unwrap();
    let mode = PermissionsExt::from_mode(0o640);
    std::fs::set_permissions(&file, mode).unwrap();

    let shown = fixture.ok(&["mcp", "install", "zed", "--print"]);
    assert!(shown.contains("+    \"palisade\": {"), "{shown}");
    assert_eq!(
        std::fs::read_to_string(&file).unwrap(),
        text,
        "--print writes nothing"
    );

    let output = fixture.run(&["mcp", "install", "zed"]);
    assert_eq!(output.status.code(), Some(2), "no terminal for the prompt");
    assert!(output::stderr(&output).contains("+    \"palisade\": {"));
    assert!(output::stderr(&output).contains("--yes"));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), text);

    fixture.ok(&["mcp", "install", "zed", "--yes"]);
    let new = std::fs::read_to_string(&file).unwrap();
    for line in text.lines() {
        assert!(new.contains(line), "{line}: {new}");
    }
    assert!(new.contains("\"palisade\""), "{new}");
    let mode = file.metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o640);
    let names: Vec<_> = std::fs::read_dir(file.parent().unwrap()).unwrap().collect();
    assert_eq!(names.len(), 1, "{names:?}");
}

#[test]
fn a_file_that_is_not_understood_is_left_alone() {
    let fixture = AgentFixture::new();
    for (client, user, _, section) in CLIENTS {
        let file = fixture.gate_dir.path().join(user);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        for text in ["{\"a\": ", "\u{0}", &format!("{{\"{section}\": 7}}")] {
            std::fs::write(&file, text).unwrap();
            let output = fixture.run(&["mcp", "install", client, "--yes"]);
            assert_eq!(output.status.code(), Some(2), "{client}: {text}");
            assert!(output::stderr(&output).contains("nothing was changed"));
            assert_eq!(std::fs::read_to_string(&file).unwrap(), text);
        }
    }
}

#[test]
fn a_link_of_the_operators_is_followed_and_one_of_the_repositorys_is_not() {
    let fixture = AgentFixture::new();
    let home = fixture.gate_dir.path();
    std::fs::write(home.join("dotfile"), "{}").unwrap();
    symlink("dotfile", home.join(".claude.json")).unwrap();
    fixture.ok(&["mcp", "install", "claude", "--yes"]);
    assert!(home.join(".claude.json").is_symlink());
    assert!(
        std::fs::read_to_string(home.join("dotfile"))
            .unwrap()
            .contains("palisade")
    );

    symlink("../dotfile", fixture.repo.path(".mcp.json")).unwrap();
    symlink("..", fixture.repo.path(".vscode")).unwrap();
    for client in ["claude", "vscode"] {
        let output = fixture.run(&["mcp", "install", client, "--scope", "project", "--yes"]);
        assert_eq!(output.status.code(), Some(2));
        assert!(
            output::stderr(&output).contains("is a link"),
            "{}",
            output::stderr(&output)
        );
    }
}
