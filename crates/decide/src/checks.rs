//! The table of checks: which checks each subject must pass, and why it skips the others.
//!
//! `docs/checks.md` is generated from the table. For each required cell, `tests/checks` sends a
//! subject through its real entry point and makes that check deny.

/// A check that a subject may have to pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Check {
    /// The sender is registered, and its registration has not ended.
    Identity,
    /// The rate limits of the sandbox.
    Rate,
    /// The circuit breaker of the host.
    Breaker,
    /// The limits for names below a wildcard: number, length and entropy.
    Labels,
    /// The allowlist: host, port, program, method and path.
    Allowlist,
    /// The rules for GitHub's API.
    Github,
    /// Headers that make a server use another method or path, such as `X-HTTP-Method-Override`.
    OverrideHeader,
    /// The operator's policy bundles.
    Bundles,
    /// The repository on a git host.
    Repository,
    /// Whether the mirror is configured.
    Mirror,
    /// The rate of pushes.
    PushRate,
    /// The size of a push.
    PushSize,
    /// The rules for refs.
    Refs,
    /// The objects of a push: secrets, restricted paths, rewritten history.
    Objects,
    /// The decision that a before hook stored.
    StoredDecision,
    /// The lists of tools, and their fingerprints.
    ToolList,
    /// The IP address that is dialled or returned in a DNS answer.
    Address,
}

/// The kinds of subjects of checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SubjectKind {
    /// A request that a sandbox sends.
    Request,
    /// A request of the gate itself, to read upstream's refs and objects for a push.
    OwnRequest,
    /// A CONNECT request, which opens a tunnel.
    Connect,
    /// A TLS connection to a host in `egress.passthrough`, which is relayed without decryption.
    Passthrough,
    /// A request to a mirror of a repository.
    Mirror,
    /// A git push.
    Push,
    /// A name in a DNS query that is forwarded.
    Name,
    /// A request to a tool server.
    McpCall,
    /// The answer of a tool server.
    McpResult,
    /// A request of a tool server to its client.
    McpQuestion,
}

/// Whether a subject has to pass a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requirement {
    /// The subject has to pass the check.
    Required,
    /// The subject skips the check, for this reason.
    Skipped(&'static str),
}

impl Check {
    /// Every check, in the order in which they are made.
    pub const ALL: [Check; 17] = [
        Check::Identity,
        Check::Rate,
        Check::Breaker,
        Check::StoredDecision,
        Check::ToolList,
        Check::Mirror,
        Check::Allowlist,
        Check::Github,
        Check::OverrideHeader,
        Check::PushSize,
        Check::PushRate,
        Check::Refs,
        Check::Objects,
        Check::Bundles,
        Check::Repository,
        Check::Labels,
        Check::Address,
    ];

    /// The name of the check in `docs/checks.md`.
    pub const fn name(self) -> &'static str {
        match self {
            Check::Identity => "identity",
            Check::Rate => "rate limits",
            Check::Breaker => "circuit breaker",
            Check::Labels => "names below a wildcard",
            Check::Allowlist => "allowlist",
            Check::Github => "GitHub rules",
            Check::OverrideHeader => "override headers",
            Check::Bundles => "policy bundles",
            Check::Repository => "repository",
            Check::Mirror => "mirror",
            Check::PushRate => "rate of pushes",
            Check::PushSize => "size of a push",
            Check::Refs => "rules for refs",
            Check::Objects => "objects of a push",
            Check::StoredDecision => "decision of a before hook",
            Check::ToolList => "tools and fingerprints",
            Check::Address => "addresses",
        }
    }
}

impl SubjectKind {
    /// Every kind.
    pub const ALL: [SubjectKind; 10] = [
        SubjectKind::Request,
        SubjectKind::OwnRequest,
        SubjectKind::Connect,
        SubjectKind::Passthrough,
        SubjectKind::Mirror,
        SubjectKind::Push,
        SubjectKind::Name,
        SubjectKind::McpCall,
        SubjectKind::McpResult,
        SubjectKind::McpQuestion,
    ];

