//! Reason codes: stable identifiers of why a request was refused or failed.

use serde::{Deserialize, Serialize};

macro_rules! reasons {
    ($($variant:ident = $code:literal, $text:literal;)*) => {
        /// Why something was refused, or why it failed ([`Reason::is_failure`]).
        ///
        /// The codes are an interface: dashboards, tests and agents match on them.
        /// Codes are added, never renamed, and have the same meaning in every protocol.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum Reason {
            $(#[doc = $text] #[serde(rename = $code)] $variant,)*
        }

        impl Reason {
            /// Every reason, in the order of the list.
            pub const ALL: &[Reason] = &[$(Reason::$variant,)*];

            /// The code as it appears in responses, logs and audit records.
            pub const fn code(self) -> &'static str {
                match self { $(Reason::$variant => $code,)* }
            }

            /// The default message.
            pub const fn description(self) -> &'static str {
                match self { $(Reason::$variant => $text,)* }
            }
        }
    };
}

reasons! {
    IdentityUnknown = "identity_unknown", "No sandbox is registered for this source.";
    IdentityMismatch = "identity_mismatch", "The claimed container is not the registered one.";
    IdentityExpired = "identity_expired", "The registration has expired.";
    RegistryUnavailable = "registry_unavailable", "The registry cannot be read.";
    RateLimited = "rate_limited", "Too many requests in too short a time.";
    CircuitOpen = "circuit_open", "The upstream failed too often: its circuit breaker is open.";
    HostDenied = "host_denied", "No rule allows this host.";
    PortDenied = "port_denied", "No rule allows this port on this host.";
    MethodDenied = "method_denied", "No rule allows this method here.";
    PathDenied = "path_denied", "No rule allows this path here.";
    ProgramDenied = "program_denied", "No rule allows this program here.";
    GithubRule = "github_rule", "A built-in rule for the GitHub API refuses this.";
    RegoDenied = "rego_denied", "A policy bundle refuses this.";
    RegoError = "rego_error", "A policy bundle could not decide.";
    AskDenied = "ask_denied", "The operator denied this.";
    AskTimeout = "ask_timeout", "The operator did not answer in time.";
    AskUnattended = "ask_unattended", "No operator is available to approve this.";
    NameMismatch = "name_mismatch", "The names in the tunnel, the TLS hello and the request differ.";
    Framing = "framing", "The message's framing is ambiguous.";
    BadName = "bad_name", "The host name or path is malformed.";
    IpLiteral = "ip_literal", "An address was used where a name is required.";
    AddressClass = "address_class", "The name resolves to an address that the gate never connects to.";
    TlsClient = "tls_client", "The TLS handshake with the client failed.";
    TlsDistrusted = "tls_distrusted", "The client does not trust the gate's certificate.";
    NotTls = "not_tls", "The connection begins neither with TLS nor with HTTP.";
    ClientTimeout = "client_timeout", "The client did not send a request in time.";
    ClientLeft = "client_left", "The client disconnected before it sent a request.";
    TlsUpstream = "tls_upstream", "The TLS handshake with the upstream failed.";
    ConnectFailed = "connect_failed", "The upstream could not be reached.";
    UpstreamTimeout = "upstream_timeout", "The upstream did not answer in time.";
    TooLarge = "too_large", "The message is larger than a rule allows.";
    GitRepo = "git_repo", "The sandbox is not registered for this repository.";
    GitDelete = "git_delete", "Refs must not be deleted.";
    GitProtected = "git_protected", "The ref is protected.";
    GitNamespace = "git_namespace", "Refs outside the allowed namespaces must not be pushed.";
    GitPath = "git_path", "The push changes a restricted path.";
    GitSize = "git_size", "The push is too large.";
    GitRate = "git_rate", "Too many pushes in too short a time.";
    GitMalformed = "git_malformed", "The push could not be parsed.";
    SecretFound = "secret_found", "A secret was found in outgoing content.";
    Canary = "canary", "A canary token was found in outgoing content.";
    ScanBudget = "scan_budget", "The content could not be scanned within its budget.";
    Injection = "injection", "The content contains instructions to the agent.";
    PlaceholderMisused = "placeholder_misused", "A credential placeholder was used where it is not allowed.";
    CredentialMissing = "credential_missing", "No credential is configured for this provider.";
    CredentialEndpoint = "credential_endpoint", "This endpoint creates credentials.";
    CredentialForeign = "credential_foreign", "The request carries a credential that is not the sandbox's.";
    DnsType = "dns_type", "This DNS record type is not answered.";
    ToolDenied = "tool_denied", "No rule allows this tool.";
    ToolChanged = "tool_changed", "The tool's definition changed since it was approved.";
    Internal = "internal", "The check itself failed.";
}

impl Reason {
    /// Whether this is a failure and not a refusal: the client disconnected, or the upstream
    /// failed after the rules had allowed the request. The audit record of a failure does not
    /// have the verdict `deny`, and metrics do not count it as a refusal.
    pub const fn is_failure(self) -> bool {
        matches!(
            self,
            Reason::ClientLeft
                | Reason::TlsUpstream
                | Reason::ConnectFailed
                | Reason::UpstreamTimeout
        )
    }
}

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.code())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn codes_are_unique_words_and_equal_their_serialised_form() {
        let mut seen = HashSet::new();
        for reason in Reason::ALL {
            let code = reason.code();
            assert!(seen.insert(code), "{code} appears twice");
            assert!(
                code.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'),
                "{code}"
            );
            assert_eq!(
                serde_json::to_string(reason).unwrap(),
                format!("\"{code}\"")
            );
        }
        assert_eq!(seen.len(), 51);
    }
}
