//! Queries for upstream's refs and trees, which a push is compared with. The gate sends these
//! requests itself, to the same destination, under the same rules and with the same credentials
//! as the push.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use decide::subject::RecheckData;
use http::header::{
    ACCEPT, ACCEPT_ENCODING, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue, USER_AGENT,
};
use http::{Method, Response, StatusCode};
use http_body_util::BodyExt;
use policy::allowlist::Target;
use policy::answer::ApprovalAnswers;
use policy::path::CleanPath;
use policy::push::ObjectFormat;
use policy::refs::{ObjectId, RefUpdate};
use tokio::task::spawn_blocking;

use crate::body::{self, MessageBody};
use crate::branches::RemoteRepository;
use crate::dialer::UpstreamBody;
use crate::git_protocol::protocol_v2::{self, PackExtractor};
use crate::headers::GIT_PROTOCOL;
use crate::in_flight::InFlight;
use crate::message::{BodyState, PipelineRequest};
use crate::mirror::upstream::UpstreamAccess;
use crate::mirror::{MaxAge, Mirror};
use crate::outgoing::Credentials;
use crate::own_request;
use crate::request::Destination;
use crate::request_cx::RequestCx;
use crate::spool::Spool;

/// Maximum size of a ref list in bytes.
const MAX_REF_LIST_BYTES: usize = 4 << 20;

/// Maximum size of a pack of trees in bytes.
const MAX_TREE_BYTES: u64 = 64 << 20;

/// Maximum number of commits whose trees are requested.
const MAX_WANTS: usize = 256;

/// Maximum number of these commits that are tips of branches which the sandbox created.
const MAX_OWN_BRANCHES: usize = 64;

/// Prefix of branch refs.
const BRANCH_PREFIX: &[u8] = b"refs/heads/";

/// The upstream repository of a push.
pub(crate) struct UpstreamRepository<'a> {
    cx: &'a RequestCx,
    query_target: QueryTarget<'a>,
}

/// The server that answers the queries.
enum QueryTarget<'a> {
    /// The host that the push is for. The queries use the destination of the push and the
    /// operator's answers to it.
    Host(Box<HostRequest>, &'a ApprovalAnswers),
    /// The mirror that the push is for, which is refreshed from its upstream first.
    Mirror(&'a Mirror),
}

/// Template of the requests to a host.
struct HostRequest {
    target: Target,
    destination: Destination,
    headers: HeaderMap,
}

/// The commits whose trees are fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TreeScope {
    /// The tips of the default branch, of the pushed refs, and of branches that the sandbox
    /// created, on which a new tag or branch may be based.
    OwnRefs,
    /// The tips of other branches as well, up to the limit.
    AllBranches,
}

/// Trees of the upstream repository.
pub(super) struct UpstreamTrees {
    /// Tip of the default branch.
    pub(super) default_tip: Option<ObjectId>,
    /// The trees of the requested commits, as a pack.
    pub(super) trees: Spool,
}

impl<'a> UpstreamRepository<'a> {
    /// The upstream repository of a push to a host; none if the path is not a git path.
    pub(crate) fn for_push(
        cx: &'a RequestCx,
        target: &Target,
        message: &PipelineRequest,
        answers: &'a ApprovalAnswers,
    ) -> Option<Self> {
        let wire = target.path.wire();
        let (repository, _) = wire.rsplit_once('/')?;
        let path = CleanPath::parse(&format!("{repository}/git-upload-pack")).ok()?;
        let mut headers = HeaderMap::new();
        for name in [AUTHORIZATION, USER_AGENT] {
            if let Some(value) = message.head.headers.get(&name) {
                headers.insert(name, value.clone());
            }
        }
        let fixed = [
            (CONTENT_TYPE, protocol_v2::REQUEST_TYPE),
            (ACCEPT, protocol_v2::RESULT_TYPE),
            (ACCEPT_ENCODING, "identity"),
            (GIT_PROTOCOL, "version=2"),
        ];
        for (name, value) in fixed {
            headers.insert(name, HeaderValue::from_static(value));
        }
        Some(Self {
            cx,
            query_target: QueryTarget::Host(
                Box::new(HostRequest {
                    target: Target {
                        path,
                        ..target.clone()
                    },
                    destination: message.destination.clone(),
                    headers,
                }),
                answers,
            ),
        })
    }

    /// The upstream repository of a push to a mirror.
    pub(crate) fn for_mirror(cx: &'a RequestCx, mirror: &'a Mirror) -> Self {
        Self {
            cx,
            query_target: QueryTarget::Mirror(mirror),
        }
    }

    /// Fetches the trees that a push is compared with, or none if upstream does not provide them.
    /// Only commits that upstream's refs point at are requested: forges share objects among
    /// forks, and would return objects of any fork.
    pub(super) async fn trees(
        &self,
        format: ObjectFormat,
        updates: &[RefUpdate],
        repository: &RemoteRepository,
        scope: TreeScope,
    ) -> Option<UpstreamTrees> {
        let own = self.cx.sandbox.branches.list(repository, MAX_OWN_BRANCHES);
        match self.try_trees(format, updates, &own, scope).await {
            Ok(trees) => trees,
            Err(error) => {
                tracing::info!(
                    sandbox = %self.cx.sandbox.id(),
                    error,
                    "fetching upstream trees for a push failed"
                );
                None
            }
        }
    }

