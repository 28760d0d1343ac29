//! Checks across values, which no schema can express.
//!
//! The checks also run on the rest of a file with other mistakes. A check for an absent value
//! therefore looks at the file, not at the deserialised value: an invalid token has been reported
//! already, and is not missing as well.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};

use policy::github::GithubRules;

use crate::layer::Layer;
use crate::leaf::Leaf;
use crate::palisade_file::File;
use crate::presets::Preset;
use crate::problem::Problem;
use crate::section::credentials::BUILTIN_ROWS;
use crate::section::policies::ENTRYPOINTS;
use crate::section::sandbox::{Backend, SnapshotLimits};
use crate::section::tools::RuntimeKind;
use crate::tree::{Content, dotted, join};

/// Headers that frame or route a request.
const NOT_FOR_CREDENTIALS: [&str; 11] = [
    "Connection",
    "Content-Encoding",
    "Content-Length",
    "Content-Type",
    "Cookie",
    "Expect",
    "Host",
    "TE",
    "Trailer",
    "Transfer-Encoding",
    "Upgrade",
];

/// Checks palisade.yaml. A listen address without a host and without a token is changed to
/// loopback, with a warning.
pub(crate) fn check_file(
    layer: &mut Layer<File>,
    problems: &mut Vec<Problem>,
    warnings: &mut Vec<Problem>,
) {
    move_to_loopback(layer, warnings);
    let mut checker = FileChecker { layer, problems };
    checker.check_server();
    checker.check_metrics();
    checker.check_unique_names();
    checker.check_tools();
    checker.check_egress();
    checker.check_github_rules();
    checker.check_presets();
    checker.check_credentials();
    checker.check_mirrors();
    checker.check_remote_containers();
    checker.check_positive();
    checker.check_maximums();
    warn_of_short_secrets(layer, warnings);
    warn_of_unused_entrypoints(layer, warnings);
    if layer.value.metrics.tracing.is_jaeger_thrift() {
        let pointer = "/metrics/tracing/endpoint";
        let problem = layer.problem(pointer, "port 14268 is Jaeger's Thrift port");
        warnings
            .push(problem.with_hint("traces are sent to port 4318 of the same host, over OTLP"));
    }
}

/// Warns about bundles whose entrypoint the gate does not evaluate, because they look effective.
/// That is not an error: a bundle may be for `palisade policy` alone.
fn warn_of_unused_entrypoints(layer: &Layer<File>, warnings: &mut Vec<Problem>) {
    for (index, bundle) in layer.value.policies.bundles.iter().enumerate() {
        if ENTRYPOINTS.iter().any(|known| bundle.decides(known)) {
            continue;
        }
        let pointer = format!("/policies/bundles/{index}/entrypoint");
        let shown = layer.quote_value(&pointer, &bundle.entrypoint);
        let message =
            format!("the gate does not evaluate the entrypoint {shown}: the bundle has no effect");
        let hint = format!("entrypoints are {}", ENTRYPOINTS.join(", "));
        warnings.push(layer.problem(&pointer, message).with_hint(hint));
    }
}

/// Warns about secrets that the log redactor cannot remove: a value of one to three letters occurs
/// in ordinary words.
fn warn_of_short_secrets(layer: &Layer<File>, warnings: &mut Vec<Problem>) {
    const MIN_SECRET: usize = 4;
    let file = &layer.value;
    let token = file.server.auth_token.as_ref();
    let token = token.map(|token| ("/server/auth_token".to_owned(), token));
    let secrets = file.secrets.iter();
    let secrets = secrets.map(|(name, secret)| (join("/secrets", name), secret));
    for (pointer, secret) in token.into_iter().chain(secrets) {
        if (1..MIN_SECRET).contains(&secret.expose().len()) {
            let message = format!(
                "{} is shorter than {MIN_SECRET} bytes, too short to be redacted in logs",
                dotted(&pointer)
            );
            let warning = layer.problem(&pointer, message);
            warnings.push(warning.with_hint("use a longer secret"));
        }
    }
}

