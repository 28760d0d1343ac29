//! `credentials`: which host gets which credential from where.

use std::collections::BTreeMap;
use std::path::PathBuf;

use policy::host::Host;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::leaf::{self, AuthScheme, HeaderName, SecretSource, Slug, Text};
use crate::secret::Secret;

/// Credentials, beside the built-in rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CredentialsSection {
    /// Rows a new sandbox may use.
    #[schemars(with = "Vec<Text<Slug>>")]
    pub default: Vec<String>,
    /// Rows of your own.
    pub rows: Vec<CredentialRow>,
    /// A GitHub App whose installation tokens are used instead of GITHUB_TOKEN.
    pub github_app: Option<GithubApp>,
    /// Files in which tools keep OAuth tokens.
    pub oauth: OauthFiles,
}

impl Default for CredentialsSection {
    fn default() -> Self {
        Self {
            default: ["anthropic", "openai", "github"].map(str::to_owned).into(),
            rows: Vec::new(),
            github_app: None,
            oauth: OauthFiles::default(),
        }
    }
}

/// One credential and where it goes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CredentialRow {
    /// Its name in grants, placeholders and audit records.
    #[schemars(with = "Text<Slug>")]
    pub name: String,
    /// The one host it is sent to.
    #[serde(with = "leaf::one")]
    #[schemars(with = "Text<Host>")]
    pub host: Host,
    /// The header that carries it.
    #[serde(default = "authorization")]
    #[schemars(with = "Text<HeaderName>")]
    pub header: String,
    /// How it stands there: `Bearer`, `Basic:USER` or `raw`.
    #[serde(default = "bearer", with = "leaf::one")]
    #[schemars(with = "Text<AuthScheme>")]
    pub scheme: AuthScheme,
    /// Where the value comes from: `env:NAME`, `file:PATH` or `command:LINE`.
    #[serde(with = "leaf::one")]
    #[schemars(with = "Text<SecretSource>")]
    pub source: SecretSource,
    /// The endpoints it may be used for, each `METHOD /path`; none means all.
    #[serde(default, with = "leaf::list")]
    #[schemars(with = "Vec<Text<leaf::Endpoint>>")]
    pub paths: Vec<leaf::Endpoint>,
    /// Headers that are sent along with it. Their values are kept as secrets.
    #[serde(default)]
    #[schemars(with = "leaf::Keyed<HeaderName, Secret>")]
    pub extra_headers: BTreeMap<String, Secret>,
    /// Field of a JSON body that carries it too.
    #[serde(default)]
    pub body_field: Option<String>,
    /// Go on without it when it is missing, instead of refusing.
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
    /// The App's id.
    pub app_id: u64,
    /// The installation's id.
    pub installation_id: u64,
    /// Where its private key (PEM) comes from.
    #[serde(with = "leaf::one")]
    #[schemars(with = "Text<SecretSource>")]
    pub key: SecretSource,
}

/// Token files that the gate reads and refreshes, by tool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct OauthFiles {
    /// Claude Code.
    pub claude: Option<OauthFile>,
    /// Codex.
    pub codex: Option<OauthFile>,
    /// Gemini.
    pub gemini: Option<OauthFile>,
    /// opencode.
    pub opencode: Option<OauthFile>,
}

/// Where one tool keeps its tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OauthFile {
    /// The file; `~/` is the operator's home.
    #[serde(with = "leaf::one")]
    #[schemars(with = "Text<PathBuf>")]
    pub file: PathBuf,
}