    async fn try_trees(
        &self,
        format: ObjectFormat,
        updates: &[RefUpdate],
        own: &[String],
        scope: TreeScope,
    ) -> Result<Option<UpstreamTrees>, String> {
        let names = || {
            let pushed = updates.iter().map(|update| update.name.as_bytes());
            pushed.chain(own.iter().map(String::as_bytes))
        };
        let others = match scope {
            TreeScope::OwnRefs => None,
            TreeScope::AllBranches => Some(BRANCH_PREFIX),
        };
        let request = protocol_v2::ls_refs_request(format, names().chain(others));
        let refs = self.refs(request).await?;
        let default_tip = refs.get(&b"HEAD"[..]).copied();
        let mut wants: Vec<ObjectId> = default_tip.into_iter().collect();
        wants.extend(names().filter_map(|name| refs.get(name).copied()));
        wants.sort_unstable();
        wants.dedup();
        if wants.is_empty() {
            return Ok(None);
        }
        if wants.len() > MAX_WANTS {
            return Err("the push updates too many refs".to_owned());
        }
        if scope == TreeScope::AllBranches {
            let branches = refs
                .iter()
                .filter(|(name, _)| name.starts_with(BRANCH_PREFIX));
            let mut more: Vec<ObjectId> = branches.map(|(_, id)| *id).collect();
            more.retain(|id| wants.binary_search(id).is_err());
            more.sort_unstable();
            more.dedup();
            more.truncate(MAX_WANTS - wants.len());
            wants.extend(more);
        }
        let trees = self
            .pack(protocol_v2::fetch_trees_request(format, &wants))
            .await?;
        Ok(Some(UpstreamTrees { default_tip, trees }))
    }

    async fn refs(&self, request: Vec<u8>) -> Result<BTreeMap<Vec<u8>, ObjectId>, String> {
        let (body, _in_flight) = self.query(request, MaxAge::Zero).await?;
        let read = body::read_whole(body, MAX_REF_LIST_BYTES).await;
        let bytes = read.map_err(|error| error.to_string())?;
        protocol_v2::parse_refs(&bytes).map_err(|error| error.to_string())
    }

    async fn pack(&self, request: Vec<u8>) -> Result<Spool, String> {
        let (mut body, _in_flight) = self.query(request, MaxAge::OneMinute).await?;
        let failed = |error: std::io::Error| error.to_string();
        let (services, quota) = (
            Arc::clone(&self.cx.services),
            Arc::clone(&self.cx.sandbox.spooled),
        );
        let opened = spawn_blocking(move || services.spools().open(&quota)).await;
        let mut spool = opened
            .map_err(std::io::Error::other)
            .flatten()
            .map_err(failed)?;
        let mut extractor = PackExtractor::default();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| error.to_string())?;
            let Some(data) = frame.data_ref() else {
                continue;
            };
            let chunk = extractor.feed(data).map_err(|error| error.to_string())?;
            if chunk.is_empty() {
                continue;
            }
            let more = u64::try_from(chunk.len()).unwrap_or(u64::MAX);
            if spool.len().saturating_add(more) > MAX_TREE_BYTES {
                return Err("the pack of upstream's trees is too large".to_owned());
            }
            let written = spawn_blocking(move || spool.append(&chunk).map(|()| spool)).await;
            spool = written
                .map_err(std::io::Error::other)
                .flatten()
                .map_err(failed)?;
        }
        extractor.finish().map_err(|error| error.to_string())?;
        Ok(spool)
    }

    async fn query(
        &self,
        body: Vec<u8>,
        max_age: MaxAge,
    ) -> Result<(MessageBody, Option<InFlight>), String> {
        match &self.query_target {
            QueryTarget::Host(template, answers) => {
                let (response, in_flight) = self.query_host(template, body, answers).await?;
                let body = response.into_body();
                Ok((body.map_err(Into::into).boxed_unsync(), Some(in_flight)))
            }
            QueryTarget::Mirror(mirror) => {
                let access = UpstreamAccess {
                    dialer: self.cx.services.dialer(),
                    settings: &self.cx.snapshot.settings,
                    sandbox: self.cx.sandbox.id(),
                    directory: self.cx.services.mirrors().directory(),
                };
                let output = Box::pin(mirror.query(&access, body, max_age)).await;
                let output = output.map_err(|error| error.to_string())?;
                Ok((output.boxed_unsync(), None))
            }
        }
    }

    async fn query_host(
        &self,
        template: &HostRequest,
        body: Vec<u8>,
        answers: &ApprovalAnswers,
    ) -> Result<(Response<UpstreamBody>, InFlight), String> {
        let mut request = http::Request::new(());
        *request.method_mut() = Method::POST;
        *request.headers_mut() = template.headers.clone();
        let (head, ()) = request.into_parts();
        let message = PipelineRequest {
            head: Box::new(head),
            body: BodyState::Buffered(Bytes::from(body), None),
            destination: template.destination.clone(),
            upgrade: None,
            recorded: RecheckData::default(),
            credentials: Credentials::Granted,
        };
        let sent = own_request::send(self.cx, template.target.clone(), message, answers);
        let (response, in_flight) = sent.await.map_err(|refusal| refusal.denial.message)?;
        let kind = response.headers().get(CONTENT_TYPE);
        if response.status() != StatusCode::OK
            || kind.is_none_or(|kind| kind.as_bytes() != protocol_v2::RESULT_TYPE.as_bytes())
        {
            return Err(format!(
                "upstream responded with status {} or another content type",
                response.status()
            ));
        }
        Ok((response, in_flight))
    }
}
