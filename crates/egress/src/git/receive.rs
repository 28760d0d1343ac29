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
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderValue};
use http_body_util::BodyExt;
use policy::host::Host;
use policy::proof::Permitted;
use policy::push::{self, Case, Findings, Restricted, Sighting};
use policy::reason::Reason;
use policy::refs::{RefFacts, RefUpdate};
use policy::registration::{Registration, Repo};
use policy::verdict::Denial;

use super::answer::{Aftermath, Sent};
use super::branches::Place;
use super::intake::{Coding, Taken};
use super::push::{Capabilities, Head, Parsed, Push};
use super::report::{self, Reader};
use super::spool::Spool;
use super::upstream::{Breadth, Known, Upstream};
use super::{arriving, policies, size};
use crate::body::{self, Content};
use crate::guest::Guest;
use crate::pipeline::Message;
use crate::ports::Pack;
use crate::refusal::{Refusal, Unmoved};
use crate::traffic::{Rules, Traffic};
use crate::trail::{Stage, Trail};

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
    /// What the repository is called.
    pub(crate) repo: &'a str,
    /// How large it may be.
    pub(crate) limit: u64,
    pub(crate) coding: Coding,
    pub(crate) body: Content,
    /// Where what it is compared with can be asked for.
    pub(crate) upstream: Option<Upstream<'a>>,
}

/// A push that may go on.
pub(crate) struct Passed {
    /// All of it, decoded.
    pub(crate) spool: Spool,
    /// What is to be remembered of it; nothing of a probe.
    pub(crate) sent: Option<Box<Sent>>,
}

/// What is known of one push when it is judged.
pub(super) struct Pushed<'a> {
    pub(super) registration: &'a Registration,
    pub(super) repo: &'a str,
    pub(super) host: &'a Host,
    pub(super) case: Case,
    pub(super) head: Head,
    /// How long it is.
    pub(super) bytes: u64,
}

/// Takes a push in, judges it, and puts it back to be sent.
pub(super) async fn take(
    traffic: &Arc<Traffic>,
    guest: &Arc<Guest>,
    rules: &Rules,
    request: &mut Permitted<Message>,
    repo: &Repo,
    trail: &mut Trail,
) -> Result<Aftermath, Refusal> {
    let host = request.permit().target().host.clone();
    let registration = request.identity().registration().clone();
    let upstream = Upstream::of(
        traffic,
        guest,
        rules,
        request.permit().target(),
        request.request(),
    );
    let message = request.request_mut();
    let limits = &rules.settings.policy.git.push_limits;
    let arrival = Arrival {
        registration: &registration,
        host: &host,
        repo: repo.name.as_str(),
        limit: push::size_limit(repo, limits.hard_limit_bytes),
        coding: coding_of(&message.head.headers)?,
        body: std::mem::replace(&mut message.body, body::empty()),
        upstream,
    };
    let Passed { spool, sent } = judge_arrival(traffic, guest, rules, arrival, trail).await?;
    put_back(request.request_mut(), spool);
    Ok(sent.map_or(Aftermath::None, Aftermath::Push))
}

