//! `credentials`: the credentials that the gate adds to requests, by host.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use policy::host::Host;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::leaf::{self, AuthScheme, HeaderName, SecretSource, Slug, Text};
use crate::secret::Secret;

/// Credentials that the gate adds, in addition to the built-in rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CredentialsSection {
    /// Names of the rows that a new sandbox may use, as far as they have a value when the sandbox is
    /// created.
    #[schemars(with = "Vec<Text<Slug>>")]
    pub default: Vec<String>,
    /// What happens to a value in the place of a credential that is neither the sandbox's
    /// placeholder nor a token that the host gave the sandbox.
    pub foreign: ForeignCredentialAction,
    /// How long the output of a `command:` source is used before the command runs again.
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<Duration>")]
    pub command_lifetime: Duration,
    /// Additional rows. A row with the name of a built-in row replaces it.
    pub rows: Vec<CredentialRow>,
    /// A GitHub App whose installation tokens are used instead of GITHUB_TOKEN.
    pub github_app: Option<GithubApp>,
    /// Files in which tools store OAuth tokens.
    pub oauth: OauthFiles,
}

impl Default for CredentialsSection {
    fn default() -> Self {
        Self {
            default: ["anthropic", "openai", "github", "github-git"]
                .map(str::to_owned)
                .into(),
            foreign: ForeignCredentialAction::Replace,
            command_lifetime: Duration::from_secs(15 * 60),
            rows: Vec::new(),
            github_app: None,
            oauth: OauthFiles::default(),
        }
    }
}

/// What happens to a credential of a client that is not the sandbox's placeholder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ForeignCredentialAction {
    /// The gate replaces it by the row's credential, and notes it in the audit record.
    Replace,
    /// The gate refuses the request.
    Refuse,
}

/// The names of the built-in rows.
pub const BUILTIN_ROWS: [&str; 9] = [
    "anthropic",
    "openai",
    "gemini",
    "github",
    "github-git",
    "tavily",
    "semanticscholar",
    "perplexity",
    "zai",
];

/// One credential and the host that receives it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CredentialRow {
    /// Name of the credential in grants, placeholders and audit records.
    #[schemars(with = "Text<Slug>")]
    pub name: String,
    /// The only host that receives the credential.
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<Host>")]
    pub host: Host,
    /// The request header that carries the credential.
    #[serde(default = "authorization")]
    #[schemars(with = "Text<HeaderName>")]
    pub header: String,
    /// Format of the header's value: `Bearer`, `Basic:USER` or `raw`.
    #[serde(default = "bearer", with = "leaf::scalar")]
    #[schemars(with = "Text<AuthScheme>")]
    pub scheme: AuthScheme,
    /// Where the value is read from: `env:NAME`, `file:PATH` or `command:LINE`.
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<SecretSource>")]
    pub source: SecretSource,
    /// Endpoints that the credential may be used for, each `METHOD /path`; all if empty.
    #[serde(default, with = "leaf::list")]
    #[schemars(with = "Vec<Text<leaf::Endpoint>>")]
    pub paths: Vec<leaf::Endpoint>,
    /// Further headers to send with the credential. Their values are treated as secrets.
    #[serde(default)]
    #[schemars(with = "leaf::KeyedMap<HeaderName, Secret>")]
    pub extra_headers: BTreeMap<String, Secret>,
    /// Field of a JSON or form body in which a client may send the credential.
    #[serde(default)]
    pub body_field: Option<String>,
    /// Query parameter in which a client may send the credential.
    #[serde(default)]
    pub query: Option<String>,
    /// Cookie in which a client may send the credential.
    #[serde(default)]
    pub cookie: Option<String>,
    /// Environment variable that holds the placeholder in a sandbox.
    #[serde(default)]
    #[schemars(with = "Option<Text<leaf::EnvName>>")]
    pub variable: Option<String>,
    /// Send the request without the credential if it is missing, instead of refusing the request.
    #[serde(default)]
    pub anonymous: bool,
}

fn authorization() -> String {
    "Authorization".to_owned()
}

fn bearer() -> AuthScheme {
    AuthScheme::Bearer
}

/// A GitHub App.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GithubApp {
    /// ID of the App.
    pub app_id: u64,
    /// ID of the installation.
    pub installation_id: u64,
    /// Where the App's private key (PEM) is read from: `env:NAME`, `file:PATH` or `command:LINE`.
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<SecretSource>")]
    pub key: SecretSource,
}

/// Token files that the gate reads and refreshes, by tool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct OauthFiles {
    /// Token file of Claude Code.
    pub claude: Option<OauthFile>,
    /// Token file of Codex.
    pub codex: Option<OauthFile>,
    /// Token file of Gemini.
    pub gemini: Option<OauthFile>,
    /// Token file of opencode.
    pub opencode: Option<OauthFile>,
}

/// The token file of one tool.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OauthFile {
    /// Path of the file; `~/` is the operator's home directory.
    #[serde(with = "leaf::scalar")]
    #[schemars(with = "Text<PathBuf>")]
    pub file: PathBuf,
}
