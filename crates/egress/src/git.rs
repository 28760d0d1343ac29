//! Git over HTTP: which repositories a sandbox speaks to, and what it pushes.

pub mod address;
pub mod line;
pub mod push;

use policy::audit::Kind;
use policy::proof::{Clearance, Permitted};
use policy::reason::Reason;
use policy::repository::{self, Access, Errand};
use policy::verdict::{Denial, Verdict};

use self::address::recognise;
use crate::headers;
use crate::pipeline::Message;
use crate::refusal::Refusal;
use crate::traffic::Rules;
use crate::trail::{Stage, Trail};

/// Judges a request to a git host.
pub async fn check(
    rules: &Rules,
    request: &mut Permitted<Message>,
    trail: &mut Trail,
) -> Result<Clearance, Refusal> {
    let refused = |denial| Refusal::new(Stage::Git, denial);
    let Some(address) = recognise(request.permit().target()) else {
        let denial = Denial::new(Reason::PathDenied, "git:paths")
            .saying("This host is for git: nothing else is open on it.");
        return Err(refused(denial));
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
    let rule = match access {
        Access::Registered(_) => "git:repositories",
        Access::Anonymous => {
            headers::make_anonymous(&mut message.head.headers);
            message.anonymous = true;
            "git.read_public"
        }
    };
    clearance(rule)
}

/// The content was looked at, and `rule` lets it pass.
fn clearance(rule: &str) -> Result<Clearance, Refusal> {
    let allow = Verdict::Allow {
        rule: Some(rule.into()),
    };
    Clearance::from_checks(&[allow]).map_err(|_| {
        // An allowing check clears, always.
        Refusal::new(Stage::Git, Denial::new(Reason::Internal, "proof:clearance"))
    })
}
