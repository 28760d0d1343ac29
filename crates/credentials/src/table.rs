//! The credential table: the built-in rows and the operator's.
//!
//! An operator's row replaces the built-in row of the same name. Endpoints that create credentials
//! are refused for every row of their host.

use std::sync::Arc;

use config::Secret;
use config::leaf::{AuthScheme, SecretSource};
use config::section::credentials::{CredentialRow, CredentialsSection};
use http::header::{AUTHORIZATION, COOKIE, HeaderName, PROXY_AUTHORIZATION};
use policy::allowlist::Target;
use policy::endpoint::{EndpointRule, EndpointRules, MethodSet, PathPattern};
use policy::host::Host;

use crate::builtin::{self, BuiltinRow, BuiltinScheme, BuiltinUse};
use crate::placeholder::Shape;

/// One row: the hosts that receive a credential, and how a request carries it.
#[derive(Clone, Debug, PartialEq)]
pub struct TableRow {
    /// Name of the credential in grants, audit records and messages.
    pub name: String,
    /// The only hosts that receive the credential.
    pub hosts: Vec<Host>,
    /// Endpoints that get the credential (`allow`), and endpoints that create credentials, to
    /// which requests are refused (`deny`).
    pub endpoints: EndpointRules,
    /// Where the value is read from, in the order of preference.
    pub uses: Vec<CredentialUse>,
    /// Headers that only the gate writes: those of a client are removed.
    pub owned_headers: Vec<HeaderName>,
    /// Query parameters in which a client may send the credential.
    pub query: Vec<String>,
    /// Cookies in which a client may send the credential.
    pub cookies: Vec<String>,
    /// Fields of a JSON or form body in which a client may send the credential.
    pub fields: Vec<String>,
    /// Headers that are sent with the credential.
    pub extra_headers: Vec<(HeaderName, Secret)>,
    /// Whether requests are sent without a credential if none is configured.
    pub anonymous: bool,
}

/// One source of a row's credential, with the header that carries its value.
#[derive(Clone, Debug, PartialEq)]
pub struct CredentialUse {
    /// Where the value is read from.
    pub source: SecretSource,
    /// The header that carries the value.
    pub header: HeaderName,
    /// The format of the header's value.
    pub scheme: AuthScheme,
    /// The shape of the placeholder.
    pub shape: Shape,
    /// The variables that hold the placeholder in a sandbox.
    pub variables: Vec<String>,
}

/// All rows of one configuration.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CredentialTable {
    rows: Vec<Arc<TableRow>>,
}

impl CredentialTable {
    /// The built-in rows and those of the operator.
    pub fn new(section: &CredentialsSection) -> Self {
        let configured = |name: &str| section.rows.iter().any(|row| row.name == name);
        let builtin = builtin::ROWS.iter().filter(|row| !configured(row.name));
        let operator = section.rows.iter().filter_map(operator_row);
        Self {
            rows: builtin
                .map(builtin_row)
                .chain(operator)
                .map(Arc::new)
                .collect(),
        }
    }

    /// Every row.
    pub fn rows(&self) -> &[Arc<TableRow>] {
        &self.rows
    }

    /// The row called `name`.
    pub fn row(&self, name: &str) -> Option<&Arc<TableRow>> {
        self.rows.iter().find(|row| row.name == name)
    }

    /// The rows of `granted` that have `host`.
    pub fn granted_for<'a>(
        &'a self,
        host: &'a Host,
        granted: &'a [String],
    ) -> impl Iterator<Item = &'a Arc<TableRow>> {
        let rows = granted.iter().filter_map(|name| self.row(name));
        rows.filter(move |row| row.hosts.contains(host))
    }
}

impl TableRow {
    /// Whether requests to `target` get the credential.
    pub fn covers(&self, target: &Target) -> bool {
        let endpoints = &self.endpoints;
        endpoints.check_allow(&target.method, &target.path).is_ok()
    }

    /// The rule by which `target` creates credentials, if it does.
    pub fn minting_rule(&self, target: &Target) -> Option<&EndpointRule> {
        self.endpoints.find_deny(&target.method, &target.path)
    }
}

