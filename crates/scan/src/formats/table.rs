//! The built-in rules, by provider.

use super::{FormatRule, MatchStart};

/// Part of the example token of jwt.io, which many documents contain.
const DOCUMENTED_JWT: &[&str] = &["eyJzdWIiOiIxMjM0NTY3ODkwIiwibmFtZSI6IkpvaG4gRG9lI"];

/// Texts that show that a password is only a placeholder.
const PASSWORD_PLACEHOLDERS: &[&str] = &[
    "password", "passwd", "PASSWORD", "secret", "SECRET", "changeme", "example", "xxxx", "****",
    "<", ">", "${", "{{",
];

/// Every built-in rule.
pub(super) const FORMAT_RULES: &[FormatRule] = &[
    // Cloud providers.
    FormatRule::token(
        "aws-access-key-id",
        "AWS access key id",
        &["AKIA", "ASIA", "ABIA", "ACCA"],
        r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z2-7]{16}\b",
    ),
    FormatRule::token(
        "aws-secret-access-key",
        "AWS secret access key, beside its name",
        &[
            "aws_secret",
            "AWS_SECRET",
            "awsSecret",
            "secret_access_key",
            "SECRET_ACCESS_KEY",
            "secretAccessKey",
            "SecretAccessKey",
        ],
        r#"[A-Za-z_]{6,40}["'`]?\s{0,4}[:=,>]{1,2}\s{0,4}["'`]?([A-Za-z0-9/+]{40})(?:[^A-Za-z0-9/+=]|$)"#,
    )
    .start(MatchStart::Keyword)
    .entropy(4.0),
    FormatRule::token(
        "google-api-key",
        "Google API key",
        &["AIza"],
        r"AIza[A-Za-z0-9_-]{35}(?:[^A-Za-z0-9_-]|$)",
    ),
    FormatRule::token(
        "google-oauth-client-secret",
        "Google OAuth client secret",
        &["GOCSPX-"],
        r"GOCSPX-[A-Za-z0-9_-]{28}",
    ),
    FormatRule::token(
        "google-service-account",
        "Google service account key file",
        &["\"service_account\""],
        r#""service_account"[\s\S]{0,600}?"private_key_id"\s{0,4}:\s{0,4}"([0-9a-f]{40})""#,
    )
    .max_len(800),
    FormatRule::token(
        "azure-storage-key",
        "Azure connection string with its key",
        &["AccountKey=", "SharedAccessKey="],
        r"(?:AccountKey=([A-Za-z0-9+/]{86}==)|SharedAccessKey=[A-Za-z0-9+/]{43}=)",
    ),
    FormatRule::token(
        "digitalocean-token",
        "DigitalOcean token",
        &["dop_v1_", "doo_v1_", "dor_v1_"],
        r"do[opr]_v1_[a-f0-9]{64}\b",
    ),
    // Git hosting.
    FormatRule::token(
        "github-token",
        "GitHub token: classic, OAuth, app or refresh",
        &["ghp_", "gho_", "ghu_", "ghs_", "ghr_"],
        r"gh[pousr]_[A-Za-z0-9]{36,251}",
    ),
    FormatRule::token(
        "github-fine-grained-token",
        "GitHub fine-grained token",
        &["github_pat_"],
        r"github_pat_[A-Za-z0-9]{22}_[A-Za-z0-9]{59}",
    ),
    FormatRule::token(
        "gitlab-token",
        "GitLab token: personal, deploy, runner, trigger or job",
        &["glpat-", "gldt-", "glrt-", "glptt-", "glcbt-"],
        r"gl(?:pat|dt|rt|ptt|cbt)-[A-Za-z0-9_.-]{20,}",
    ),
    FormatRule::token(
        "atlassian-token",
        "Atlassian API token",
        &["ATATT3"],
        r"ATATT3[A-Za-z0-9_=-]{100,}",
    ),
    // Package and image registries.
    FormatRule::token("npm-token", "npm token", &["npm_"], r"npm_[A-Za-z0-9]{36}\b"),
    FormatRule::token(
        "pypi-token",
        "PyPI token",
        &["pypi-AgE"],
        r"pypi-AgE[A-Za-z0-9_-]{50,}",
    ),
    FormatRule::token(
        "crates-io-token",
        "crates.io token",
        &["cio"],
        r"cio[A-Za-z0-9]{32}\b",
    ),
    FormatRule::token(
        "rubygems-token",
        "RubyGems token",
        &["rubygems_"],
        r"rubygems_[a-f0-9]{48}\b",
    ),
    FormatRule::token(
        "docker-hub-token",
        "Docker Hub token",
        &["dckr_pat_", "dckr_oat_"],
        r"dckr_[po]at_[A-Za-z0-9_-]{27,}",
    ),
    // Model providers.
    FormatRule::token(
        "openai-key",
        "OpenAI key",
        &["sk-"],
        r"sk-(?:(?:proj|svcacct|admin)-[A-Za-z0-9_-]{40,}|[A-Za-z0-9]{20}T3BlbkFJ[A-Za-z0-9]{20}\b|[A-Za-z0-9]{48}\b)",
    )
    .entropy(3.5),
    FormatRule::token(
        "anthropic-key",
        "Anthropic key",
        &["sk-"],
        r"sk-ant-[a-z]{3,8}[0-9]{2}-[A-Za-z0-9_-]{80,}",
    )
    .entropy(3.5),
    FormatRule::token(
        "huggingface-token",
        "Hugging Face token",
        &["hf_"],
        r"hf_[A-Za-z0-9]{34}\b",
    )
    .entropy(3.5),
    // Chat, mail and telephony.
    FormatRule::token(
        "slack-token",
        "Slack token",
        &["xox", "xapp-"],
        r"(?:xox[abeoprs]-[0-9]{8,}-[A-Za-z0-9-]{10,}|xapp-[0-9]-[A-Z0-9]{8,}-[0-9]{8,}-[a-f0-9]{32,})",
    ),
    FormatRule::token(
        "slack-webhook",
        "Slack webhook",
        &["hooks.slack.com/"],
        r"hooks\.slack\.com/(?:services|workflows|triggers)/[A-Za-z0-9+/]{40,60}",
    ),
    FormatRule::token(
        "discord-token",
        "Discord bot token, beside its name",
        &["discord", "Discord", "DISCORD"],
        r#"[A-Za-z_.-]{7,40}["'`]?\s{0,4}[:=,>( ]{1,3}\s{0,4}["'`]?(?:Bot )?([MNO][A-Za-z0-9_-]{23,27}\.[A-Za-z0-9_-]{6}\.[A-Za-z0-9_-]{27,40})"#,
    )
    .start(MatchStart::Keyword)
    .entropy(4.0),
    FormatRule::token(
        "discord-webhook",
        "Discord webhook",
        &["discord"],
        r"discord(?:app)?\.com/api/webhooks/[0-9]{17,20}/[A-Za-z0-9_-]{60,72}",
    ),
    FormatRule::token(
        "telegram-token",
        "Telegram bot token",
        &[":AA"],
        r"[0-9]{8,10}:AA[A-Za-z0-9_-]{33}(?:[^A-Za-z0-9_-]|$)",
    )
    .start(MatchStart::Back(|byte| byte.is_ascii_digit(), 10))
    .max_len(40),
    FormatRule::token(
        "sendgrid-key",
        "SendGrid key",
        &["SG."],
        r"SG\.[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}",
    ),
    FormatRule::token(
        "twilio-key",
        "Twilio key or token, beside its name",
        &["twilio", "Twilio", "TWILIO"],
        r#"[A-Za-z_.-]{6,40}["'`]?\s{0,4}[:=,>( ]{1,3}\s{0,4}["'`]?((?:SK)?[0-9a-f]{32})\b"#,
    )
    .start(MatchStart::Keyword),
    // Payment and e-commerce.
    FormatRule::token(
        "stripe-key",
        "Stripe live key",
        &["sk_live_", "rk_live_"],
        r"[sr]k_live_[A-Za-z0-9]{16,}",
    ),
    FormatRule::token(
        "stripe-webhook-secret",
        "Stripe webhook secret",
        &["whsec_"],
        r"whsec_[A-Za-z0-9]{32,}",
    ),
    FormatRule::token(
        "shopify-token",
        "Shopify token",
        &["shpat_", "shpca_", "shppa_", "shpss_"],
        r"shp(?:at|ca|pa|ss)_[a-fA-F0-9]{32}\b",
    ),
    // Infrastructure.
    FormatRule::token(
        "vault-token",
        "HashiCorp Vault token",
        &["hvs.", "hvb."],
        r"hv[sb]\.[A-Za-z0-9_-]{90,}",
    ),
    FormatRule::token(
        "grafana-token",
        "Grafana service account token",
        &["glsa_"],
        r"glsa_[A-Za-z0-9]{32}_[a-f0-9]{8}\b",
    ),
    // Keys and tokens without a provider.
    FormatRule::token(
        "private-key",
        "private key in PEM: RSA, EC, DSA, PKCS #8, OpenSSH, PGP",
        &["-----BEGIN "],
        r"-----BEGIN (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----[\s\S]{0,200}?([A-Za-z0-9+/]{40})",
    )
    .max_len(400),
    FormatRule::token(
        "putty-private-key",
        "private key of PuTTY",
        &["PuTTY-User-Key-File-"],
        r"PuTTY-User-Key-File-[0-9]: [a-z0-9-]{3,40}\r?\nEncryption: [a-z0-9-]{4,20}\r?\n",
    ),
    FormatRule::token(
        "age-secret-key",
        "secret key of age",
        &["AGE-SECRET-KEY-1"],
        r"AGE-SECRET-KEY-1[02-9AC-HJ-NP-Z]{58}",
    ),
    FormatRule::token(
        "jwt",
        "signed JSON web token",
        &["eyJ"],
        r"eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{20,}",
    )
    .start(MatchStart::Token)
    .max_len(4096)
    .excluded(DOCUMENTED_JWT),
    FormatRule::token(
        "password-in-url",
        "URL or connection string with a password",
        &["://"],
        r#"(?:https?|ftps?|sftp|ssh|smtps?|ldaps?|postgres(?:ql)?|mysql|mariadb|mssql|sqlserver|mongodb(?:\+srv)?|rediss?|amqps?|nats|clickhouse)(?:\+[a-z0-9]{1,16})?://[^\s:/@"'`<>]{0,64}:([^\s:/@"'`<>$]{8,128})@[A-Za-z0-9\[]"#,
    )
    .start(MatchStart::Back(
        |byte| byte.is_ascii_alphanumeric() || byte == b'+',
        28,
    ))
    .max_len(260)
    .excluded(PASSWORD_PLACEHOLDERS),
];