/// The first segments of the URL paths of hooks, tools and health.
const SERVED_PATHS: [&str; 5] = ["health", "intercept", "mcp", "message", "sse"];

/// The keys of `server` that are listen addresses.
const ADDRESS_KEYS: [&str; 3] = ["interceptor_addr", "mcp_server_addr", "single_port"];

fn address_mut<'f>(file: &'f mut File, key: &str) -> Option<&'f mut SocketAddr> {
    match key {
        "interceptor_addr" => Some(&mut file.server.interceptor_addr),
        "mcp_server_addr" => Some(&mut file.server.mcp_server_addr),
        _ => file.server.single_port.as_mut(),
    }
}

/// Whether clients need a token. An empty token counts as absent, an invalid one as present.
fn has_token(layer: &Layer<File>) -> bool {
    match &layer.value.server.auth_token {
        Some(token) => !token.is_empty(),
        None => layer.is_written("/server/auth_token"),
    }
}

/// Changes addresses such as `:8090` to loopback if there is no token. Older files, written for a
/// container's own network, contain them: they are accepted, but not reachable from outside.
fn move_to_loopback(layer: &mut Layer<File>, warnings: &mut Vec<Problem>) {
    if has_token(layer) {
        return;
    }
    for key in ADDRESS_KEYS {
        let pointer = join("/server", key);
        if !layer
            .text(&pointer)
            .is_some_and(|text| text.starts_with(':'))
        {
            continue;
        }
        let Some(address) = address_mut(&mut layer.value, key) else {
            continue;
        };
        *address = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), address.port());
        let used = match (*address, layer.variable(&pointer)) {
            (address, None) => address.to_string(),
            (address, Some(_)) => address.ip().to_string(),
        };
        let message = format!(
            "{} names no host and server.auth_token is not set: the gate listens on {used} only",
            dotted(&pointer)
        );
        let warning = layer.problem(&pointer, message);
        warnings.push(warning.with_hint(
            "set server.auth_token to listen on every address, or write a complete address",
        ));
    }
}

struct FileChecker<'a> {
    layer: &'a Layer<File>,
    problems: &'a mut Vec<Problem>,
}