    /// The name of the kind in `docs/checks.md`.
    pub const fn name(self) -> &'static str {
        match self {
            SubjectKind::Request => "request",
            SubjectKind::OwnRequest => "the gate's own request",
            SubjectKind::Connect => "CONNECT",
            SubjectKind::Passthrough => "TLS passthrough",
            SubjectKind::Mirror => "mirror",
            SubjectKind::Push => "push",
            SubjectKind::Name => "DNS name",
            SubjectKind::McpCall => "tool call",
            SubjectKind::McpResult => "tool result",
            SubjectKind::McpQuestion => "tool's question",
        }
    }
}

/// Whether `subject` has to pass `check`.
pub const fn requirement(subject: SubjectKind, check: Check) -> Requirement {
    use Requirement::{Required, Skipped};
    const CHECKED_INSIDE_TUNNEL: Requirement =
        Skipped("checked for each request inside the tunnel");
    const NOT_DECRYPTED: Requirement =
        Skipped("the content is not decrypted; the operator listed the host for passthrough");
    const NO_HTTP: Requirement = Skipped("there is no HTTP request to a host");
    const NO_PUSH: Requirement = Skipped("nothing is pushed");
    const NO_TOOL: Requirement = Skipped("no tool is called");
    const CHECKED_FOR_REQUEST: Requirement =
        Skipped("already checked for the HTTP request of the push");
    const OPERATOR_CONFIGURED_UPSTREAM: Requirement =
        Skipped("the operator configured the upstream");
    const CHECKED_FOR_CALL: Requirement = Skipped("already checked for the call");
    match (subject, check) {
        (
            SubjectKind::Request | SubjectKind::OwnRequest,
            Check::Identity
            | Check::Rate
            | Check::Breaker
            | Check::Labels
            | Check::Allowlist
            | Check::Github
            | Check::OverrideHeader
            | Check::Bundles
            | Check::Repository
            | Check::Address,
        ) => match (subject, check) {
            (SubjectKind::OwnRequest, Check::OverrideHeader | Check::Github) => {
                Skipped("the gate writes the request")
            }
            _ => Required,
        },
        (SubjectKind::Request | SubjectKind::OwnRequest, Check::Mirror) => {
            Skipped("the request goes to a host, not to a mirror")
        }
        (
            SubjectKind::Request | SubjectKind::OwnRequest,
            Check::PushRate | Check::PushSize | Check::Refs | Check::Objects,
        ) => Skipped("a push is a subject of its own"),
        (SubjectKind::Connect, Check::Identity | Check::Allowlist) => Required,
        (
            SubjectKind::Connect,
            Check::Rate
            | Check::Breaker
            | Check::Labels
            | Check::Github
            | Check::OverrideHeader
            | Check::Bundles
            | Check::Repository
            | Check::Mirror
            | Check::PushRate
            | Check::PushSize
            | Check::Refs
            | Check::Objects
            | Check::Address,
        ) => CHECKED_INSIDE_TUNNEL,
        (
            SubjectKind::Passthrough,
            Check::Identity
            | Check::Rate
            | Check::Breaker
            | Check::Labels
            | Check::Allowlist
            | Check::Bundles
            | Check::Address,
        ) => Required,
        (
            SubjectKind::Passthrough,
            Check::Github
            | Check::OverrideHeader
            | Check::Repository
            | Check::Mirror
            | Check::PushRate
            | Check::PushSize
            | Check::Refs
            | Check::Objects,
        ) => NOT_DECRYPTED,
        (SubjectKind::Mirror, Check::Identity | Check::Rate | Check::Mirror | Check::Address) => {
            Required
        }
        (
            SubjectKind::Mirror,
            Check::Breaker
            | Check::Labels
            | Check::Allowlist
            | Check::Github
            | Check::OverrideHeader
            | Check::Bundles
            | Check::Repository,
        ) => OPERATOR_CONFIGURED_UPSTREAM,
        (SubjectKind::Mirror, Check::PushRate | Check::PushSize | Check::Refs | Check::Objects) => {
            Skipped("a push is a subject of its own")
        }
        (
            SubjectKind::Push,
            Check::PushRate | Check::PushSize | Check::Refs | Check::Objects | Check::Bundles,
        ) => Required,
        (
            SubjectKind::Push,
            Check::Identity
            | Check::Rate
            | Check::Breaker
            | Check::Labels
            | Check::Allowlist
            | Check::Github
            | Check::OverrideHeader
            | Check::Repository
            | Check::Mirror
            | Check::Address,
        ) => CHECKED_FOR_REQUEST,
        (
            SubjectKind::Name,
            Check::Identity | Check::Rate | Check::Labels | Check::Allowlist | Check::Address,
        ) => Required,
        (
            SubjectKind::Name,
            Check::Breaker
            | Check::Github
            | Check::OverrideHeader
            | Check::Bundles
            | Check::Repository
            | Check::Mirror,
        ) => NO_HTTP,
        (SubjectKind::Name, Check::PushRate | Check::PushSize | Check::Refs | Check::Objects) => {
            NO_PUSH
        }
        (
            SubjectKind::McpCall,
            Check::Identity | Check::StoredDecision | Check::ToolList | Check::Bundles,
        ) => Required,
        (SubjectKind::McpResult | SubjectKind::McpQuestion, Check::Bundles) => Required,
        (
            SubjectKind::McpResult | SubjectKind::McpQuestion,
            Check::Identity | Check::StoredDecision | Check::ToolList,
        ) => CHECKED_FOR_CALL,
        (SubjectKind::McpCall | SubjectKind::McpResult | SubjectKind::McpQuestion, Check::Rate) => {
            Skipped("concurrent calls are limited; the HTTP request with the call is rate limited")
        }
        (
            SubjectKind::McpCall | SubjectKind::McpResult | SubjectKind::McpQuestion,
            Check::Breaker
            | Check::Labels
            | Check::Allowlist
            | Check::Github
            | Check::OverrideHeader
            | Check::Repository
            | Check::Mirror
            | Check::Address,
        ) => NO_HTTP,
        (
            SubjectKind::McpCall | SubjectKind::McpResult | SubjectKind::McpQuestion,
            Check::PushRate | Check::PushSize | Check::Refs | Check::Objects,
        ) => NO_PUSH,
        (
            SubjectKind::Request
            | SubjectKind::OwnRequest
            | SubjectKind::Connect
            | SubjectKind::Passthrough
            | SubjectKind::Mirror
            | SubjectKind::Push
            | SubjectKind::Name,
            Check::StoredDecision | Check::ToolList,
        ) => NO_TOOL,
    }
}

