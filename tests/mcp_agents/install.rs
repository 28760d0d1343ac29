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
fn install_writes_the_settings_file_of_every_client() {
    let fixture = AgentFixture::new();
    for (client, user, project, section) in CLIENTS {
        let file = fixture.gate_dir.path().join(user);
        let stdout = fixture.ok(&["mcp", "install", client, "--yes"]);
        assert!(
            stdout.contains(&format!("Installed for {client}")),
            "{stdout}"
        );
        let entry = &read(&file)[section]["palisade"];
        let command = entry["command"].as_str().unwrap();
        assert!(command.ends_with("/palisade"), "{entry}");
        let arguments: Vec<&str> = entry["args"]
            .as_array()
            .unwrap()
            .iter()
            .map(|argument| argument.as_str().unwrap())
            .collect();
        assert!(arguments.starts_with(&["--config"]), "{arguments:?}");
        assert!(
            arguments.contains(&"mcp") && arguments.contains(&"--state-dir"),
            "{arguments:?}"
        );
        let mode = file.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{client}");
        let stdout = fixture.ok(&["mcp", "install", client, "--yes"]);
        assert!(stdout.contains("nothing to change"), "{stdout}");

        fixture.ok(&["mcp", "install", client, "--scope", "project", "--yes"]);
        let entry = &read(&fixture.repo.path(project))[section]["palisade"];
        assert_eq!(entry["command"], "palisade");
        assert_eq!(entry["args"][0], "mcp");
        let folder = entry["args"].get(2) == Some(&json!("${workspaceFolder}"));
        assert_eq!(folder, matches!(client, "cursor" | "vscode"), "{entry}");
    }
}

#[test]
fn install_uses_the_configured_directory_of_the_client() {
    let fixture = AgentFixture::new();
    for (client, variable, file) in [
        ("claude", "CLAUDE_CONFIG_DIR", ".claude.json"),
        ("codex", "CODEX_HOME", "config.toml"),
        ("gemini", "GEMINI_CLI_HOME", ".gemini/settings.json"),
        ("vscode", "XDG_CONFIG_HOME", "Code/User/mcp.json"),
        ("zed", "XDG_CONFIG_HOME", "zed/settings.json"),
    ] {
        let moved = fixture.gate_dir.path().join(format!("moved-{client}"));
        let arguments = ["mcp", "install", client, "--yes"];
        let mut command = fixture.gate_dir.palisade(&arguments);
        let output = command.env(variable, &moved).output().unwrap();
        assert!(output.status.success(), "{}", output::stderr(&output));
        assert!(moved.join(file).is_file(), "{client}");
    }
}

#[test]
fn installed_command_starts_and_serves() {
    let fixture = AgentFixture::new();
    fixture.ok(&["mcp", "install", "gemini", "--yes"]);
    let entry =
        &read(&fixture.gate_dir.path().join(".gemini/settings.json"))["mcpServers"]["palisade"];
    let arguments: Vec<String> = std::iter::once(&entry["command"])
        .chain(entry["args"].as_array().unwrap())
        .map(|argument| argument.as_str().unwrap().to_owned())
        .collect();
    fixture.run_client_with("describe_tools", "auto", &arguments, &["descriptions"]);
}

#[test]
fn install_shows_the_change_and_keeps_other_settings() {
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
fn install_does_not_change_an_invalid_settings_file() {
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
fn install_follows_symlinks_in_home_but_not_in_the_repository() {
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
            output::stderr(&output).contains("is a symbolic link"),
            "{}",
            output::stderr(&output)
        );
    }
}
