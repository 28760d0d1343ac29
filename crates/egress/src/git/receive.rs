//! Push inspection: spools a push completely, decides it, and forwards or refuses it.
//!
//! ```text
//!   body ──▶ spool ──▶ commands ──▶ ref rules ──▶ pack reader ──▶ all rules ──▶ upstream
//! ```
//! Upstream receives no byte of a push before the last of these steps allows it.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;

use config::Settings;
use config::section::scan::GitAction;
use decide::checks::Check;
use decide::subject::{ObjectFacts, PushFacts, Subject};
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderValue};
use policy::answer::ApprovalAnswers;
use policy::host::Host;
use policy::ports::Pack;
use policy::push::{self, Findings, PushContext, RestrictedPathChange, SecretFinding};
use policy::reason::Reason;
use policy::refs::{RefFacts, RefUpdate};
use policy::registration::Registration;
use policy::verdict::{Denial, Question, Verdict};

use super::push_body;
use super::upstream_trees::{TreeScope, UpstreamRepository, UpstreamTrees};
use crate::admission;
use crate::branches::RemoteRepository;
use crate::git_protocol::push::{ParsedPush, Push, PushCapabilities, PushHead};
use crate::git_protocol::push_spooler::{PushEncoding, SpooledPush};
use crate::git_protocol::report::{self, ReportReader};
use crate::git_protocol::size;
use crate::message::BodyState;
use crate::refusal::{RejectedPush, RequestRefusal};
use crate::request_cx::RequestCx;
use crate::request_log::RequestLog;
use crate::response_filters::git_report::ForwardedPush;
use crate::sandbox_state::SandboxState;
use crate::services::Services;
use crate::spool::Spool;
use crate::stage::Stage;

/// Content type of a push.
const PUSH_CONTENT_TYPE: &[u8] = b"application/x-git-receive-pack-request";

/// Maximum number of refusal messages after the first one.
const MAX_FURTHER_MESSAGES: usize = 8;

/// Maximum number of refs in the audit record of a push.
const MAX_RECORDED_REFS: usize = 32;

/// A received push and its destination.
pub(crate) struct IncomingPush<'a> {
    pub(crate) registration: &'a Registration,
    pub(crate) host: &'a Host,
    /// Repository name.
    pub(crate) repo: &'a str,
    /// Maximum size in bytes.
    pub(crate) limit: u64,
    /// Upstream repository that is queried for the trees to compare the push with.
    pub(crate) upstream: Option<&'a UpstreamRepository<'a>>,
}

/// The decision about a push.
pub(crate) enum PushVerdict {
    /// The push may be forwarded. None for a probe, which changes no ref.
    Allow(Option<Box<ForwardedPush>>),
    /// The operator decides. The capabilities and updates are for the report of a refusal.
    Ask(Box<Question>, PushCapabilities, Vec<RefUpdate>),
}

/// Spools the body of a push, unless an earlier attempt has spooled it.
pub(crate) async fn spool_push(
    cx: &RequestCx,
    body: BodyState,
    encoding: PushEncoding,
    limit: u64,
) -> Result<SpooledPush, RequestRefusal> {
    match body {
        BodyState::Pushed(spooled) => Ok(*spooled),
        other => push_body::spool(cx, other.into_content(), encoding, limit).await,
    }
}

