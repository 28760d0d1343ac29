//! A push at the gate: taken in whole, judged, and sent on or answered.
//!
//! ```text
//!   body ──▶ spool ──▶ commands ──▶ rules for refs ──▶ reader of objects ──▶ all rules ──▶ upstream
//! ```
//! Upstream sees no byte of it before the last of these says yes.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;

use config::Settings;
use config::section::scan::GitAction;
use decide::checks::Check;
use decide::subject::{ObjectFacts, PushFacts, Subject};
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderValue};
use policy::answer::Answers;
use policy::host::Host;
use policy::ports::Pack;
use policy::push::{self, Case, Findings, Restricted, Sighting};
use policy::reason::Reason;
use policy::refs::{RefFacts, RefUpdate};
use policy::registration::Registration;
use policy::verdict::{Denial, Question, Verdict};

use super::arriving;
use super::upstream::{Breadth, Known, Upstream};
use crate::admission;
use crate::branches::Place;
use crate::git_protocol::intake::{Coding, Taken};
use crate::git_protocol::push::{Capabilities, Head, Parsed, Push};
use crate::git_protocol::report::{self, Reader};
use crate::git_protocol::size;
use crate::message::BodyState;
use crate::refusal::{Refusal, RejectedPush};
use crate::request_cx::RequestCx;
use crate::request_log::RequestLog;
use crate::response_filters::git_report::Sent;
use crate::sandbox_state::SandboxState;
use crate::services::Services;
use crate::spool::Spool;
use crate::stage::Stage;

/// What a push calls itself.
const PUSH_TYPE: &[u8] = b"application/x-git-receive-pack-request";

/// How many reasons are told beside the first.
const MOST_TOLD: usize = 8;

/// How many refs of a push are on record.
const MOST_RECORDED: usize = 32;

/// A push that comes in, and where it is to go.
pub(crate) struct Arrival<'a> {
    pub(crate) registration: &'a Registration,
    pub(crate) host: &'a Host,
    /// The name of the repository.
    pub(crate) repo: &'a str,
    /// The largest size.
    pub(crate) limit: u64,
    /// Where what it is compared with can be asked for.
    pub(crate) upstream: Option<&'a Upstream<'a>>,
}

/// What was decided about a push.
pub(crate) enum PushVerdict {
    /// It may go on. What is to be remembered of it; nothing of a probe.
    Allow(Option<Box<Sent>>),
    /// The operator decides; and how a refusal would be answered.
    Ask(Box<Question>, Capabilities, Vec<RefUpdate>),
}

/// Takes the body of a push in, unless it was taken in before.
pub(crate) async fn take_in(
    cx: &RequestCx,
    body: BodyState,
    coding: Coding,
    limit: u64,
) -> Result<Taken, Refusal> {
    match body {
        BodyState::Pushed(taken) => Ok(*taken),
        other => arriving::take_in(cx, other.into_content(), coding, limit).await,
    }
}