/// Takes a push in and judges it, wherever it goes.
pub(crate) async fn judge_arrival(
    traffic: &Arc<Traffic>,
    guest: &Arc<Guest>,
    rules: &Rules,
    arrival: Arrival<'_>,
    trail: &mut Trail,
) -> Result<Passed, Refusal> {
    let Arrival {
        registration,
        host,
        repo,
        limit,
        coding,
        body,
        upstream,
    } = arrival;
    // The semaphore is never closed.
    let _place = guest.pushes.acquire().await;
    let Taken { parsed, spool } = arriving::take_in(traffic, guest, body, coding, limit).await?;
    let Push { head, pack } = match parsed {
        Parsed::Push(push) => push,
        Parsed::Probe => {
            trail.event.event = Some("probe".to_owned());
            return Ok(Passed { spool, sent: None });
        }
    };
    let names = head.updates.iter().map(|update| update.name.to_string());
    trail.event.refs = names.take(MOST_RECORDED).collect();

    let pushed = Pushed {
        case: case(&rules.settings, &head),
        registration,
        repo,
        host,
        bytes: spool.len(),
        head,
    };
    let place = Place {
        host: host.to_string(),
        repo: repo.to_owned(),
    };
    let waiting = Waiting {
        spool: &spool,
        pack,
        upstream: upstream.as_ref(),
    };
    let judged = judge(traffic, guest, rules, &pushed, &place, &waiting, trail).await;
    judged.map_err(|denial| refused(denial, pushed.head.capabilities, &pushed.head.updates))?;

    let Pushed { head, bytes, .. } = pushed;
    let mut talk = Vec::new();
    if bytes > rules.settings.policy.git.push_limits.warning_bytes {
        tracing::warn!(sandbox = %guest.id(), repo, bytes, "git push is above the warning size");
        trail.event.event = Some("large_push".to_owned());
        if head.capabilities.side_band {
            report::talk(&mut talk, &size::warning(bytes, limit));
        }
    }
    let sent = Box::new(Sent {
        traffic: Arc::clone(traffic),
        guest: Arc::clone(guest),
        place,
        reader: Reader::new(head.capabilities),
        capabilities: head.capabilities,
        updates: head.updates,
        talk,
        tally: Arc::clone(&trail.tally),
    });
    let sent = Some(sent);
    Ok(Passed { spool, sent })
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

/// Puts the decoded push in the place of what came.
fn put_back(message: &mut Message, spool: Spool) {
    let headers = &mut message.head.headers;
    headers.remove(CONTENT_ENCODING);
    // The answer is read, too.
    headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    message.body = spool.into_body().boxed_unsync();
}

/// No, for every ref, in the form that the client reads.
pub(super) fn refused(
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
    let unmoved = Unmoved {
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

/// Asks everybody who has a say, the cheapest first.
async fn judge(
    traffic: &Traffic,
    guest: &Guest,
    rules: &Rules,
    pushed: &Pushed<'_>,
    place: &Place,
    waiting: &Waiting<'_>,
    trail: &mut Trail,
) -> Result<(), Denial> {
    if let Err(wait) = guest.take_push(traffic.clock().tick()) {
        let seconds = wait.seconds();
        let denial = Denial::new(Reason::GitRate, "git:rate").saying(format!(
            "Too many pushes in too short a time: wait {seconds} s."
        ));
        return Err(denial);
    }
    let ours = rules.settings.push_rules(pushed.registration.auth_mode);
    guest.branches.recall(traffic.ledger(), guest.id()).await;
    let facts = facts(guest, pushed, place);
    ours.judge_refs(&pushed.case, &facts)?;
    let findings = if ours.wants_findings(&pushed.case) {
        Some(read_objects(traffic, pushed, place, waiting).await?)
    } else {
        None
    };
    if let Some(found) = &findings {
        veil(&mut trail.event.refs, found);
    }
    push::judge(&ours, &pushed.case, &facts, findings.as_ref())?;
    if let Some(found) = findings.as_ref().filter(|found| !found.secrets.is_empty()) {
        let secrets = found.secrets.len();
        tracing::warn!(sandbox = %guest.id(), secrets, "a push with secrets passes, as configured");
        trail.event.event = Some("secrets_noted".to_owned());
    }
    policies::check(traffic, rules, pushed, findings.as_ref(), trail).await?;
    Ok(())
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

fn facts(guest: &Guest, pushed: &Pushed<'_>, place: &Place) -> Vec<RefFacts> {
    let updates = pushed.case.updates.iter();
    updates
        .map(|update| RefFacts {
            exists_upstream: None,
            made_by_this_sandbox: guest.branches.has(place, &update.name.to_string()),
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
    traffic: &Traffic,
    pushed: &Pushed<'_>,
    place: &Place,
    waiting: &Waiting<'_>,
) -> Result<Findings, Denial> {
    let Some(judge) = traffic.judge() else {
        return Err(push::unread("this gate has nobody to read a pack"));
    };
    let mut case = pushed.case.clone();
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