/// Decides about a spooled push to a host or to a mirror. The cheapest checks come first.
pub(crate) async fn decide_push(
    cx: &RequestCx,
    incoming: &IncomingPush<'_>,
    spooled: &SpooledPush,
    answers: &ApprovalAnswers,
    token_taken: &mut bool,
    log: &mut RequestLog,
) -> Result<PushVerdict, RequestRefusal> {
    let Push { head, pack } = match &spooled.parsed {
        ParsedPush::Push(push) => push,
        ParsedPush::Probe => {
            log.event.event = Some("probe".to_owned());
            return Ok(PushVerdict::Allow(None));
        }
    };
    let names = head.updates.iter().map(|update| update.name.to_string());
    log.event.refs = names.take(MAX_RECORDED_REFS).collect();
    let IncomingPush {
        registration,
        host,
        repo,
        limit,
        upstream,
    } = *incoming;
    let repository = RemoteRepository {
        host: host.to_string(),
        repo: repo.to_owned(),
    };
    let refuse = |denial| push_refusal(denial, head.capabilities, &head.updates);
    if !*token_taken {
        admission::take_push(cx).map_err(refuse)?;
        *token_taken = true;
    }
    let (services, sandbox) = (&cx.services, &cx.sandbox);
    let branches = &sandbox.branches;
    branches
        .load_once(services.audit().as_ref(), sandbox.id())
        .await;
    let context = push_context(&cx.snapshot.settings, head);
    let refs = ref_facts(sandbox, &context, &repository);
    let bytes = spooled.spool.len();
    let push = |objects| PushFacts {
        registration,
        host,
        repo,
        context: &context,
        refs: &refs,
        objects,
        atomic: head.capabilities.atomic,
        bytes,
    };
    let refs_decision = cx
        .decide(Subject::Push(push(ObjectFacts::Unread)), answers)
        .into_outcome();
    refs_decision.refusal().map_err(refuse)?;
    let rules = cx.snapshot.settings.push_rules(registration.auth_mode);
    let findings = if rules.wants_findings(&context) {
        let pack_source = PackSource {
            spool: &spooled.spool,
            pack: *pack,
            upstream,
        };
        let read = read_objects(services, &context, &repository, &pack_source).await;
        Some(read.map_err(refuse)?)
    } else {
        None
    };
    if let Some(found) = &findings {
        redact_refs(&mut log.event.refs, found);
    }
    let objects = findings
        .as_ref()
        .map_or(ObjectFacts::NotWanted, ObjectFacts::Read);
    let decided = cx
        .decide(Subject::Push(push(objects)), answers)
        .wait()
        .await;
    let is_allowed = matches!(decided.verdict, Verdict::Allow { .. } | Verdict::Modify(_));
    let decided_by_bundle = decided.check == Check::Bundles;
    if let Some(found) = findings.as_ref().filter(|found| !found.secrets.is_empty())
        && (is_allowed || decided_by_bundle)
    {
        let secrets = found.secrets.len();
        tracing::warn!(
            sandbox = %sandbox.id(),
            secrets,
            "git push with secrets allowed by configuration"
        );
        log.event.event = Some("secrets_noted".to_owned());
    }
    cx.record_bundles(&decided, log).await;
    if let Verdict::Ask(question) = decided.verdict {
        let (capabilities, updates) = (head.capabilities, head.updates.clone());
        return Ok(PushVerdict::Ask(question, capabilities, updates));
    }
    decided.refusal().map_err(refuse)?;
    let mut gate_messages = Vec::new();
    if bytes > cx.snapshot.settings.policy.git.push_limits.warning_bytes {
        tracing::warn!(sandbox = %sandbox.id(), repo, bytes, "git push is above the warning size");
        log.event.event = Some("large_push".to_owned());
        if head.capabilities.side_band {
            report::write_message(&mut gate_messages, &size::warning(bytes, limit));
        }
    }
    Ok(PushVerdict::Allow(Some(Box::new(ForwardedPush {
        services: Arc::clone(services),
        sandbox: Arc::clone(sandbox),
        repository,
        reader: ReportReader::new(head.capabilities),
        capabilities: head.capabilities,
        updates: head.updates.clone(),
        gate_messages,
        tally: Arc::clone(&log.tally),
    }))))
}

/// The encoding of a push body. Unknown encodings are refused.
pub(crate) fn push_encoding(headers: &HeaderMap) -> Result<PushEncoding, RequestRefusal> {
    let malformed = |why: &str| {
        let denial = Denial::new(Reason::GitMalformed, "git:form").with_message(why);
        RequestRefusal::new(Stage::Git, denial)
    };
    let kind = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    if !kind.is_some_and(|kind| kind.eq_ignore_ascii_case(PUSH_CONTENT_TYPE)) {
        return Err(malformed(
            "A request to git-receive-pack must have the content type of a push.",
        ));
    }
    let mut encodings = headers.get_all(CONTENT_ENCODING).iter();
    match (
        encodings.next().map(HeaderValue::as_bytes),
        encodings.next(),
    ) {
        (None, _) => Ok(PushEncoding::Plain),
        (Some(name), None) if name.eq_ignore_ascii_case(b"identity") => Ok(PushEncoding::Plain),
        (Some(name), None)
            if name.eq_ignore_ascii_case(b"gzip") || name.eq_ignore_ascii_case(b"x-gzip") =>
        {
            Ok(PushEncoding::Gzip)
        }
        _ => Err(malformed(
            "The push has an unsupported Content-Encoding. Use gzip or no compression.",
        )),
    }
}

