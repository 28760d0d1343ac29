//! MCP clients: the path of each client's configuration file, and its format of a server entry.

use std::path::PathBuf;

use clap::ValueEnum;
use serde_json::{Value, json};

use super::edit;

/// Name of the server in a client's file.
pub const NAME: &str = "palisade";

/// Tool timeout for Codex, in seconds. Its default of one minute is too short: a command may
/// take five minutes or more.
const CODEX_TOOL_TIMEOUT: i64 = 600;

/// An MCP client that can be configured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum McpClient {
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
pub struct ServerEntry {
    command: String,
    arguments: Vec<String>,
}

impl ServerEntry {
    /// The server with this command line. A client that opens several folders at once names the
    /// folder in an argument.
    pub fn new(client: McpClient, mut words: Vec<String>) -> Self {
        if matches!(client, McpClient::Cursor | McpClient::Vscode) {
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

impl McpClient {
    /// The client's name.
    pub const fn name(self) -> &'static str {
        match self {
            McpClient::Claude => "claude",
            McpClient::Codex => "codex",
            McpClient::Gemini => "gemini",
            McpClient::Cursor => "cursor",
            McpClient::Vscode => "vscode",
            McpClient::Zed => "zed",
        }
    }

    /// The client's file in the operator's home directory.
    pub fn user_file(self, env: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
        let absolute = |name: &str| env(name).filter(|path| path.is_absolute());
        let home = absolute("HOME");
        let config =
            absolute("XDG_CONFIG_HOME").or_else(|| home.as_ref().map(|home| home.join(".config")));
        Some(match self {
            McpClient::Claude => absolute("CLAUDE_CONFIG_DIR").or(home)?.join(".claude.json"),
            McpClient::Codex => absolute("CODEX_HOME")
                .or_else(|| home.map(|home| home.join(".codex")))?
                .join("config.toml"),
            McpClient::Gemini => absolute("GEMINI_CLI_HOME")
                .or(home)?
                .join(".gemini/settings.json"),
            McpClient::Cursor => home?.join(".cursor/mcp.json"),
            McpClient::Vscode => config?.join("Code/User/mcp.json"),
            McpClient::Zed => config?.join("zed/settings.json"),
        })
    }

    /// The client's file in a repository, as path components.
    pub const fn project_file(self) -> &'static [&'static str] {
        match self {
            McpClient::Claude => &[".mcp.json"],
            McpClient::Codex => &[".codex", "config.toml"],
            McpClient::Gemini => &[".gemini", "settings.json"],
            McpClient::Cursor => &[".cursor", "mcp.json"],
            McpClient::Vscode => &[".vscode", "mcp.json"],
            McpClient::Zed => &[".zed", "settings.json"],
        }
    }

    /// The file's text with the server entry added.
    pub fn edit(self, text: &str, server: &ServerEntry) -> Result<String, String> {
        match self {
            McpClient::Codex => edit::toml(
                text,
                &["mcp_servers", NAME],
                &server.command,
                &server.arguments,
                CODEX_TOOL_TIMEOUT,
            ),
            McpClient::Claude => edit::json(text, &["mcpServers", NAME], &self.entry(server)),
            McpClient::Gemini | McpClient::Cursor => {
                edit::json(text, &["mcpServers", NAME], &self.entry(server))
            }
            McpClient::Vscode => edit::json(text, &["servers", NAME], &self.entry(server)),
            McpClient::Zed => edit::json(text, &["context_servers", NAME], &self.entry(server)),
        }
    }

    fn entry(self, server: &ServerEntry) -> Value {
        let ServerEntry { command, arguments } = server;
        match self {
            McpClient::Claude | McpClient::Vscode => {
                json!({ "type": "stdio", "command": command, "args": arguments })
            }
            McpClient::Zed => json!({ "command": command, "args": arguments, "env": {} }),
            McpClient::Codex | McpClient::Gemini | McpClient::Cursor => {
                json!({ "command": command, "args": arguments })
            }
        }
    }
}
