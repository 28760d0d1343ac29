//! What upstream has of a repository, asked by the gate itself on the way of a push: along
//! the same way, by the same rules and with the same credentials as the push.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use decide::subject::Recorded;
use http::header::{
    ACCEPT, ACCEPT_ENCODING, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue, USER_AGENT,
};
use http::{Method, Response, StatusCode};
use http_body_util::BodyExt;
use policy::allowlist::Target;
use policy::answer::Answers;
use policy::path::CleanPath;
use policy::push::ObjectFormat;
use policy::refs::{ObjectId, RefUpdate};
use tokio::task::spawn_blocking;

use crate::body::{self, Content};
use crate::branches::Place;
use crate::dialer::Arriving;
use crate::git_protocol::ask::{self, Unpacker};
use crate::headers::GIT_PROTOCOL;
use crate::in_flight::InFlight;
use crate::message::{BodyState, Message};
use crate::mirror::upstream::Asking;
use crate::mirror::{Age, Mirror};
use crate::outgoing::Credentials;
use crate::own_request;
use crate::request::Destination;
use crate::request_cx::RequestCx;
use crate::spool::Spool;

/// The longest list of refs.
const MOST_REFS: usize = 4 << 20;

/// The largest pack of trees.
const MOST_TREES: u64 = 64 << 20;

/// How many commits' trees are asked for.
const MOST_WANTS: usize = 256;

/// How many of them are of branches that the sandbox made.
const MOST_OWN: usize = 64;

/// How the names of branches begin.
const BRANCHES: &[u8] = b"refs/heads/";

/// Where the gate asks, and as whom.
pub(crate) struct Upstream<'a> {
    cx: &'a RequestCx,
    way: Way<'a>,
}

/// Whom it asks.
enum Way<'a> {
    /// The host that the push is for, along the push's own way and with the answers it was given.
    Host(Box<Request>, &'a Answers),
    /// The mirror that the push is for, which has what its upstream has.
    Mirror(&'a Mirror),
}

/// What all questions to a host have in common.
struct Request {
    target: Target,
    destination: Destination,
    headers: HeaderMap,
}

/// Whose trees are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Breadth {
    /// Those of the default branch, of the refs that are pushed to, and of branches the sandbox
    /// made, which a new tag or branch may stand on.
    Near,
    /// Those of other branches as well, as many as there may be.
    Branches,
}

/// What upstream has.
pub(super) struct Known {
    /// Where its default branch is.
    pub(super) default_tip: Option<ObjectId>,
    /// The trees there and at the refs of the push, as a pack.
    pub(super) trees: Spool,
}