/// The refusal of a push, as a report about every ref.
pub(crate) fn push_refusal(
    denial: Denial,
    capabilities: PushCapabilities,
    updates: &[RefUpdate],
) -> RequestRefusal {
    let code = denial.reason.code();
    let refused = denial.refs();
    // A map, because a push may have thousands of refs.
    let own_reasons: BTreeMap<&[u8], Reason> = refused
        .iter()
        .map(|refused_ref| (refused_ref.name.as_slice(), refused_ref.denial.reason))
        .collect();
    let refs = updates.iter().map(|update| {
        let name = update.name.as_bytes();
        let message = match own_reasons.get(name) {
            Some(reason) => format!("palisade: {}", reason.code()),
            None if refused.is_empty() => format!("palisade: {code}"),
            None => "palisade: another ref of this push was refused".to_owned(),
        };
        (name.to_vec(), message)
    });
    let rejected = RejectedPush {
        capabilities,
        refs: refs.collect(),
        further_messages: refused
            .iter()
            .skip(1)
            .take(MAX_FURTHER_MESSAGES)
            .map(|refused_ref| refused_ref.denial.message.clone())
            .collect(),
    };
    RequestRefusal::new(Stage::Git, denial).as_push_report(rejected)
}

fn push_context(settings: &Settings, head: &PushHead) -> PushContext {
    PushContext {
        format: head.format,
        updates: head.updates.clone(),
        options: head.options.clone(),
        default_tip: None,
        restricted: settings.git.restricted_paths.clone(),
        scan: settings.git.scan != GitAction::Off,
    }
}

/// Removes ref names that contain a secret from the audit record, and all names if the list of
/// findings is incomplete.
fn redact_refs(refs: &mut [String], found: &Findings) {
    for (index, name) in refs.iter_mut().enumerate() {
        let is_in_name =
            |finding: &SecretFinding| finding.place == push::SecretLocation::Ref(index);
        if found.more_secrets || found.secrets.iter().any(is_in_name) {
            "(held back)".clone_into(name);
        }
    }
}

fn ref_facts(
    sandbox: &SandboxState,
    context: &PushContext,
    repository: &RemoteRepository,
) -> Vec<RefFacts> {
    let updates = context.updates.iter();
    updates
        .map(|update| RefFacts {
            exists_upstream: None,
            made_by_this_sandbox: sandbox
                .branches
                .contains(repository, &update.name.to_string()),
            is_fast_forward: None,
        })
        .collect()
}

/// The pack of a spooled push, and the upstream that has the trees to compare it with.
struct PackSource<'a> {
    spool: &'a Spool,
    pack: Option<u64>,
    upstream: Option<&'a UpstreamRepository<'a>>,
}

impl PackSource<'_> {
    fn pack(&self) -> Result<Option<Pack>, Denial> {
        let Some(at) = self.pack else {
            return Ok(None);
        };
        let file = self
            .spool
            .file()
            .map_err(|error| push::refuse_unreadable(error.to_string()))?;
        Ok(Some(Pack { file, offset: at }))
    }
}

impl UpstreamTrees {
    /// The trees as a file for the pack reader.
    fn bases(&self) -> Result<Vec<File>, Denial> {
        let file = self.trees.file();
        Ok(vec![file.map_err(|error| {
            push::refuse_unreadable(error.to_string())
        })?])
    }
}

/// Reads the objects of a push with the pack reader. Without a pack reader the push is refused.
async fn read_objects(
    services: &Services,
    context: &PushContext,
    repository: &RemoteRepository,
    source: &PackSource<'_>,
) -> Result<Findings, Denial> {
    let Some(reader) = services.pack_reader() else {
        return Err(push::refuse_unreadable("the gate has no pack reader"));
    };
    let mut context = context.clone();
    let trees = match source.upstream {
        // A deleted path is only visible in comparison with upstream's trees.
        Some(upstream) if !context.restricted.is_empty() && source.pack.is_some() => {
            let (format, updates) = (context.format, &context.updates);
            upstream
                .trees(format, updates, repository, TreeScope::OwnRefs)
                .await
        }
        _ => None,
    };
    let Some((trees, upstream)) = trees.zip(source.upstream) else {
        return reader.read(&context, source.pack()?, Vec::new()).await;
    };
    context.default_tip = trees.default_tip;
    let found = reader
        .read(&context, source.pack()?, trees.bases()?)
        .await?;
    drop(trees);
    if found.restricted != RestrictedPathChange::Unknown {
        return Ok(found);
    }
    // The push may be based on a branch that the sandbox did not create.
    let (format, updates) = (context.format, &context.updates);
    let all_branch_trees = upstream.trees(format, updates, repository, TreeScope::AllBranches);
    let Some(trees) = all_branch_trees.await else {
        return Ok(found);
    };
    context.default_tip = trees.default_tip;
    reader.read(&context, source.pack()?, trees.bases()?).await
}
