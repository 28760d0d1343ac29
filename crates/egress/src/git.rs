//! Git over HTTP: which repositories a sandbox speaks to, and what it pushes.
//!
//! [`address`] recognises, [`push`] reads a push, [`report`] writes refusals and reads
//! upstream's word; none of these touches a socket. [`intake`], `arriving` and [`spool`]
//! keep a push until `receive` has it judged, for which `upstream` may be asked what it has
//! ([`ask`]); [`answer`] looks at what comes back.

pub mod address;
pub mod advertisement;
pub mod answer;
mod arriving;
pub mod ask;
pub mod branches;
pub mod intake;
pub mod line;
pub mod pack_end;
mod policies;
pub mod push;
pub(crate) mod receive;
pub mod report;
pub mod size;
pub mod spool;
pub(crate) mod upstream;

use std::sync::Arc;

use http::header::{ACCEPT_ENCODING, HeaderValue};
use policy::allowlist::Target;
use policy::audit::Kind;
use policy::proof::{Clearance, Permitted};
use policy::reason::Reason;
use policy::registration::Repo;
use policy::repository::{self, Access, Errand};
use policy::verdict::{Denial, Verdict};

use self::address::recognise;
use self::answer::Aftermath;
use crate::guest::Guest;
use crate::headers;
use crate::pipeline::Message;
use crate::refusal::Refusal;
use crate::traffic::{Rules, Traffic};
use crate::trail::{Stage, Trail};

/// Judges a request to a git host, and says what is to be done with the answer.
pub async fn check(
    traffic: &Arc<Traffic>,
    guest: &Arc<Guest>,
    rules: &Rules,
    request: &mut Permitted<Message>,
    trail: &mut Trail,
) -> Result<(Clearance, Aftermath), Refusal> {
    let refused = |denial| Refusal::new(Stage::Git, denial);
    let Some(address) = recognise(request.permit().target()) else {
        return Err(refused(closed()));
    };
    trail.event.kind = Kind::Git;
    trail.event.repo = Some(address.shown.clone());
    trail.event.operation = Some(address.errand.as_str().to_owned());

    let repos = request.identity().registration().repos.clone();
    let access = repository::authorise(
        &repos,
        address.name.as_ref(),
        &address.shown,
        address.errand,
        rules.settings.git.read_public,
    );
    let access = access.map_err(|denial| match address.errand {
        Errand::AdvertiseFetch | Errand::AdvertisePush => refused(denial).in_text(),
        Errand::Fetch | Errand::Push | Errand::Lfs | Errand::Download => refused(denial),
    })?;
    let message = request.request_mut();
    // Nothing of git changes its protocol.
    message.upgrade = None;
    let Access::Registered(repo) = access else {
        headers::make_anonymous(&mut message.head.headers);
        message.anonymous = true;
        return Ok((clearance("git.read_public")?, Aftermath::None));
    };
    let aftermath = match address.errand {
        Errand::AdvertisePush => {
            let identity = HeaderValue::from_static("identity");
            message.head.headers.insert(ACCEPT_ENCODING, identity);
            Aftermath::Advertisement
        }
        Errand::Push => receive::take(traffic, guest, rules, request, repo, trail).await?,
        Errand::AdvertiseFetch | Errand::Fetch | Errand::Lfs | Errand::Download => Aftermath::None,
    };
    Ok((clearance("git:repositories")?, aftermath))
}

/// Judges a request to a host that is not among git's: a push would leave it unread.
pub fn judge_elsewhere(target: &Target) -> Result<(), Refusal> {
    if !address::is_push(target) {
        return Ok(());
    }
    let denial = Denial::new(Reason::GitRepo, "git.hosts").saying(format!(
        "Pushes to {} are not open: only those to the hosts of git.hosts are read.",
        target.host
    ));
    let refusal = Refusal::new(Stage::Git, denial);
    Err(match target.method.as_str() {
        "GET" => refusal.in_text(),
        _ => refusal,
    })
}

/// Judges what is known of a request before its body is read.
pub fn judge(rules: &Rules, target: &Target, repos: &[Repo]) -> Result<(), Denial> {
    if !rules.settings.git.hosts.contains(&target.host) {
        return judge_elsewhere(target).map_err(|refusal| refusal.denial);
    }
    let address = recognise(target).ok_or_else(closed)?;
    let access = repository::authorise(
        repos,
        address.name.as_ref(),
        &address.shown,
        address.errand,
        rules.settings.git.read_public,
    );
    access.map(drop)
}

fn closed() -> Denial {
    Denial::new(Reason::PathDenied, "git:paths")
        .saying("This host is for git: nothing else is open on it.")
}

/// The content was looked at, and `rule` lets it pass.
fn clearance(rule: &str) -> Result<Clearance, Refusal> {
    let allow = Verdict::Allow { rule: rule.into() };
    Clearance::from_checks(&[allow]).map_err(|_| {
        // An allowing check clears, always.
        Refusal::new(Stage::Git, Denial::new(Reason::Internal, "proof:clearance"))
    })
}
