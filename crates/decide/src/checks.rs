//! The table of checks: which checks each subject must pass, and why it skips the others.
//!
//! `docs/checks.md` is written from it, and `tests/checks` drives each required cell through its
//! real entry point with that check made to deny.

/// A check that something may have to pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Check {
    /// The sender is registered, and its registration has not ended.
    Identity,
    /// The rate limits of the sandbox.
    Rate,
    /// The circuit breaker of the host.
    Breaker,
    /// The budget of names below a wildcard.
    Labels,
    /// The allowlist: host, port, program, method and path.
    Allowlist,
    /// The rules for GitHub's API.
    Github,
    /// Headers that ask a server for another method or path.
    OverrideHeader,
    /// The operator's policy bundles.
    Bundles,
    /// The repository on a git host.
    Repository,
    /// The mirror is configured.
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
    /// The address that is dialled or given out.
    Address,
}

/// The kinds of subjects of checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SubjectKind {
    /// A request that a sandbox sends.
    Request,
    /// A request of the gate itself, which reads upstream's refs and objects for a push.
    OwnRequest,
    /// A tunnel.
    Connect,
    /// A TLS connection that passes unread.
    Passthrough,
    /// A mirror.
    Mirror,
    /// A push.
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
    /// The check is made.
    Required,
    /// The check is skipped, for this reason.
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

    /// Its name in documents.
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

    /// Its name in documents.
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
    const INSIDE: Requirement = Skipped("what is inside the tunnel is decided");
    const UNREAD: Requirement = Skipped("the content is not readable; the operator chose the host");
    const NO_HTTP: Requirement = Skipped("there is no HTTP request to a host");
    const NO_PUSH: Requirement = Skipped("nothing is pushed");
    const NO_TOOL: Requirement = Skipped("no tool is called");
    const ON_ITS_WAY: Requirement = Skipped("checked for the request that carries it");
    const OPERATORS: Requirement = Skipped("the operator configured the upstream");
    const CALL_PASSED: Requirement = Skipped("checked for the call");
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
            Skipped("it goes to a host")
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
        ) => INSIDE,
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
        ) => UNREAD,
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
        ) => OPERATORS,
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
        ) => ON_ITS_WAY,
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
        ) => CALL_PASSED,
        (SubjectKind::McpCall | SubjectKind::McpResult | SubjectKind::McpQuestion, Check::Rate) => {
            Skipped("calls at a time are limited; a sandbox's request with a call is rate limited")
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

/// The table as a document.
pub fn document() -> String {
    let mut text = String::from(
        "# Which check applies to what\n\n\
         Written from `crates/decide/src/checks.rs`; `just docs` brings it up to date. A dot \
         means that the check is made; a number is the reason why it is not. The test target \
         `checks` (`tests/checks/`) drives each dot through its real entry point, with that check \
         made to deny, and fails where a dot has no driver.\n\n",
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
                let known = reasons.iter().position(|known| *known == reason);
                let number = known.unwrap_or_else(|| {
                    reasons.push(reason);
                    reasons.len() - 1
                });
                (number + 1).to_string()
            }
        });
        text.push_str(&format!("| {} | {} |\n", check.name(), cells.join(" | ")));
    }
    text.push_str(
        "\nThe allowlist is checked for a CONNECT whose client does not trust the gate's \
         certificates; other clients read the refusal inside the tunnel. DNS queries beyond the \
         rate are dropped and counted, without a record; names that the gate answers itself pass \
         identity and rate alone, and the connection that follows is decided.\n\n",
    );
    for (number, reason) in reasons.iter().enumerate() {
        text.push_str(&format!("{}. {reason}\n", number + 1));
    }
    text
}

#[cfg(test)]
mod tests;