/// Renders the table as `docs/checks.md`.
pub fn document() -> String {
    let mut text = String::from(
        "# Which check applies to what\n\n\
         Generated from `crates/decide/src/checks.rs`; `just docs` updates it. A dot means that \
         the check is made; a number is the reason why the check is skipped. For each dot, the \
         test target `checks` (`tests/checks/`) sends a subject through its real entry point and \
         makes that check deny; it fails where a dot has no test.\n\n",
    );
    let mut reasons: Vec<&str> = Vec::new();
    let subjects = SubjectKind::ALL.iter();
    let names: Vec<&str> = subjects.map(|subject| subject.name()).collect();
    text.push_str(&format!("| check | {} |\n", names.join(" | ")));
    text.push_str(&format!("| --- |{}\n", " --- |".repeat(names.len())));
    for check in Check::ALL {
        let cells = SubjectKind::ALL.map(|subject| match requirement(subject, check) {
            Requirement::Required => "●".to_owned(),
            Requirement::Skipped(reason) => {
                let position = reasons.iter().position(|listed| *listed == reason);
                let index = position.unwrap_or_else(|| {
                    reasons.push(reason);
                    reasons.len() - 1
                });
                (index + 1).to_string()
            }
        });
        text.push_str(&format!("| {} | {} |\n", check.name(), cells.join(" | ")));
    }
    text.push_str(
        "\nThe allowlist is checked for a CONNECT whose client does not trust the gate's \
         certificates; other clients read the refusal inside the tunnel. DNS queries beyond the \
         rate are dropped and counted, without an audit record; names that the gate answers itself \
         pass only identity and rate limits, and the connection that follows is decided.\n\n",
    );
    for (index, reason) in reasons.iter().enumerate() {
        text.push_str(&format!("{}. {reason}\n", index + 1));
    }
    text
}

#[cfg(test)]
mod tests;
