//! palisade.yaml as a type: its sections, its schema, and the resolution of relative paths in it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use schemars::JsonSchema;
use serde::Deserialize;

use crate::leaf::{self, KeyedMap, SecretSource};
use crate::schema::FileSchema;
use crate::secret::Secret;
use crate::section::approvals::ApprovalsSection;
use crate::section::audit::AuditSection;
use crate::section::credentials::CredentialsSection;
use crate::section::egress::EgressSection;
use crate::section::git::GitSection;
use crate::section::logging::LoggingSection;
use crate::section::metrics::MetricsSection;
use crate::section::policies::PoliciesSection;
use crate::section::sandbox::SandboxSection;
use crate::section::scan::ScanSection;
use crate::section::server::ServerSection;
use crate::section::tools::BridgedServer;
use crate::unavailable;
use crate::version::Version;

/// The schema of the file.
pub(crate) static PALISADE: LazyLock<FileSchema> =
    LazyLock::new(|| FileSchema::for_type::<File>(unavailable::PALISADE, MOVED));

/// Top-level keys of older files, and the keys that replace them.
const MOVED: &[(&str, &str)] = &[
    ("interceptor_addr", "server.interceptor_addr"),
    ("mcp_server_addr", "server.mcp_server_addr"),
    ("shutdown_timeout", "server.shutdown_timeout"),
    ("log_level", "logging.level"),
];

/// palisade.yaml as it is deserialised.
#[derive(Clone, Default, Deserialize, JsonSchema)]
#[schemars(title = "palisade.yaml", extend("required" = ["version"]))]
#[serde(default, deny_unknown_fields)]
pub(crate) struct File {
    /// Version of the file format. The only required key.
    pub(crate) version: Version,
    /// The interceptor API and the MCP server.
    pub(crate) server: ServerSection,
    /// Policy bundles and how they are evaluated.
    pub(crate) policies: PoliciesSection,
    /// MCP servers behind the bridge.
    pub(crate) tools: Vec<BridgedServer>,
    /// Prometheus metrics, and traces.
    pub(crate) metrics: MetricsSection,
    /// The gate's log on stderr.
    pub(crate) logging: LoggingSection,
    /// Secrets by name, taken from the environment: `e2b_api_key: "${E2B_API_KEY}"`.
    #[schemars(with = "KeyedMap<leaf::Slug, Secret>")]
    pub(crate) secrets: BTreeMap<String, Secret>,
    /// Which hosts sandboxes may reach, and how.
    pub(crate) egress: EgressSection,
    /// Credentials that the gate adds to requests, in addition to the built-in rows.
    pub(crate) credentials: CredentialsSection,
    /// Git hosts, protected branches and mirrors.
    pub(crate) git: GitSection,
    /// The reaction to secrets and prompt injections that the scanner finds.
    pub(crate) scan: ScanSection,
    /// How requests wait for the operator's approval.
    pub(crate) approvals: ApprovalsSection,
    /// Backend, environment and limits of sandboxes.
    pub(crate) sandbox: SandboxSection,
    /// The log of every decision.
    pub(crate) audit: AuditSection,
}

impl File {
    /// Resolves every relative path against `base` and `~/` against the operator's home directory,
    /// so that later code does not depend on the location of the file.
    pub(crate) fn resolve_paths(&mut self, base: &Path, home: Option<&Path>) {
        let resolve = |path: &mut PathBuf| *path = resolve(path, base, home);
        let resolve_source = |source: &mut SecretSource| {
            if let SecretSource::File(path) = source {
                resolve(path);
            }
        };
        self.policies
            .bundles
            .iter_mut()
            .for_each(|b| resolve(&mut b.path));
        self.tools
            .iter_mut()
            .filter_map(|t| t.work_dir.as_mut())
            .for_each(resolve);
        self.egress.allowlist.iter_mut().for_each(resolve);
        self.egress.policy.iter_mut().for_each(resolve);
        self.egress.extra_roots.iter_mut().for_each(resolve);
        resolve(&mut self.egress.dns.resolv_conf);
        self.scan.rules.iter_mut().for_each(resolve);
        self.sandbox.host_paths.iter_mut().for_each(resolve);
        self.sandbox.rootfs.iter_mut().for_each(resolve);
        let containers = self.sandbox.remote.all_mut().iter_mut();
        containers
            .filter_map(|container| container.socket_path.as_mut())
            .for_each(resolve);
        self.audit.jsonl.iter_mut().for_each(resolve);
        let oauth = &mut self.credentials.oauth;
        let files = [
            &mut oauth.claude,
            &mut oauth.codex,
            &mut oauth.gemini,
            &mut oauth.opencode,
        ];
        files
            .into_iter()
            .flatten()
            .for_each(|f| resolve(&mut f.file));
        let app = self.credentials.github_app.iter_mut();
        app.for_each(|app| resolve_source(&mut app.key));
        let rows = self.credentials.rows.iter_mut();
        rows.for_each(|row| resolve_source(&mut row.source));
        let mirrors = self.git.mirrors.iter_mut();
        mirrors
            .filter_map(|m| m.identity.as_mut())
            .for_each(resolve_source);
    }
}

/// `path` resolved against `base`, with `~/` as the operator's home directory.
pub(crate) fn resolve(path: &Path, base: &Path, home: Option<&Path>) -> PathBuf {
    match (path.strip_prefix("~"), home) {
        (Ok(rest), Some(home)) => home.join(rest),
        (Ok(_), None) => path.to_owned(),
        // A leading `.` is removed, so that `./a` and `a` are the same path.
        _ => base.join(path.strip_prefix(".").unwrap_or(path)),
    }
}
