//! Environment variables of every process in the sandbox.

use crate::contract::SandboxConfig;

/// The operator's variables that are passed to the sandbox, in addition to `LC_*`.
const PASSED_VARIABLES: &[&str] = &["COLORTERM", "LANG", "TERM", "TZ"];

/// The sandbox's default variables.
const DEFAULT_VARIABLES: &[(&str, &str)] = &[
    (
        "PATH",
        "/home/agent/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    ),
    ("HOME", "/home/agent"),
    ("USER", "agent"),
    ("LOGNAME", "agent"),
    ("SHELL", "/bin/sh"),
];

/// The gate's proxy, for programs that use one. Other programs reach the gate transparently.
const PROXY: &str = "http://palisade.internal:8080";

/// Hosts that are reached without the proxy.
const NO_PROXY: &str = "localhost,127.0.0.1,::1";

/// The bundle of all certificates.
const BUNDLE_PATH: &str = "/etc/ssl/certs/ca-certificates.crt";
/// The gate's certificate alone, for programs that have built-in certificates and can add others.
const ROOT_CERTIFICATE: &str = "/etc/palisade/ca.pem";

/// Variables for the proxy and the certificates, set if the gate's root is trusted. Each is for a
/// program that does not read the system's bundle or the other variables.
const GATE_VARIABLES: &[(&str, &str)] = &[
    ("HTTP_PROXY", PROXY),
    ("HTTPS_PROXY", PROXY),
    ("http_proxy", PROXY),
    ("https_proxy", PROXY),
    ("NO_PROXY", NO_PROXY),
    ("no_proxy", NO_PROXY),
    // Node's fetch() reads the proxy variables only with this setting.
    ("NODE_USE_ENV_PROXY", "1"),
    ("SSL_CERT_FILE", BUNDLE_PATH),
    ("SSL_CERT_DIR", "/etc/ssl/certs"),
    ("CURL_CA_BUNDLE", BUNDLE_PATH),
    ("REQUESTS_CA_BUNDLE", BUNDLE_PATH),
    ("PIP_CERT", BUNDLE_PATH),
    ("GIT_SSL_CAINFO", BUNDLE_PATH),
    ("CARGO_HTTP_CAINFO", BUNDLE_PATH),
    ("AWS_CA_BUNDLE", BUNDLE_PATH),
    ("NODE_EXTRA_CA_CERTS", ROOT_CERTIFICATE),
    ("DENO_CERT", ROOT_CERTIFICATE),
];

/// The variable for Java. It is set only if Java is installed, because Java prints a notice about
/// it to the error output.
const JAVA_VARIABLE: (&str, &str) = (
    "JAVA_TOOL_OPTIONS",
    "-Djavax.net.ssl.trustStore=/etc/palisade/truststore.jks -Djavax.net.ssl.trustStoreType=JKS",
);

/// Builds the environment: default variables, those for the gate, some of the operator's, and
/// configured ones. Later ones win.
pub(super) fn environment(
    operator: impl Iterator<Item = (String, String)>,
    config: &SandboxConfig,
) -> Vec<(String, String)> {
    let account = config.system.root.then_some("root");
    let account = account.into_iter().flat_map(|name| {
        ["USER", "LOGNAME"].map(|variable| (variable.to_owned(), name.to_owned()))
    });
    let passed_on = operator
        .filter(|(name, _)| PASSED_VARIABLES.contains(&name.as_str()) || name.starts_with("LC_"));
    let gate = GATE_VARIABLES.iter().filter(|_| config.trust.is_some());
    DEFAULT_VARIABLES
        .iter()
        .chain(gate)
        .map(|&(name, value)| (name.to_owned(), value.to_owned()))
        .chain(account)
        .chain(passed_on)
        .chain(config.environment.iter().cloned())
        .collect()
}

/// Adds Java's options, unless the configuration sets them.
pub(super) fn add_java(environment: &mut Vec<(String, String)>) {
    let (name, value) = JAVA_VARIABLE;
    let is_configured = environment.iter().any(|(known, _)| known == name);
    if !is_configured {
        environment.push((name.to_owned(), value.to_owned()));
    }
}

#[cfg(test)]
mod tests {
    use policy::id::SandboxId;

    use super::*;

    #[test]
    fn only_listed_operator_variables_are_passed() {
        let operator = [
            ("TERM", "xterm"),
            ("LC_ALL", "C.UTF-8"),
            ("AWS_SECRET_ACCESS_KEY", "no"),
            ("PATH", "/operator/bin"),
            ("HOME", "/home/operator"),
            ("LD_PRELOAD", "no"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()));
        let config = SandboxConfig {
            id: SandboxId::parse("one").unwrap(),
            name: crate::name::Slug::from_name("one").unwrap(),
            environment: vec![("CI".to_owned(), "1".to_owned())],
            ports: crate::contract::GatePorts::default(),
            limits: crate::contract::SandboxLimits::default(),
            system: crate::contract::SystemConfig::default(),
            trust: None,
            setup_command: None,
        };
        let names: Vec<_> = environment(operator.into_iter(), &config)
            .into_iter()
            .map(|(name, value)| format!("{name}={value}"))
            .filter(|line| !line.starts_with("PATH=/home/agent"))
            .collect();
        assert_eq!(
            names,
            [
                "HOME=/home/agent",
                "USER=agent",
                "LOGNAME=agent",
                "SHELL=/bin/sh",
                "TERM=xterm",
                "LC_ALL=C.UTF-8",
                "CI=1"
            ]
        );
    }

    #[test]
    fn gate_variables_are_set_if_its_root_is_trusted() {
        let trust = crate::contract::Trust {
            root: String::new(),
            hash: 0,
        };
        let config = SandboxConfig {
            id: SandboxId::parse("one").unwrap(),
            name: crate::name::Slug::from_name("one").unwrap(),
            environment: vec![("NO_PROXY".to_owned(), "mine".to_owned())],
            ports: crate::contract::GatePorts::default(),
            limits: crate::contract::SandboxLimits::default(),
            system: crate::contract::SystemConfig::default(),
            trust: Some(trust),
            setup_command: None,
        };
        let mut all = environment(std::iter::empty(), &config);
        let value = |all: &[(String, String)], wanted: &str| {
            let found = all.iter().rfind(|(name, _)| name == wanted);
            found.map(|(_, value)| value.clone())
        };
        assert_eq!(value(&all, "https_proxy").as_deref(), Some(PROXY));
        assert_eq!(value(&all, "NO_PROXY").as_deref(), Some("mine"));
        assert_eq!(value(&all, "JAVA_TOOL_OPTIONS"), None);
        add_java(&mut all);
        let java = value(&all, "JAVA_TOOL_OPTIONS").unwrap();
        assert!(java.contains("/etc/palisade/truststore.jks"), "{java}");
        all.push(("JAVA_TOOL_OPTIONS".to_owned(), "mine".to_owned()));
        add_java(&mut all);
        assert_eq!(value(&all, "JAVA_TOOL_OPTIONS").as_deref(), Some("mine"));
    }
}