impl FileChecker<'_> {
    fn report(&mut self, pointer: &str, message: impl Into<String>, hint: &str) {
        let mut problem = self.layer.problem(pointer, message);
        problem.hint = (!hint.is_empty()).then(|| hint.to_owned());
        self.problems.push(problem);
    }

    fn check_server(&mut self) {
        let file = &self.layer.value;
        let open: Vec<(&str, SocketAddr)> = ADDRESS_KEYS
            .into_iter()
            .zip([
                Some(file.server.interceptor_addr),
                Some(file.server.mcp_server_addr),
                file.server.single_port,
            ])
            .filter_map(|(key, address)| Some((key, address?)))
            .filter(|(_, address)| !address.ip().to_canonical().is_loopback())
            .collect();
        if !has_token(self.layer) {
            for (key, address) in open {
                let pointer = join("/server", key);
                let address = self.layer.display_value(&pointer, address);
                self.report(
                    &pointer,
                    format!("{} is {address}, which is not a loopback address, but server.auth_token is not set", dotted(&pointer)),
                    "set server.auth_token, or use 127.0.0.1",
                );
            }
        }
        let written = |key: &&&str| self.layer.is_written(&join("/server", key));
        let others = ["interceptor_addr", "mcp_server_addr"];
        if self.layer.is_written("/server/single_port")
            && let Some(other) = others.iter().find(written)
        {
            self.report(
                "/server/single_port",
                format!("server.single_port and server.{other} cannot both be set"),
                "remove one of them",
            );
        }
    }

    /// Refuses a metrics path that the gate already serves for another purpose.
    fn check_metrics(&mut self) {
        let path = &self.layer.value.metrics.path;
        let first = path.split('/').find(|part| !part.is_empty());
        if first.is_some_and(|first| SERVED_PATHS.contains(&first)) {
            let pointer = "/metrics/path";
            let shown = self.layer.quote_value(pointer, path);
            let message =
                format!("metrics.path is {shown}, which the gate uses for something else");
            self.report(pointer, message, "use another path, such as /metrics");
        }
    }

    fn check_unique_names(&mut self) {
        let file = &self.layer.value;
        let tools = file.tools.iter().map(|tool| tool.name.as_str());
        self.check_unique("/tools", "name", "tool", tools.enumerate());
        let bundles = file
            .policies
            .bundles
            .iter()
            .map(|bundle| bundle.id.as_str());
        self.check_unique("/policies/bundles", "id", "bundle", bundles.enumerate());
        let rows = file.credentials.rows.iter().map(|row| row.name.as_str());
        self.check_unique(
            "/credentials/rows",
            "name",
            "credential row",
            rows.enumerate(),
        );
        let mirrors = file.git.mirrors.iter().map(|mirror| mirror.name.as_str());
        self.check_unique("/git/mirrors", "name", "mirror", mirrors.enumerate());
    }

    fn check_unique<'n>(
        &mut self,
        list: &str,
        key: &str,
        kind: &str,
        names: impl Iterator<Item = (usize, &'n str)>,
    ) {
        let mut seen: HashMap<&str, usize> = HashMap::new();
        for (index, name) in names {
            let pointer = format!("{list}/{index}/{key}");
            if let Some(first) = seen.get(name) {
                let first = format!("{list}/{first}/{key}");
                // If one of the names came from a variable, the other name would reveal its value.
                let name = match self.layer.variable(&pointer) {
                    Some(_) => self.layer.quote_value(&pointer, name),
                    None => self.layer.quote_value(&first, name),
                };
                let line = self.layer.problem(&first, "").line;
                let message = format!("another {kind} is called {name} on line {line}");
                self.report(&pointer, message, "");
            } else {
                seen.insert(name, index);
            }
        }
    }

    fn check_tools(&mut self) {
        for (index, tool) in self.layer.value.tools.iter().enumerate() {
            let pointer = format!("/tools/{index}");
            let name = || {
                self.layer
                    .quote_value(&format!("/tools/{index}/name"), &tool.name)
            };
            if tool
                .command
                .first()
                .is_some_and(|program| program.trim().is_empty())
            {
                self.report(
                    &format!("{pointer}/command/0"),
                    format!("tool {} has no program to run", name()),
                    "",
                );
            }
            if tool.command.iter().any(|word| word.contains('\0')) {
                let message = format!("the command of tool {} contains U+0000", name());
                self.report(&format!("{pointer}/command"), message, "");
            }
            let template = format!("{pointer}/runtime/template");
            if tool.runtime.kind == RuntimeKind::E2b && !self.layer.is_written(&template) {
                self.report(
                    &format!("{pointer}/runtime"),
                    format!("tool {} runs in e2b but has no template", name()),
                    "add runtime.template",
                );
            }
        }
    }

    fn check_egress(&mut self) {
        for (from, to) in self.layer.value.egress.resolve.iter() {
            if to.ip().is_unspecified() || to.port() == 0 {
                // The key may be written differently from the normalised host.
                let key = self.find_written_key("/egress/resolve", from);
                let pointer = join("/egress/resolve", &key.unwrap_or_default());
                let message = format!(
                    "{} must be a specific address with a port",
                    dotted(&pointer)
                );
                self.report(
                    &pointer,
                    message,
                    "write an IP address and a port other than 0",
                );
            }
        }
        // Connections that are forwarded without decryption would bypass the rules for git.
        let file = &self.layer.value;
        for (index, pattern) in file.egress.passthrough.iter().enumerate() {
            if file.git.hosts.iter().any(|host| pattern.matches(host)) {
                let pointer = format!("/egress/passthrough/{index}");
                let message = "a host of git.hosts cannot be in egress.passthrough";
                self.report(
                    &pointer,
                    message,
                    "remove the host from one of the two lists",
                );
            }
        }
    }

    /// Reports unknown rule names, which would have no effect.
    fn check_github_rules(&mut self) {
        for (index, name) in self.layer.value.egress.github.allow.iter().enumerate() {
            let Err(unknown) = GithubRules::new(std::slice::from_ref(name), false) else {
                continue;
            };
            let pointer = format!("/egress/github/allow/{index}");
            let shown = self.layer.quote_value(&pointer, name);
            // A similar name would reveal the value of a variable.
            let near = unknown
                .suggestion
                .filter(|_| self.layer.variable(&pointer).is_none());
            let hint = match near {
                Some(near) => format!("did you mean '{near}'?"),
                None => "docs/config.md lists the rules".to_owned(),
            };
            self.report(&pointer, format!("no GitHub rule is called {shown}"), &hint);
        }
    }

    /// An unknown preset would add nothing without anyone noticing.
    fn check_presets(&mut self) {
        for (index, name) in self.layer.value.egress.presets.iter().enumerate() {
            let Err(unknown) = Preset::check_name(name) else {
                continue;
            };
            let pointer = format!("/egress/presets/{index}");
            let shown = self.layer.quote_value(&pointer, name);
            // A similar name would reveal the value of a variable.
            let near = unknown.near();
            let near = near.filter(|_| self.layer.variable(&pointer).is_none());
            let hint = match near {
                Some(near) => format!("did you mean '{near}'?"),
                None => "palisade preset list shows their names".to_owned(),
            };
            self.report(&pointer, format!("no preset is called {shown}"), &hint);
        }
    }

    /// The key of the mapping at `pointer` that parses to `wanted`, as it is written in the file.
    fn find_written_key<T: Leaf + PartialEq>(&self, pointer: &str, wanted: &T) -> Option<String> {
        let node = self.layer.tree.get(pointer)?;
        let Content::Map(entries) = &node.content else {
            return None;
        };
        let same = |text: &str| T::read(text).is_ok_and(|read| read == *wanted);
        let entry = entries.iter().find(|entry| same(&entry.key))?;
        Some(entry.key.clone())
    }

    fn check_credentials(&mut self) {
        let section = &self.layer.value.credentials;
        let named = section.rows.iter().map(|row| row.name.as_str());
        let known: Vec<&str> = BUILTIN_ROWS.into_iter().chain(named).collect();
        for (index, name) in section.default.iter().enumerate() {
            if !known.contains(&name.as_str()) {
                let pointer = format!("/credentials/default/{index}");
                let shown = self.layer.quote_value(&pointer, name);
                let hint = format!("credentials are {}", known.join(", "));
                self.report(&pointer, format!("there is no credential {shown}"), &hint);
            }
        }
        for (index, row) in self.layer.value.credentials.rows.iter().enumerate() {
            let header = (format!("/credentials/rows/{index}/header"), &row.header);
            let extra = row.extra_headers.keys().map(|name| {
                let pointer = format!("/credentials/rows/{index}/extra_headers");
                (join(&pointer, name), name)
            });
            for (pointer, name) in std::iter::once(header).chain(extra) {
                if NOT_FOR_CREDENTIALS
                    .iter()
                    .any(|other| other.eq_ignore_ascii_case(name))
                {
                    let shown = self.layer.quote_value(&pointer, name);
                    let message = format!("the header {shown} cannot carry a credential");
                    let hint = "the gate writes this header itself; a cookie is named by 'cookie'";
                    self.report(&pointer, message, hint);
                }
            }
            for (name, value) in &row.extra_headers {
                let value = value.expose();
                if value.contains(|c: char| c.is_control() && c != '\t') {
                    let pointer = format!("/credentials/rows/{index}/extra_headers");
                    let pointer = join(&pointer, name);
                    let message = format!("{} contains a control character", dotted(&pointer));
                    self.report(&pointer, message, "");
                }
            }
        }
    }

    fn check_mirrors(&mut self) {
        for (index, mirror) in self.layer.value.git.mirrors.iter().enumerate() {
            let pointer = format!("/git/mirrors/{index}");
            if mirror.is_ssh() && !self.layer.is_written(&format!("{pointer}/host_key")) {
                let name = self
                    .layer
                    .quote_value(&format!("{pointer}/name"), &mirror.name);
                self.report(
                    &pointer,
                    format!("mirror {name} uses ssh but has no host_key"),
                    "add the server's public key, as ssh-keyscan prints it",
                );
            }
        }
    }

    fn check_remote_containers(&mut self) {
        let sandbox = &self.layer.value.sandbox;
        let written = self.layer.tree.get("/sandbox/remote");
        let is_empty = match written.map(|node| &node.content) {
            None | Some(Content::Absent | Content::Null) => true,
            Some(Content::List(items)) => items.is_empty(),
            Some(_) => false,
        };
        if sandbox.backend == Backend::Remote && is_empty {
            self.report(
                "/sandbox/backend",
                "sandbox.backend is remote but sandbox.remote has no container",
                "add sandbox.remote.socket_path or sandbox.remote.tcp",
            );
        }
        // An invalid name was replaced by the default, so it is not compared with other names.
        let layer = self.layer;
        let is_as_written = |index: usize, name: &str| {
            let pointer = format!("/sandbox/remote/{index}/name");
            !layer.is_written(&pointer) || layer.text(&pointer) == Some(name)
        };
        let names = sandbox.remote.all().iter().enumerate();
        let names = names.map(|(index, container)| (index, container.name.as_str()));
        let names = names.filter(|(index, name)| is_as_written(*index, name));
        self.check_unique("/sandbox/remote", "name", "container", names);
        for (pointer, container) in sandbox.remote.with_pointers() {
            let name = dotted(&pointer);
            let socket = self.layer.is_written(&format!("{pointer}/socket_path"));
            let tcp = self.layer.is_written(&format!("{pointer}/tcp"));
            if socket == tcp {
                let message = if socket {
                    format!("{name} has two addresses, socket_path and tcp")
                } else {
                    format!("{name} has no address")
                };
                self.report(&pointer, message, "set exactly one of socket_path and tcp");
            }
            let token = container.auth.token.as_ref().map(|token| !token.is_empty());
            let written = format!("{pointer}/auth/token");
            let token = token.unwrap_or_else(|| self.layer.is_written(&written));
            if container.auth.required && !token {
                self.report(
                    &format!("{pointer}/auth/required"),
                    format!("{name}.auth.required is true but there is no token"),
                    &format!("set {name}.auth.token"),
                );
            }
        }
    }

    fn check_positive(&mut self) {
        let file = &self.layer.value;
        let timeouts = &file.egress.timeouts;
        let zero = [
            ("/policies/timeout", file.policies.timeout.is_zero()),
            ("/egress/timeouts/connect", timeouts.connect.is_zero()),
            ("/egress/timeouts/header", timeouts.header.is_zero()),
            ("/egress/timeouts/response", timeouts.response.is_zero()),
            ("/egress/timeouts/idle", timeouts.idle.is_zero()),
            ("/scan/budget/bytes", file.scan.budget.bytes == 0),
            ("/sandbox/limits/memory", file.sandbox.limits.memory == 0),
            ("/sandbox/limits/disk", file.sandbox.limits.disk == 0),
            ("/sandbox/snapshot/file", file.sandbox.snapshot.file == 0),
            ("/sandbox/snapshot/total", file.sandbox.snapshot.total == 0),
            ("/audit/max_bytes", file.audit.max_bytes == 0),
        ];
        for (pointer, is_zero) in zero {
            if is_zero {
                let message = format!("{} must be more than 0", dotted(pointer));
                self.report(pointer, message, "");
            }
        }
    }

    /// Reports sizes that a worker process cannot handle.
    fn check_maximums(&mut self) {
        let snapshot = &self.layer.value.sandbox.snapshot;
        let over = [
            (
                "/sandbox/snapshot/file",
                snapshot.file,
                SnapshotLimits::MAX_FILE,
            ),
            (
                "/sandbox/snapshot/total",
                snapshot.total,
                SnapshotLimits::MAX_TOTAL,
            ),
        ];
        for (pointer, value, most) in over {
            if value > most {
                let message = format!("{} must be at most {}", dotted(pointer), most.write());
                self.report(pointer, message, "");
            }
        }
    }
}
