//! `palisade allow` and `palisade deny`: change grants.yaml, beside palisade.yaml.

use std::collections::BTreeSet;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, Result};
use clap::Args;
use config::grants::{self, GrantAction, GrantChange};
use config::{Settings, section::egress::DomainRule};
use policy::host::{Authority, HostPattern};
use serde_json::json;

use crate::cli::{Global, block_on, confirm, sandbox_lookup};
use crate::exit::{CliError, CliExit};
use crate::gate::{background, read_environment_variable};
use crate::output;
use crate::paths::Paths;

/// The text of a new palisade.yaml: grants apply only beside one.
const NEW_CONFIG: &str = "version: \"1.0\"\n";

#[derive(Debug, Args)]
pub struct GrantArgs {
    /// A host, HOST:PORT, or *.HOST for all hosts below one
    #[arg(value_name = "HOST")]
    pub host: String,
    /// Only for this sandbox, by name or id
    #[arg(
        long,
        visible_alias = "for",
        value_name = "NAME",
        conflicts_with = "always"
    )]
    pub sandbox: Option<String>,
    /// For every sandbox; the default
    #[arg(long)]
    pub always: bool,
    /// Do not ask for confirmation
    #[arg(long, short)]
    pub yes: bool,
}

/// Runs `palisade allow` or `palisade deny`.
pub fn run(action: GrantAction, args: &GrantArgs, global: &Global) -> Result<CliExit> {
    let name = match action {
        GrantAction::Allow => "allow",
        GrantAction::Deny => "deny",
    };
    change(action, args, global).with_context(|| format!("{name} failed"))
}

fn change(action: GrantAction, args: &GrantArgs, global: &Global) -> Result<CliExit> {
    let (host, port) = read_host(&args.host)?;
    let paths = global.paths()?;
    let config = paths.config.path().ok_or_else(|| {
        let message = "HOME is not set, so there is no palisade.yaml; name one with --config";
        CliError::new(CliExit::Usage, message)
    })?;
    let settings = config::load(paths.config.current(), &read_environment_variable)
        .map_err(|problems| CliError::new(CliExit::Usage, problems.to_string()))?;
    let sandbox = match &args.sandbox {
        None => None,
        Some(name) => Some(block_on(async {
            let gate = background::client(&paths, global.verbose).await?;
            Ok(sandbox_lookup::find(&gate, name).await?.id)
        })?),
    };
    if action == GrantAction::Allow {
        refuse_denied(&settings, &host, config)?;
    }
    let ports = match (action, port) {
        (_, Some(port)) => vec![port],
        (GrantAction::Allow, None) => Vec::new(),
        (GrantAction::Deny, None) => ports_of(&settings, &host),
    };
    let change = GrantChange {
        action,
        host,
        ports,
        sandbox: sandbox.as_ref().map(ToString::to_string),
    };
    let path = config.with_file_name(grants::FILE_NAME);
    let edited = grants::edit(&path, &change)
        .map_err(|error| CliError::new(CliExit::Usage, error.to_string()))?;
    let Some(edited) = edited else {
        return finish(&paths, &change, &path, false, global);
    };
    output::print_message(&format!("{}:", output::safe(&path.display().to_string())));
    for line in edited.changed_lines() {
        output::print_message(&format!("  {}", output::safe(&line)));
    }
    let whom = match &args.sandbox {
        Some(name) => format!("sandbox {}", output::safe(name)),
        None => "every sandbox".to_owned(),
    };
    confirm(&format!("Change this for {whom}?"), args.yes)?;
    create_config(config)?;
    edited.write()?;
    finish(&paths, &change, &path, true, global)
}

/// Parses HOST, HOST:PORT or *.HOST.
fn read_host(text: &str) -> Result<(HostPattern, Option<u16>)> {
    let pattern = HostPattern::parse(text);
    if let Ok(pattern) = pattern {
        return Ok((pattern, None));
    }
    let wrong = |error: &dyn std::fmt::Display| {
        let text = output::safe(text);
        let message = format!("'{text}' is not a host: {error}; write HOST, HOST:PORT or *.HOST");
        CliError::new(CliExit::Usage, message)
    };
    let (prefix, rest) = match text.strip_prefix("*.") {
        Some(rest) => ("*.", rest),
        None => ("", text),
    };
    match Authority::parse(rest) {
        Ok(Authority { host, port }) => match HostPattern::parse(&format!("{prefix}{host}")) {
            Ok(pattern) => Ok((pattern, port)),
            Err(error) => Err(wrong(&error).into()),
        },
        Err(error) => Err(wrong(&error).into()),
    }
}