/// Decides about a push that was taken in, wherever it goes: the cheapest checks first.
pub(crate) async fn judge(
    cx: &RequestCx,
    arrival: &Arrival<'_>,
    taken: &Taken,
    answers: &Answers,
    paid: &mut bool,
    trail: &mut RequestLog,
) -> Result<PushVerdict, Refusal> {
    let Push { head, pack } = match &taken.parsed {
        Parsed::Push(push) => push,
        Parsed::Probe => {
            trail.event.event = Some("probe".to_owned());
            return Ok(PushVerdict::Allow(None));
        }
    };
    let names = head.updates.iter().map(|update| update.name.to_string());
    trail.event.refs = names.take(MOST_RECORDED).collect();
    let Arrival {
        registration,
        host,
        repo,
        limit,
        upstream,
    } = *arrival;
    let place = Place {
        host: host.to_string(),
        repo: repo.to_owned(),
    };
    let refuse = |denial| refused(denial, head.capabilities, &head.updates);
    if !*paid {
        admission::take_push(cx).map_err(refuse)?;
        *paid = true;
    }
    let (services, sandbox) = (&cx.services, &cx.sandbox);
    let branches = &sandbox.branches;
    branches
        .recall(services.audit().as_ref(), sandbox.id())
        .await;
    let case = case(&cx.snapshot.settings, head);
    let refs = facts(sandbox, &case, &place);
    let bytes = taken.spool.len();
    let push = |objects| PushFacts {
        registration,
        host,
        repo,
        case: &case,
        refs: &refs,
        objects,
        atomic: head.capabilities.atomic,
        bytes,
    };
    let by_refs = cx
        .decide(Subject::Push(push(ObjectFacts::Unread)), answers)
        .now();
    by_refs.refusal().map_err(refuse)?;
    let rules = cx.snapshot.settings.push_rules(registration.auth_mode);
    let findings = if rules.wants_findings(&case) {
        let waiting = Waiting {
            spool: &taken.spool,
            pack: *pack,
            upstream,
        };
        let read = read_objects(services, &case, &place, &waiting).await;
        Some(read.map_err(refuse)?)
    } else {
        None
    };
    if let Some(found) = &findings {
        veil(&mut trail.event.refs, found);
    }
    let objects = findings
        .as_ref()
        .map_or(ObjectFacts::NotWanted, ObjectFacts::Read);
    let decided = cx
        .decide(Subject::Push(push(objects)), answers)
        .wait()
        .await;
    let passes = matches!(decided.verdict, Verdict::Allow { .. } | Verdict::Modify(_));
    let by_bundle = decided.check == Check::Bundles;
    if let Some(found) = findings.as_ref().filter(|found| !found.secrets.is_empty())
        && (passes || by_bundle)
    {
        let secrets = found.secrets.len();
        tracing::warn!(sandbox = %sandbox.id(), secrets, "a push with secrets passes, as configured");
        trail.event.event = Some("secrets_noted".to_owned());
    }
    cx.record_bundles(&decided, trail).await;
    if let Verdict::Ask(question) = decided.verdict {
        let (capabilities, updates) = (head.capabilities, head.updates.clone());
        return Ok(PushVerdict::Ask(question, capabilities, updates));
    }
    decided.refusal().map_err(refuse)?;
    let mut talk = Vec::new();
    if bytes > cx.snapshot.settings.policy.git.push_limits.warning_bytes {
        tracing::warn!(sandbox = %sandbox.id(), repo, bytes, "git push is above the warning size");
        trail.event.event = Some("large_push".to_owned());
        if head.capabilities.side_band {
            report::talk(&mut talk, &size::warning(bytes, limit));
        }
    }
    Ok(PushVerdict::Allow(Some(Box::new(Sent {
        services: Arc::clone(services),
        sandbox: Arc::clone(sandbox),
        place,
        reader: Reader::new(head.capabilities),
        capabilities: head.capabilities,
        updates: head.updates.clone(),
        talk,
        tally: Arc::clone(&trail.tally),
    }))))
}

/// How the body of a push is coded. What is not known cannot be read.
pub(crate) fn coding_of(headers: &HeaderMap) -> Result<Coding, Refusal> {
    let malformed = |why: &str| {
        let denial = Denial::new(Reason::GitMalformed, "git:form").saying(why);
        Refusal::new(Stage::Git, denial)
    };
    let kind = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    if !kind.is_some_and(|kind| kind.eq_ignore_ascii_case(PUSH_TYPE)) {
        return Err(malformed("What is sent to git-receive-pack is a push."));
    }
    let mut codings = headers.get_all(CONTENT_ENCODING).iter();
    match (codings.next().map(HeaderValue::as_bytes), codings.next()) {
        (None, _) => Ok(Coding::Plain),
        (Some(word), None) if word.eq_ignore_ascii_case(b"identity") => Ok(Coding::Plain),
        (Some(word), None)
            if word.eq_ignore_ascii_case(b"gzip") || word.eq_ignore_ascii_case(b"x-gzip") =>
        {
            Ok(Coding::Gzip)
        }
        _ => Err(malformed(
            "This push is compressed in a way that is not read here. Use gzip, or none.",
        )),
    }
}

