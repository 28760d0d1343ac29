//! A policy of NVIDIA OpenShell: `network_policies`, whose rules have endpoints and programs.

use policy::endpoint::MethodSet;
use serde_json::Value;

use super::ImportError;
use super::builder::{PolicyBuilder, path};
use super::document::{Document, Item, shown};
use crate::section::egress::{DenyRule, DomainRule};

/// Keys of an endpoint that are understood or restrict nothing.
const ENDPOINT_KEYS: [&str; 9] = [
    "host",
    "port",
    "ports",
    "protocol",
    "enforcement",
    "access",
    "rules",
    "deny_rules",
    "tls",
];

pub(super) fn read(document: &Document, builder: &mut PolicyBuilder) -> Result<(), ImportError> {
    let root = document.root()?;
    let policies = root.get("network_policies")?.ok_or_else(|| {
        let message = "the file has no network policy: network_policies is missing";
        ImportError::Invalid(message.to_owned())
    })?;
    for name in policies.map()?.keys() {
        if let Some(policy) = policies.get(name)? {
            read_policy(&policy, builder)?;
        }
    }
    let other = root.other_keys(&["version", "network_policies"])?;
    builder.not_carried_over(&other, "not about the allowed hosts");
    Ok(())
}

fn read_policy(policy: &Item<'_>, builder: &mut PolicyBuilder) -> Result<(), ImportError> {
    let Some(programs) = read_programs(policy, builder)? else {
        return Ok(());
    };
    for endpoint in policy.list_at("endpoints")? {
        builder.count()?;
        for rule in read_endpoint(&endpoint, builder)? {
            builder.push(DomainRule {
                programs: programs.clone(),
                ..rule
            });
        }
    }
    let other = policy.other_keys(&["name", "endpoints", "binaries"])?;
    builder.not_carried_over(&other, "unknown");
    Ok(())
}

/// The programs of a policy, empty for all; none if no program can be carried over.
fn read_programs(
    policy: &Item<'_>,
    builder: &mut PolicyBuilder,
) -> Result<Option<Vec<String>>, ImportError> {
    let mut programs = Vec::new();
    let binaries = policy.list_at("binaries")?;
    for binary in &binaries {
        builder.count()?;
        let item = match binary.value {
            Value::String(_) => Some(binary.clone()),
            _ => binary.get("path")?,
        };
        let Some(item) = item else { continue };
        let program = item.text()?;
        if matches!(program, "*" | "**" | "/**") {
            return Ok(Some(Vec::new()));
        }
        let is_plain = program.len() <= 128
            && program.trim() == program
            && program
                .chars()
                .all(|c| c.is_ascii_graphic() && !"*?[]{}$".contains(c));
        if is_plain && !program.is_empty() {
            programs.push(program.to_owned());
        } else {
            builder.note(format!(
                "not carried over: {} {}: a pattern of programs",
                shown(&item.key),
                shown(program)
            ));
        }
    }
    if binaries.is_empty() {
        builder.note(format!(
            "wider here: {} names no program and applies to all of them",
            shown(&policy.key)
        ));
    }
    if programs.is_empty() && !binaries.is_empty() {
        builder.note(format!(
            "not carried over: {}: none of its programs can be named",
            shown(&policy.key)
        ));
        return Ok(None);
    }
    Ok(Some(programs))
}