impl<'a> Upstream<'a> {
    /// The repository that a push is for.
    pub(crate) fn of(
        cx: &'a RequestCx,
        target: &Target,
        message: &Message,
        answers: &'a Answers,
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
            (CONTENT_TYPE, ask::REQUEST_TYPE),
            (ACCEPT, ask::RESULT_TYPE),
            (ACCEPT_ENCODING, "identity"),
            (GIT_PROTOCOL, "version=2"),
        ];
        for (name, value) in fixed {
            headers.insert(name, HeaderValue::from_static(value));
        }
        Some(Self {
            cx,
            way: Way::Host(
                Box::new(Request {
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

    /// The upstream of a mirror.
    pub(crate) fn of_mirror(cx: &'a RequestCx, mirror: &'a Mirror) -> Self {
        Self {
            cx,
            way: Way::Mirror(mirror),
        }
    }

    /// The trees a push is compared with. Only what a ref of upstream's points at is asked
    /// for: forges share objects among forks, and would give those of any. None where upstream
    /// does not give them.
    pub(super) async fn trees(
        &self,
        format: ObjectFormat,
        updates: &[RefUpdate],
        place: &Place,
        breadth: Breadth,
    ) -> Option<Known> {
        let own = self.cx.sandbox.branches.of(place, MOST_OWN);
        match self.try_trees(format, updates, &own, breadth).await {
            Ok(known) => known,
            Err(error) => {
                tracing::info!(sandbox = %self.cx.sandbox.id(), error, "upstream's trees are not known");
                None
            }
        }
    }

    async fn try_trees(
        &self,
        format: ObjectFormat,
        updates: &[RefUpdate],
        own: &[String],
        breadth: Breadth,
    ) -> Result<Option<Known>, String> {
        let names = || {
            let pushed = updates.iter().map(|update| update.name.as_bytes());
            pushed.chain(own.iter().map(String::as_bytes))
        };
        let others = match breadth {
            Breadth::Near => None,
            Breadth::Branches => Some(BRANCHES),
        };
        let asked = ask::refs(format, names().chain(others));
        let refs = self.refs(asked).await?;
        let default_tip = refs.get(&b"HEAD"[..]).copied();
        let mut wants: Vec<ObjectId> = default_tip.into_iter().collect();
        wants.extend(names().filter_map(|name| refs.get(name).copied()));
        wants.sort_unstable();
        wants.dedup();
        if wants.is_empty() {
            return Ok(None);
        }
        if wants.len() > MOST_WANTS {
            return Err("the push touches too many refs".to_owned());
        }
        if breadth == Breadth::Branches {
            let branches = refs.iter().filter(|(name, _)| name.starts_with(BRANCHES));
            let mut more: Vec<ObjectId> = branches.map(|(_, id)| *id).collect();
            more.retain(|id| wants.binary_search(id).is_err());
            more.sort_unstable();
            more.dedup();
            more.truncate(MOST_WANTS - wants.len());
            wants.extend(more);
        }
        let trees = self.pack(ask::trees(format, &wants)).await?;
        Ok(Some(Known { default_tip, trees }))
    }

    async fn refs(&self, question: Vec<u8>) -> Result<BTreeMap<Vec<u8>, ObjectId>, String> {
        let (body, _live) = self.ask(question, Age::Now).await?;
        let read = body::whole(body, MOST_REFS).await;
        let bytes = read.map_err(|error| error.to_string())?;
        ask::read_refs(&bytes).map_err(|error| error.to_string())
    }

    async fn pack(&self, question: Vec<u8>) -> Result<Spool, String> {
        let (mut body, _live) = self.ask(question, Age::Recent).await?;
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
        let mut unpacker = Unpacker::default();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| error.to_string())?;
            let Some(data) = frame.data_ref() else {
                continue;
            };
            let piece = unpacker.feed(data).map_err(|error| error.to_string())?;
            if piece.is_empty() {
                continue;
            }
            let more = u64::try_from(piece.len()).unwrap_or(u64::MAX);
            if spool.len().saturating_add(more) > MOST_TREES {
                return Err("upstream's trees are too large".to_owned());
            }
            let written = spawn_blocking(move || spool.append(&piece).map(|()| spool)).await;
            spool = written
                .map_err(std::io::Error::other)
                .flatten()
                .map_err(failed)?;
        }
        unpacker.finish().map_err(|error| error.to_string())?;
        Ok(spool)
    }

    async fn ask(
        &self,
        question: Vec<u8>,
        age: Age,
    ) -> Result<(Content, Option<InFlight>), String> {
        match &self.way {
            Way::Host(request, answers) => {
                let (response, live) = self.ask_host(request, question, answers).await?;
                let body = response.into_body();
                Ok((body.map_err(Into::into).boxed_unsync(), Some(live)))
            }
            Way::Mirror(mirror) => {
                let asking = Asking {
                    dialer: self.cx.services.dialer(),
                    settings: &self.cx.snapshot.settings,
                    sandbox: self.cx.sandbox.id(),
                    directory: self.cx.services.mirrors().directory(),
                };
                let answer = Box::pin(mirror.ask(&asking, question, age)).await;
                let answer = answer.map_err(|error| error.to_string())?;
                Ok((answer.boxed_unsync(), None))
            }
        }
    }

    async fn ask_host(
        &self,
        like: &Request,
        question: Vec<u8>,
        answers: &Answers,
    ) -> Result<(Response<Arriving>, InFlight), String> {
        let mut request = http::Request::new(());
        *request.method_mut() = Method::POST;
        *request.headers_mut() = like.headers.clone();
        let (head, ()) = request.into_parts();
        let message = Message {
            head: Box::new(head),
            body: BodyState::Buffered(Bytes::from(question), None),
            destination: like.destination.clone(),
            upgrade: None,
            recorded: Recorded::default(),
            credentials: Credentials::Granted,
        };
        let sent = own_request::send(self.cx, like.target.clone(), message, answers);
        let (response, live) = sent.await.map_err(|refusal| refusal.denial.message)?;
        let kind = response.headers().get(CONTENT_TYPE);
        if response.status() != StatusCode::OK
            || kind.is_none_or(|kind| kind.as_bytes() != ask::RESULT_TYPE.as_bytes())
        {
            return Err(format!("upstream answers {}", response.status()));
        }
        Ok((response, live))
    }
}