fn builtin_row(row: &BuiltinRow) -> TableRow {
    let uses: Vec<CredentialUse> = row.uses.iter().map(builtin_use).collect();
    TableRow {
        name: row.name.to_owned(),
        hosts: hosts(row.hosts),
        endpoints: EndpointRules {
            allow: rules(row.endpoints),
            deny: rules(row.minting),
        },
        owned_headers: owned_headers(uses.iter().map(|one| &one.header)),
        uses,
        query: owned(row.query),
        cookies: Vec::new(),
        fields: owned(row.fields),
        extra_headers: Vec::new(),
        anonymous: row.anonymous,
    }
}

fn builtin_use(one: &BuiltinUse) -> CredentialUse {
    CredentialUse {
        source: SecretSource::Env(one.variable.to_owned()),
        header: HeaderName::from_static(one.header),
        scheme: match one.scheme {
            BuiltinScheme::Bearer => AuthScheme::Bearer,
            BuiltinScheme::Raw => AuthScheme::Raw,
            BuiltinScheme::Basic(user) => AuthScheme::Basic(user.to_owned()),
        },
        shape: one.shape,
        variables: owned(one.inside),
    }
}

/// The operator's row. Its header name is valid: the configuration was checked.
fn operator_row(row: &CredentialRow) -> Option<TableRow> {
    let header = HeaderName::try_from(row.header.as_str()).ok()?;
    let builtin = builtin::ROWS.iter().find(|known| known.name == row.name);
    let builtin_use = builtin.and_then(|known| known.uses.first());
    let mut variables: Vec<String> = row.variable.iter().cloned().collect();
    if variables.is_empty() {
        variables = builtin_use.map_or_else(Vec::new, |one| owned(one.inside));
    }
    let extra_headers: Vec<(HeaderName, Secret)> = row
        .extra_headers
        .iter()
        .filter_map(|(name, value)| Some((HeaderName::try_from(name).ok()?, value.clone())))
        .collect();
    let same_host = builtin::ROWS
        .iter()
        .filter(|known| known.hosts.contains(&row.host.to_string().as_str()));
    let minting = same_host.flat_map(|known| rules(known.minting)).collect();
    let named = std::iter::once(&header).chain(extra_headers.iter().map(|(name, _)| name));
    Some(TableRow {
        name: row.name.clone(),
        hosts: vec![row.host.clone()],
        endpoints: EndpointRules {
            allow: row.paths.iter().map(|one| one.rule.clone()).collect(),
            deny: minting,
        },
        owned_headers: owned_headers(named),
        uses: vec![CredentialUse {
            source: row.source.clone(),
            header: header.clone(),
            scheme: row.scheme.clone(),
            shape: builtin_use.map_or(Shape::UNKNOWN, |one| one.shape),
            variables,
        }],
        query: row.query.iter().cloned().collect(),
        cookies: row.cookie.iter().cloned().collect(),
        fields: row.body_field.iter().cloned().collect(),
        extra_headers,
        anonymous: row.anonymous,
    })
}

/// The named headers and `Authorization`: an upstream that accepts a credential in another header
/// usually accepts one there, too. `Cookie` is not owned as a whole.
fn owned_headers<'a>(named: impl Iterator<Item = &'a HeaderName>) -> Vec<HeaderName> {
    let mut all = vec![AUTHORIZATION, PROXY_AUTHORIZATION];
    for name in named.filter(|name| **name != COOKIE) {
        if !all.contains(name) {
            all.push(name.clone());
        }
    }
    all
}

