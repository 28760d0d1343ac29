//! The clients: where each keeps its servers, and how it writes one down.

use std::path::PathBuf;

use clap::ValueEnum;
use serde_json::{Value, json};

use super::edit;

/// What the server is called in a client's file.
pub const NAME: &str = "palisade";

/// Codex gives up on a call after a minute; a command may take five, or as long as it is given.
const CODEX_PATIENCE: i64 = 600;

/// A client that can be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Client {
    /// Claude Code
    Claude,
    /// Codex
    Codex,
    /// Gemini CLI
    Gemini,
    /// Cursor
    Cursor,
    /// Visual Studio Code
    Vscode,
    /// Zed
    Zed,
}

/// The program and its arguments, as a client's configuration names them.
pub struct Server {
    command: String,
    arguments: Vec<String>,
}

impl Server {
    /// The server that is started with these words. A client that opens several folders at
    /// once says which one it means.
    pub fn new(client: Client, mut words: Vec<String>) -> Self {
        if matches!(client, Client::Cursor | Client::Vscode) {
            words.push("--directory".to_owned());
            words.push("${workspaceFolder}".to_owned());
        }
        let mut words = words.into_iter();
        Self {
            command: words.next().unwrap_or_default(),
            arguments: words.collect(),
        }
    }
}

impl Client {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Client::Claude => "claude",
            Client::Codex => "codex",
            Client::Gemini => "gemini",
            Client::Cursor => "cursor",
            Client::Vscode => "vscode",
            Client::Zed => "zed",
        }
    }

    /// Its file in the operator's home.
    pub fn user_file(self, env: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
        let absolute = |name: &str| env(name).filter(|path| path.is_absolute());
        let home = absolute("HOME");
        let config =
            absolute("XDG_CONFIG_HOME").or_else(|| home.as_ref().map(|home| home.join(".config")));
        Some(match self {
            Client::Claude => absolute("CLAUDE_CONFIG_DIR").or(home)?.join(".claude.json"),
            Client::Codex => absolute("CODEX_HOME")
                .or_else(|| home.map(|home| home.join(".codex")))?
                .join("config.toml"),
            Client::Gemini => absolute("GEMINI_CLI_HOME")
                .or(home)?
                .join(".gemini/settings.json"),
            Client::Cursor => home?.join(".cursor/mcp.json"),
            Client::Vscode => config?.join("Code/User/mcp.json"),
            Client::Zed => config?.join("zed/settings.json"),
        })
    }

    /// Its file in a repository, name by name.
    pub const fn project_file(self) -> &'static [&'static str] {
        match self {
            Client::Claude => &[".mcp.json"],
            Client::Codex => &[".codex", "config.toml"],
            Client::Gemini => &[".gemini", "settings.json"],
            Client::Cursor => &[".cursor", "mcp.json"],
            Client::Vscode => &[".vscode", "mcp.json"],
            Client::Zed => &[".zed", "settings.json"],
        }
    }

    /// The file's text with the server in it.
    pub fn edit(self, text: &str, server: &Server) -> Result<String, String> {
        match self {
            Client::Codex => edit::toml(
                text,
                &["mcp_servers", NAME],
                &server.command,
                &server.arguments,
                CODEX_PATIENCE,
            ),
            Client::Claude => edit::json(text, &["mcpServers", NAME], &self.entry(server)),
            Client::Gemini | Client::Cursor => {
                edit::json(text, &["mcpServers", NAME], &self.entry(server))
            }
            Client::Vscode => edit::json(text, &["servers", NAME], &self.entry(server)),
            Client::Zed => edit::json(text, &["context_servers", NAME], &self.entry(server)),
        }
    }

    fn entry(self, server: &Server) -> Value {
        let Server { command, arguments } = server;
        match self {
            Client::Claude | Client::Vscode => {
                json!({ "type": "stdio", "command": command, "args": arguments })
            }
            Client::Zed => json!({ "command": command, "args": arguments, "env": {} }),
            Client::Codex | Client::Gemini | Client::Cursor => {
                json!({ "command": command, "args": arguments })
            }
        }
    }
}
