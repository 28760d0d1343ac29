//! The built-in rows: well-known providers, the variables that hold their keys, and the endpoints
//! of theirs that create further credentials.

use crate::placeholder::Shape;

/// A built-in row, from which [`crate::table`] builds a [`TableRow`](crate::table::TableRow).
pub(crate) struct BuiltinRow {
    pub(crate) name: &'static str,
    pub(crate) hosts: &'static [&'static str],
    /// Endpoints that get the credential, each `METHOD /path`; all if empty.
    pub(crate) endpoints: &'static [&'static str],
    /// Endpoints that create credentials. Requests to them are refused.
    pub(crate) minting: &'static [&'static str],
    /// The sources, in the order of preference.
    pub(crate) uses: &'static [BuiltinUse],
    /// Query parameters in which a client may send the credential.
    pub(crate) query: &'static [&'static str],
    /// Fields of a JSON or form body in which a client may send the credential.
    pub(crate) fields: &'static [&'static str],
    /// Whether requests are sent without a credential if none is configured.
    pub(crate) anonymous: bool,
}

/// One source of a built-in row.
pub(crate) struct BuiltinUse {
    /// The variable of the operator's that holds the value.
    pub(crate) variable: &'static str,
    /// The variables that hold the placeholder in a sandbox.
    pub(crate) inside: &'static [&'static str],
    pub(crate) header: &'static str,
    pub(crate) scheme: BuiltinScheme,
    pub(crate) shape: Shape,
}

/// The format of the header's value.
pub(crate) enum BuiltinScheme {
    Bearer,
    Raw,
    Basic(&'static str),
}

const fn token(prefix: &'static str, length: usize) -> Shape {
    Shape::Token { prefix, length }
}

const fn bearer(
    variable: &'static str,
    inside: &'static [&'static str],
    shape: Shape,
) -> BuiltinUse {
    BuiltinUse {
        variable,
        inside,
        header: "authorization",
        scheme: BuiltinScheme::Bearer,
        shape,
    }
}

const fn raw(
    variable: &'static str,
    inside: &'static [&'static str],
    header: &'static str,
    shape: Shape,
) -> BuiltinUse {
    BuiltinUse {
        variable,
        inside,
        header,
        scheme: BuiltinScheme::Raw,
        shape,
    }
}

const fn git(variable: &'static str) -> BuiltinUse {
    BuiltinUse {
        variable,
        // git sends no credential by itself, and gets one.
        inside: &[],
        header: "authorization",
        scheme: BuiltinScheme::Basic("x-access-token"),
        shape: GITHUB_TOKEN,
    }
}

/// A row without further places or restrictions.
const PLAIN: BuiltinRow = BuiltinRow {
    name: "",
    hosts: &[],
    endpoints: &[],
    minting: &[],
    uses: &[],
    query: &[],
    fields: &[],
    anonymous: false,
};

const GITHUB_TOKEN: Shape = token("ghp_", 36);
const GITHUB_VARIABLES: &[&str] = &["GH_TOKEN", "GITHUB_TOKEN"];

pub(crate) const ROWS: &[BuiltinRow] = &[
    BuiltinRow {
        name: "anthropic",
        hosts: &["api.anthropic.com"],
        minting: &[
            "POST /v1/organizations/**",
            "POST /api/oauth/claude_cli/create_api_key",
        ],
        uses: &[
            raw(
                "ANTHROPIC_API_KEY",
                &["ANTHROPIC_API_KEY"],
                "x-api-key",
                token("sk-ant-api03-", 95),
            ),
            bearer(
                "CLAUDE_CODE_OAUTH_TOKEN",
                &["CLAUDE_CODE_OAUTH_TOKEN"],
                token("sk-ant-oat01-", 95),
            ),
        ],
        ..PLAIN
    },
    BuiltinRow {
        name: "openai",
        hosts: &["api.openai.com"],
        minting: &[
            "POST /v1/organization/**",
            "POST /v1/realtime/client_secrets",
            "POST /v1/realtime/sessions",
            "POST /v1/realtime/transcription_sessions",
        ],
        uses: &[bearer(
            "OPENAI_API_KEY",
            &["OPENAI_API_KEY"],
            token("sk-proj-", 64),
        )],
        ..PLAIN
    },
    BuiltinRow {
        name: "gemini",
        hosts: &[
            "generativelanguage.googleapis.com",
            "cloudcode-pa.googleapis.com",
        ],
        minting: &["POST /*/auth_tokens"],
        uses: &[
            raw(
                "GEMINI_API_KEY",
                &["GEMINI_API_KEY"],
                "x-goog-api-key",
                token("AIza", 35),
            ),
            raw(
                "GOOGLE_API_KEY",
                &["GOOGLE_API_KEY"],
                "x-goog-api-key",
                token("AIza", 35),
            ),
        ],
        query: &["key"],
        ..PLAIN
    },
    BuiltinRow {
        name: "github",
        hosts: &["api.github.com", "uploads.github.com"],
        minting: &[
            "POST /repos/*/*/keys",
            "POST /repos/*/*/actions/runners/**",
            "POST /orgs/*/actions/runners/**",
            "POST /enterprises/*/actions/runners/**",
            "POST /user/keys",
            "POST /user/gpg_keys",
            "POST /user/ssh_signing_keys",
            "POST /app/installations/*/access_tokens",
            "POST /app-manifests/*/conversions",
            "/applications/**",
            "/authorizations/**",
        ],
        uses: &[
            bearer("GITHUB_TOKEN", GITHUB_VARIABLES, GITHUB_TOKEN),
            bearer("GH_TOKEN", GITHUB_VARIABLES, GITHUB_TOKEN),
        ],
        anonymous: true,
        ..PLAIN
    },
    BuiltinRow {
        name: "github-git",
        hosts: &["github.com"],
        endpoints: &[
            "GET /*/*/info/refs",
            "POST /*/*/git-upload-pack",
            "POST /*/*/git-receive-pack",
            "/*/*/info/lfs/**",
        ],
        uses: &[git("GITHUB_TOKEN"), git("GH_TOKEN")],
        anonymous: true,
        ..PLAIN
    },
    BuiltinRow {
        name: "tavily",
        hosts: &["api.tavily.com"],
        minting: &["POST /generate-keys"],
        uses: &[bearer(
            "TAVILY_API_KEY",
            &["TAVILY_API_KEY"],
            token("tvly-", 40),
        )],
        fields: &["api_key"],
        ..PLAIN
    },
    BuiltinRow {
        name: "semanticscholar",
        hosts: &["api.semanticscholar.org"],
        uses: &[raw(
            "SEMANTIC_SCHOLAR_API_KEY",
            &["SEMANTIC_SCHOLAR_API_KEY"],
            "x-api-key",
            Shape::UNKNOWN,
        )],
        anonymous: true,
        ..PLAIN
    },
    BuiltinRow {
        name: "perplexity",
        hosts: &["api.perplexity.ai"],
        minting: &["POST /generate_auth_token"],
        uses: &[bearer(
            "PERPLEXITY_API_KEY",
            &["PERPLEXITY_API_KEY"],
            token("pplx-", 48),
        )],
        ..PLAIN
    },
    BuiltinRow {
        name: "zai",
        hosts: &["api.z.ai"],
        uses: &[raw(
            "ZAI_API_KEY",
            &["ZAI_API_KEY"],
            "x-api-key",
            Shape::UNKNOWN,
        )],
        ..PLAIN
    },
];