fn owned(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

/// Built-in host names, which are valid.
fn hosts(names: &[&str]) -> Vec<Host> {
    let parsed = names.iter().filter_map(|name| Host::parse(name).ok());
    parsed.collect()
}

/// Built-in endpoints, which are valid.
fn rules(texts: &[&str]) -> Vec<EndpointRule> {
    let parsed = texts.iter().filter_map(|text| {
        let (method, path) = match text.split_once(' ') {
            Some((method, path)) => (Some(method), path),
            None => (None, *text),
        };
        Some(EndpointRule {
            methods: MethodSet::parse(method).ok()?,
            paths: vec![PathPattern::parse(path).ok()?],
        })
    });
    parsed.collect()
}

#[cfg(test)]
mod tests {
    use policy::endpoint::Method;
    use policy::id::SandboxId;
    use policy::path::CleanPath;

    use config::section::credentials::BUILTIN_ROWS;

    use super::*;

    fn target(method: &str, host: &str, path: &str) -> Target {
        Target {
            sandbox: SandboxId::parse("a").unwrap(),
            method: Method::parse(method).unwrap(),
            host: Host::parse(host).unwrap(),
            port: 443,
            path: CleanPath::parse(path).unwrap(),
            program: None,
        }
    }

    fn table(rows: &str) -> CredentialTable {
        let section: CredentialsSection = serde_json::from_str(rows).unwrap();
        CredentialTable::new(&section)
    }

    #[test]
    fn every_builtin_host_endpoint_and_header_is_valid() {
        let table = CredentialTable::new(&CredentialsSection::default());
        let names: Vec<&str> = table.rows().iter().map(|row| row.name.as_str()).collect();
        assert_eq!(names, BUILTIN_ROWS);
        for (row, builtin) in table.rows().iter().zip(builtin::ROWS) {
            assert_eq!(row.hosts.len(), builtin.hosts.len(), "{}", row.name);
            assert_eq!(row.endpoints.allow.len(), builtin.endpoints.len());
            assert_eq!(row.endpoints.deny.len(), builtin.minting.len());
            assert!(!row.uses.is_empty(), "{}", row.name);
        }
    }

    #[test]
    fn git_row_covers_only_paths_of_git() {
        let table = CredentialTable::new(&CredentialsSection::default());
        let row = table.row("github-git").unwrap();
        for path in [
            "/o/r/info/refs?service=git-upload-pack",
            "/o/r.git/info/refs",
        ] {
            assert!(row.covers(&target("GET", "github.com", path)), "{path}");
        }
        assert!(row.covers(&target("POST", "github.com", "/o/r/git-receive-pack")));
        for path in ["/o/r", "/login", "/o/r/settings"] {
            assert!(!row.covers(&target("GET", "github.com", path)), "{path}");
        }
    }

    #[test]
    fn endpoints_that_create_credentials_are_found_for_every_row_of_their_host() {
        let row = r#"{"rows": [{"name": "mine", "host": "api.github.com", "source": "env:MINE"}]}"#;
        let table = table(row);
        for name in ["github", "mine"] {
            let row = table.row(name).unwrap();
            let minting = |method, path| {
                let target = target(method, "api.github.com", path);
                row.minting_rule(&target).is_some()
            };
            assert!(minting("POST", "/repos/o/r/keys"), "{name}");
            assert!(minting(
                "POST",
                "/repos/o/r/actions/runners/registration-token"
            ));
            assert!(!minting("GET", "/repos/o/r/keys"), "{name}");
            assert!(!minting("POST", "/repos/o/r/pulls"), "{name}");
        }
    }

    #[test]
    fn operator_row_replaces_the_builtin_row_of_its_name() {
        let table = table(
            r#"{"rows": [{
                "name": "anthropic", "host": "llm.example", "header": "X-Key", "scheme": "raw",
                "source": "command:pass show key", "extra_headers": {"X-Team": "blue"}
            }]}"#,
        );
        let row = table.row("anthropic").unwrap();
        assert_eq!(row.hosts, [Host::parse("llm.example").unwrap()]);
        let one = &row.uses[0];
        assert_eq!(one.variables, ["ANTHROPIC_API_KEY"]);
        assert_eq!(
            one.shape,
            Shape::Token {
                prefix: "sk-ant-api03-",
                length: 95
            }
        );
        let names: Vec<&str> = row.owned_headers.iter().map(HeaderName::as_str).collect();
        assert_eq!(
            names,
            ["authorization", "proxy-authorization", "x-key", "x-team"]
        );
        let granted = ["anthropic".to_owned(), "openai".to_owned()];
        let host = Host::parse("api.anthropic.com").unwrap();
        assert_eq!(table.granted_for(&host, &granted).count(), 0);
        let host = Host::parse("llm.example").unwrap();
        assert_eq!(table.granted_for(&host, &granted).count(), 1);
    }
}
