//! The stages of the request pipeline, as records and metrics name them.

use decide::checks::Check;

/// The stages of the pipeline, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stage {
    /// Framing, names and their agreement.
    Request,
    /// The identity of the sandbox.
    Identity,
    /// The rate limits.
    Rate,
    /// The circuit breaker of the upstream.
    Breaker,
    /// The rules and policy bundles.
    Policy,
    /// The rules for git.
    Git,
    /// The credential that is added to the request.
    Credentials,
    /// The exchange with the upstream.
    Forward,
}

impl Stage {
    /// Every stage.
    pub const ALL: [Stage; 8] = [
        Stage::Request,
        Stage::Identity,
        Stage::Rate,
        Stage::Breaker,
        Stage::Policy,
        Stage::Git,
        Stage::Credentials,
        Stage::Forward,
    ];

    /// The name in records and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Stage::Request => "request",
            Stage::Identity => "identity",
            Stage::Rate => "rate",
            Stage::Breaker => "breaker",
            Stage::Policy => "policy",
            Stage::Git => "git",
            Stage::Credentials => "credentials",
            Stage::Forward => "forward",
        }
    }

    /// The stage that a check of a request belongs to.
    pub const fn of(check: Check) -> Self {
        match check {
            Check::Identity => Stage::Identity,
            Check::Rate => Stage::Rate,
            Check::Breaker => Stage::Breaker,
            Check::Labels
            | Check::Allowlist
            | Check::Github
            | Check::OverrideHeader
            | Check::Bundles
            | Check::StoredDecision
            | Check::ToolList => Stage::Policy,
            Check::Repository
            | Check::Mirror
            | Check::PushRate
            | Check::PushSize
            | Check::Refs
            | Check::Objects => Stage::Git,
            Check::Address => Stage::Forward,
        }
    }
}