/// No, for every ref, in the form that the client reads.
pub(crate) fn refused(
    denial: Denial,
    capabilities: Capabilities,
    updates: &[RefUpdate],
) -> Refusal {
    let code = denial.reason.code();
    let refused = denial.refs();
    // A push may have thousands of refs.
    let own: BTreeMap<&[u8], Reason> = refused
        .iter()
        .map(|one| (one.name.as_slice(), one.denial.reason))
        .collect();
    let refs = updates.iter().map(|update| {
        let name = update.name.as_bytes();
        let why = match own.get(name) {
            Some(reason) => format!("palisade: {}", reason.code()),
            None if refused.is_empty() => format!("palisade: {code}"),
            None => "palisade: another ref of this push was refused".to_owned(),
        };
        (name.to_vec(), why)
    });
    let unmoved = RejectedPush {
        capabilities,
        refs: refs.collect(),
        others: refused
            .iter()
            .skip(1)
            .take(MOST_TOLD)
            .map(|one| one.denial.message.clone())
            .collect(),
    };
    Refusal::new(Stage::Git, denial).of_push(unmoved)
}

fn case(settings: &Settings, head: &Head) -> Case {
    Case {
        format: head.format,
        updates: head.updates.clone(),
        options: head.options.clone(),
        default_tip: None,
        restricted: settings.git.restricted_paths.clone(),
        scan: settings.git.scan != GitAction::Off,
    }
}

/// Takes names that hold a secret off the record; all of them where not every place is known.
fn veil(refs: &mut [String], found: &Findings) {
    for (at, name) in refs.iter_mut().enumerate() {
        let is_named = |one: &Sighting| one.place == push::Place::Ref(at);
        if found.more_secrets || found.secrets.iter().any(is_named) {
            "(held back)".clone_into(name);
        }
    }
}

fn facts(sandbox: &SandboxState, case: &Case, place: &Place) -> Vec<RefFacts> {
    let updates = case.updates.iter();
    updates
        .map(|update| RefFacts {
            exists_upstream: None,
            made_by_this_sandbox: sandbox.branches.has(place, &update.name.to_string()),
            is_fast_forward: None,
        })
        .collect()
}

/// A push that waits, and where what it is compared with can be asked for.
struct Waiting<'a> {
    spool: &'a Spool,
    pack: Option<u64>,
    upstream: Option<&'a Upstream<'a>>,
}

impl Waiting<'_> {
    fn pack(&self) -> Result<Option<Pack>, Denial> {
        let Some(at) = self.pack else {
            return Ok(None);
        };
        let file = self
            .spool
            .file()
            .map_err(|error| push::unread(error.to_string()))?;
        Ok(Some(Pack { file, at }))
    }
}

impl Known {
    /// The trees, as the reader takes them.
    fn bases(&self) -> Result<Vec<File>, Denial> {
        let file = self.trees.file();
        Ok(vec![file.map_err(|error| push::unread(error.to_string()))?])
    }
}

/// Has the objects read. Where nobody can, the push is refused.
async fn read_objects(
    services: &Services,
    case: &Case,
    place: &Place,
    waiting: &Waiting<'_>,
) -> Result<Findings, Denial> {
    let Some(judge) = services.pack_reader() else {
        return Err(push::unread("this gate has nobody to read a pack"));
    };
    let mut case = case.clone();
    let known = match waiting.upstream {
        // That something is gone is only seen beside what was there.
        Some(upstream) if !case.restricted.is_empty() && waiting.pack.is_some() => {
            let (format, updates) = (case.format, &case.updates);
            upstream.trees(format, updates, place, Breadth::Near).await
        }
        _ => None,
    };
    let Some((known, upstream)) = known.zip(waiting.upstream) else {
        return judge.read(&case, waiting.pack()?, Vec::new()).await;
    };
    case.default_tip = known.default_tip;
    let found = judge.read(&case, waiting.pack()?, known.bases()?).await?;
    drop(known);
    if found.restricted != Restricted::Unknown {
        return Ok(found);
    }
    // It may begin at a branch of somebody else's.
    let (format, updates) = (case.format, &case.updates);
    let wider = upstream.trees(format, updates, place, Breadth::Branches);
    let Some(known) = wider.await else {
        return Ok(found);
    };
    case.default_tip = known.default_tip;
    judge.read(&case, waiting.pack()?, known.bases()?).await
}