/// Refuses to allow a host that another file denies: the grant would have no effect.
fn refuse_denied(settings: &Settings, host: &HostPattern, config: &Path) -> Result<()> {
    let grants = config.with_file_name(grants::FILE_NAME);
    let origin = settings.domains.iter().find_map(|domain| {
        let denies =
            domain.rule.deny.iter().any(denies_everything) && domain.rule.programs.is_empty();
        let covers = domain.rule.host.covers(host);
        let here = domain.origin.to_string();
        let is_grant = here.starts_with(&format!("{}:", grants.display()));
        (denies && covers && !(is_grant && domain.rule.host == *host)).then_some(here)
    });
    match origin {
        None => Ok(()),
        Some(origin) => {
            let message = format!(
                "{host} is denied by a rule, which wins over grants: {}; remove that rule first",
                output::safe(&origin)
            );
            Err(CliError::new(CliExit::Usage, message).into())
        }
    }
}

fn denies_everything(deny: &config::section::egress::DenyRule) -> bool {
    deny.methods.is_empty() && deny.paths.is_empty()
}

/// The ports on which some rule allows the host; none for the default ports. A deny rule names them
/// all, because a rule applies to its ports only.
fn ports_of(settings: &Settings, host: &HostPattern) -> Vec<u16> {
    let touches = |rule: &&DomainRule| rule.host.covers(host) || host.covers(&rule.host);
    let rules = settings.domains.iter().map(|domain| &domain.rule);
    let rules = rules.chain(settings.sandbox_domains.values().flatten());
    let named: BTreeSet<u16> = rules
        .filter(touches)
        .flat_map(|rule| rule.ports.iter().copied())
        .filter(|port| !policy::allowlist::DEFAULT_PORTS.contains(port))
        .collect();
    if named.is_empty() {
        return Vec::new();
    }
    let default = policy::allowlist::DEFAULT_PORTS.into_iter();
    default.chain(named).collect()
}

/// Creates an empty palisade.yaml at the default path, if there is none.
fn create_config(path: &Path) -> Result<()> {
    if path.symlink_metadata().is_ok() {
        return Ok(());
    }
    let failed = || format!("cannot create {}", path.display());
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).with_context(failed)?;
    }
    let mut file = std::fs::File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .with_context(failed)?;
    file.write_all(NEW_CONFIG.as_bytes()).with_context(failed)
}

/// Has a running gate read the file, and prints the result.
fn finish(
    paths: &Paths,
    change: &GrantChange,
    path: &Path,
    changed: bool,
    global: &Global,
) -> Result<CliExit> {
    let running = changed && block_on(async { Ok(background::report(paths).await.is_ok()) })?;
    if running {
        block_on(async {
            let gate = background::client(paths, global.verbose).await?;
            Ok(gate.post("/v1/config/reload", &json!({})).await?)
        })
        .with_context(|| format!("{} was written, but the gate refused it", path.display()))?;
    }
    let verb = match change.action {
        GrantAction::Allow => "allowed",
        GrantAction::Deny => "denied",
    };
    if global.json {
        output::print_json(&json!({
            "status": verb, "changed": changed, "host": change.host.to_string(),
            "ports": change.ports, "sandbox": change.sandbox, "file": path,
        }))?;
    } else {
        let already = if changed { "" } else { " already" };
        let whom = match &change.sandbox {
            Some(id) => format!("sandbox {id}"),
            None => "every sandbox".to_owned(),
        };
        output::print_line(&format!("{}{already} {verb} for {whom}", change.host))?;
    }
    Ok(CliExit::Ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_argument_may_have_a_port_or_a_wildcard() {
        for (text, expected) in [
            ("a.example", Some(("a.example", None))),
            ("a.example:8443", Some(("a.example", Some(8443)))),
            ("*.a.example", Some(("*.a.example", None))),
            ("*.a.example:8443", Some(("*.a.example", Some(8443)))),
            ("192.0.2.1:80", Some(("192.0.2.1", Some(80)))),
            ("*", None),
            ("*.com", None),
            ("https://a.example/", None),
            ("a.example:0", None),
        ] {
            let read = read_host(text)
                .ok()
                .map(|(host, port)| (host.to_string(), port));
            let expected = expected.map(|(host, port)| (host.to_owned(), port));
            assert_eq!(read, expected, "{text}");
        }
        let error = read_host("a b\u{1b}").unwrap_err().to_string();
        assert!(error.contains("write HOST, HOST:PORT or *.HOST"), "{error}");
    }
}
