//! Subjects of decisions: facts only. The caller is responsible for their truth.

use std::sync::Arc;

use config::section::git::MirrorSettings;
use http::HeaderMap;
use policy::allowlist::Target;
use policy::git_address::Address;
use policy::host::Host;
use policy::id::SandboxId;
use policy::push::{Case, Findings};
use policy::refs::RefFacts;
use policy::registration::{Registration, Repo};
use policy::verdict::{Denial, RuleName};
use serde_json::Value;

use crate::bundles::BundleSubject;

/// What is decided about.
pub enum Subject<'a> {
    /// A request, by its head.
    Request(RequestFacts<'a>),
    /// The body of a request that was allowed by its head.
    RequestBody(BodyFacts<'a>),
    /// A tunnel for a client that does not trust the gate's certificates, and could not read a
    /// refusal inside it.
    Connect(ConnectFacts<'a>),
    /// A TLS connection that passes unread.
    Passthrough(PassthroughFacts<'a>),
    /// A mirror of a repository, for fetching and pushing.
    Mirror(MirrorFacts<'a>),
    /// A push, to a host or to a mirror.
    Push(PushFacts<'a>),
    /// A name in a DNS query that would be forwarded.
    Name(&'a SandboxId, &'a Host),
    /// A request of a client to a tool server.
    McpCall(McpFacts<'a>),
    /// The answer of a tool server.
    McpResult(McpFacts<'a>),
    /// A request of a tool server to its client: sampling, elicitation, roots.
    McpQuestion(McpFacts<'a>),
}

/// Why a decision is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Something happens if it is allowed.
    Live,
    /// Something that was allowed is on its way, and the rules or a grant changed. Blocks where a
    /// policy has to be evaluated.
    Recheck,
    /// An operator wants to know; nothing happens.
    Trial,
}

/// A request, by its head.
pub struct RequestFacts<'a> {
    /// What it wants.
    pub target: Target,
    /// Whether over TLS.
    pub tls: bool,
    /// What is known beside that.
    pub head: HeadFacts<'a>,
    /// The sender's registration, where it is known.
    pub registration: Option<&'a Registration>,
}

/// What is known of a request's head beside its target.
pub enum HeadFacts<'a> {
    /// The headers.
    Headers {
        /// As the client sent them.
        received: &'a HeaderMap,
        /// As they will be sent; read by policy bundles only, and none where there is no bundle.
        sent: Option<HeaderMap>,
    },
    /// What was recorded when it was allowed.
    Recorded(&'a Recorded),
}

/// What a [`Mode::Recheck`] needs of a decision that allowed something.
#[derive(Clone, Debug, Default)]
pub struct Recorded {
    /// What the policy bundles read; none where there were none.
    pub input: Option<Arc<Value>>,
    /// The rule for GitHub's API that allowed it.
    pub github: Option<RuleName>,
}

/// A body that has to be read for a decision.
pub struct BodyFacts<'a> {
    /// What the request wants.
    pub target: &'a Target,
    /// The headers as the client sent them.
    pub headers: &'a HeaderMap,
    /// The body.
    pub body: &'a [u8],
    /// The sender's registration.
    pub registration: &'a Registration,
}

/// A tunnel that is asked for.
pub struct ConnectFacts<'a> {
    /// The sandbox.
    pub sandbox: Option<&'a SandboxId>,
    /// The host.
    pub host: &'a Host,
    /// The port.
    pub port: u16,
}

/// A connection that passes unread.
pub struct PassthroughFacts<'a> {
    /// The sandbox.
    pub sandbox: &'a SandboxId,
    /// The host in the TLS hello.
    pub host: &'a Host,
    /// The port.
    pub port: u16,
    /// The program, where it is certain.
    pub program: Option<&'a str>,
    /// The sender's registration, where it is known.
    pub registration: Option<&'a Registration>,
    /// What was recorded when it was allowed, for [`Mode::Recheck`].
    pub recorded: Option<&'a Recorded>,
}

/// A mirror.
pub enum MirrorFacts<'a> {
    /// By the name that a client used.
    Named(&'a str),
    /// As it was configured when something of it was allowed.
    Configured(&'a MirrorSettings),
}

/// A push.
pub struct PushFacts<'a> {
    /// The sender's registration.
    pub registration: &'a Registration,
    /// The host.
    pub host: &'a Host,
    /// The repository, or the mirror.
    pub repo: &'a str,
    /// What it asks for.
    pub case: &'a Case,
    /// What is known of each ref.
    pub refs: &'a [RefFacts],
    /// What is known of its objects.
    pub objects: ObjectFacts<'a>,
    /// Whether all of it is to happen or nothing.
    pub atomic: bool,
    /// How large it is.
    pub bytes: u64,
}

/// What is known of the objects of a push.
#[derive(Clone, Copy, Debug)]
pub enum ObjectFacts<'a> {
    /// They were not read yet: only the refs are decided about.
    Unread,
    /// No rule wants them read.
    NotWanted,
    /// They were read.
    Read(&'a Findings),
}

/// A message between a client and a tool server.
pub struct McpFacts<'a> {
    /// The refusal that a before hook stored for this call, if it did.
    pub stored: Option<&'a Denial>,
    /// What the lists of tools and their fingerprints say.
    pub tool: Result<(), Denial>,
    /// The message as policy bundles read it; none before it was read.
    pub message: Option<&'a mut dyn BundleSubject>,
}

/// A request on a git host: what it is about, and as whom it may be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepositoryRequest {
    /// The repository, and what is asked of it.
    pub address: Address,
    /// As whom; none where it is refused.
    pub access: Option<RepositoryAccess>,
}

/// As whom a request on a git host may be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RepositoryAccess {
    /// As the sandbox that was registered for this repository.
    Registered(Repo),
    /// Without any credential.
    Anonymous,
}