/// The rules of an endpoint; none, with a note, if a restriction is not understood.
fn read_endpoint(
    endpoint: &Item<'_>,
    builder: &mut PolicyBuilder,
) -> Result<Vec<DomainRule>, ImportError> {
    let mut refuse = |why: String| {
        builder.note(format!("not carried over: {}: {why}", shown(&endpoint.key)));
        Ok(Vec::new())
    };
    let unknown = endpoint.other_keys(&ENDPOINT_KEYS)?;
    if !unknown.is_empty() {
        return refuse(format!("{} has no counterpart", unknown.join(", ")));
    }
    let text = |name: &str| -> Result<Option<&str>, ImportError> {
        endpoint.get(name)?.map(|item| item.text()).transpose()
    };
    let Some(host) = text("host")? else {
        return refuse("it names no host".to_owned());
    };
    let protocol = text("protocol")?.unwrap_or_default();
    if !matches!(protocol, "" | "rest" | "http") {
        return refuse(format!("protocol {}", shown(protocol)));
    }
    if text("enforcement")? == Some("audit") {
        return refuse("enforcement audit: it refuses nothing".to_owned());
    }
    if !matches!(text("tls")?, None | Some("terminate" | "auto")) {
        return refuse("its connections are not decrypted; see egress.passthrough".to_owned());
    }
    let methods: &[&str] = match text("access")? {
        None | Some("full") => &[],
        Some("read-only") => &["GET", "HEAD", "OPTIONS"],
        Some("read-write") => &["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH"],
        Some(other) => return refuse(format!("access {}", shown(other))),
    };
    let Some(ports) = read_ports(endpoint)? else {
        return refuse("a port must be a number from 1 to 65535".to_owned());
    };
    let Some(entry) = builder.host(host, &format!("{}.host", endpoint.key)) else {
        return Ok(Vec::new());
    };
    let Some(deny) = read_deny(endpoint, builder)? else {
        let key = shown(&endpoint.key);
        builder.note(format!(
            "not carried over: {key}: a deny rule is not understood"
        ));
        return Ok(Vec::new());
    };
    let base = DomainRule {
        ports: entry.port.map_or(ports, |port| vec![port]),
        methods: methods.iter().map(|name| (*name).to_owned()).collect(),
        deny,
        ..DomainRule::allow_all(entry.pattern)
    };
    let rules = endpoint.list_at("rules")?;
    if rules.is_empty() {
        return Ok(vec![base]);
    }
    let mut read = Vec::new();
    for rule in rules {
        builder.count()?;
        match read_rule(&rule, "allow")? {
            Some((methods, paths)) => read.push(DomainRule {
                methods,
                paths,
                ..base.clone()
            }),
            None => builder.note(format!(
                "not carried over: {}: only method and path are understood",
                shown(&rule.key)
            )),
        }
    }
    Ok(read)
}

/// The ports of an endpoint, empty for the default ports; none if one is invalid.
fn read_ports(endpoint: &Item<'_>) -> Result<Option<Vec<u16>>, ImportError> {
    let mut values = endpoint.list_at("ports")?;
    values.extend(endpoint.get("port")?);
    let mut ports = Vec::new();
    for value in values {
        let port = value
            .value
            .as_u64()
            .and_then(|port| u16::try_from(port).ok());
        match port.filter(|port| *port > 0) {
            Some(port) if !ports.contains(&port) => ports.push(port),
            Some(_) => {}
            None => return Ok(None),
        }
    }
    Ok(Some(ports))
}

/// The deny rules of an endpoint; none if one is not understood, because the endpoint would be wider
/// without it.
fn read_deny(
    endpoint: &Item<'_>,
    builder: &mut PolicyBuilder,
) -> Result<Option<Vec<DenyRule>>, ImportError> {
    let mut deny = Vec::new();
    for rule in endpoint.list_at("deny_rules")? {
        builder.count()?;
        match read_rule(&rule, "deny")? {
            Some((methods, paths)) => deny.push(DenyRule { methods, paths }),
            None => return Ok(None),
        }
    }
    Ok(Some(deny))
}

type MethodsAndPaths = (Vec<String>, Vec<policy::endpoint::PathPattern>);

/// Method and path of a rule, which may be below `word`; none if it has other keys.
fn read_rule(rule: &Item<'_>, word: &str) -> Result<Option<MethodsAndPaths>, ImportError> {
    let inner = rule.get(word)?;
    if inner.is_some() && !rule.other_keys(&[word])?.is_empty() {
        return Ok(None);
    }
    let rule = inner.unwrap_or_else(|| rule.clone());
    if !rule.other_keys(&["method", "path"])?.is_empty() {
        return Ok(None);
    }
    let methods = match rule.get("method")? {
        None => Vec::new(),
        Some(method) => match method.text()? {
            "*" => Vec::new(),
            method if MethodSet::parse([method]).is_ok() => vec![method.to_owned()],
            _ => return Ok(None),
        },
    };
    let paths = match rule.get("path")? {
        None => Vec::new(),
        Some(item) => match item.text()? {
            "**" | "/**" => Vec::new(),
            text => match path(text) {
                Some(pattern) => vec![pattern],
                None => return Ok(None),
            },
        },
    };
    Ok(Some((methods, paths)))
}
