//! Subjects of decisions, with the data about them that the caller provides.

use std::sync::Arc;

use config::section::git::MirrorSettings;
use http::HeaderMap;
use policy::allowlist::Target;
use policy::git_address::RepositoryAddress;
use policy::host::Host;
use policy::id::SandboxId;
use policy::push::{Findings, PushContext};
use policy::refs::RefFacts;
use policy::registration::{Registration, Repo};
use policy::verdict::{Denial, RuleName};
use serde_json::Value;

use crate::bundles::BundleSubject;

/// The subject of a decision.
pub enum Subject<'a> {
    /// A request, by its head.
    Request(RequestFacts<'a>),
    /// The body of a request that was allowed by its head.
    RequestBody(BodyFacts<'a>),
    /// A CONNECT of a client that does not trust the gate's certificates. Such a client could not
    /// read a refusal inside the tunnel.
    Connect(ConnectFacts<'a>),
    /// A TLS connection that is relayed without decryption.
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

/// The purpose of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// A subject that is executed if it is allowed.
    Live,
    /// A subject in flight, after the rules or a grant changed. Blocks if a policy has to be
    /// evaluated.
    Recheck,
    /// A dry run by the operator.
    Trial,
}

/// A request, by its head.
pub struct RequestFacts<'a> {
    /// The target of the request.
    pub target: Target,
    /// Whether the request uses TLS.
    pub tls: bool,
    /// The headers, or the data that the first decision recorded.
    pub head: HeadFacts<'a>,
    /// The sender's registration, where it is known.
    pub registration: Option<&'a Registration>,
}

/// The request's head without its target.
pub enum HeadFacts<'a> {
    /// The headers.
    Headers {
        /// The headers from the client.
        received: &'a HeaderMap,
        /// The headers to send, for policy bundles; none without bundles.
        sent: Option<HeaderMap>,
    },
    /// The data that the decision that allowed the request recorded.
    Recorded(&'a RecheckData),
}

/// The data of a decision that a [`Mode::Recheck`] needs.
#[derive(Clone, Debug, Default)]
pub struct RecheckData {
    /// The input of the policy bundles; none without bundles.
    pub input: Option<Arc<Value>>,
    /// The rule for GitHub's API that allowed the request.
    pub github: Option<RuleName>,
}

/// A request's body, for rules that depend on it.
pub struct BodyFacts<'a> {
    /// The target of the request.
    pub target: &'a Target,
    /// The headers as the client sent them.
    pub headers: &'a HeaderMap,
    /// The body.
    pub body: &'a [u8],
    /// The sender's registration.
    pub registration: &'a Registration,
}

/// A requested tunnel.
pub struct ConnectFacts<'a> {
    /// The sandbox.
    pub sandbox: Option<&'a SandboxId>,
    /// The host.
    pub host: &'a Host,
    /// The port.
    pub port: u16,
}

/// A TLS connection that is relayed without decryption.
pub struct PassthroughFacts<'a> {
    /// The sandbox.
    pub sandbox: &'a SandboxId,
    /// The host in the TLS ClientHello.
    pub host: &'a Host,
    /// The port.
    pub port: u16,
    /// The program that opened the connection, where it is certain.
    pub program: Option<&'a str>,
    /// The sender's registration, where it is known.
    pub registration: Option<&'a Registration>,
    /// The data of the decision that allowed the connection, for [`Mode::Recheck`].
    pub recorded: Option<&'a RecheckData>,
}

/// A mirror.
pub enum MirrorFacts<'a> {
    /// The mirror with the name that a client sent.
    Named(&'a str),
    /// The mirror with the settings it had when access was allowed.
    Configured(&'a MirrorSettings),
}

/// A push.
pub struct PushFacts<'a> {
    /// The sender's registration.
    pub registration: &'a Registration,
    /// The host.
    pub host: &'a Host,
    /// The name of the repository, or of the mirror.
    pub repo: &'a str,
    /// The ref updates and options of the push.
    pub context: &'a PushContext,
    /// The data about each ref.
    pub refs: &'a [RefFacts],
    /// The data about the pushed objects.
    pub objects: ObjectFacts<'a>,
    /// Whether the push is atomic.
    pub atomic: bool,
    /// The size in bytes.
    pub bytes: u64,
}

/// The data about the objects of a push.
#[derive(Clone, Copy, Debug)]
pub enum ObjectFacts<'a> {
    /// The objects were not read yet, so the decision is about the refs only.
    Unread,
    /// No rule needs the objects.
    NotWanted,
    /// The findings in the objects.
    Read(&'a Findings),
}

/// A message between a client and a tool server.
pub struct McpFacts<'a> {
    /// The refusal that a before hook stored for this call, if there is one.
    pub stored: Option<&'a Denial>,
    /// The result of checking the tool lists and fingerprints.
    pub tool: Result<(), Denial>,
    /// The message as policy bundles read it; none before the message was read.
    pub message: Option<&'a mut dyn BundleSubject>,
}

/// A request to a git host: its repository, and the identity with which it may be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepositoryRequest {
    /// The repository and the operation.
    pub address: RepositoryAddress,
    /// The identity; none if the request is refused.
    pub access: Option<RepositoryAccess>,
}

/// The identity with which a request to a git host may be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RepositoryAccess {
    /// The credentials for a repository of the sandbox's registration.
    Registered(Repo),
    /// The request is sent without credentials.
    Anonymous,
}
