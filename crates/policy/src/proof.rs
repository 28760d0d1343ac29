//! A request's way through the gate, as types.
//!
//! ```text
//! Identified ──admit(Pass, A)──▶ Admitted ──permit(Permit)──▶ Permitted ──clear(Clearance)──▶ Cleared
//! ```
//!
//! Each stage takes what only the check before it can make, so forgetting a check does not
//! compile, and credentials are added to a [`Cleared`] request and nothing else.
//!
//! **What is proved:** every check was made, in this order; a pass, a ticket, a permit and
//! a clearance serve one request each; the permit was judged for the sandbox that sends
//! (looked at when it is joined, and refused otherwise); a ticket counts on its own
//! [`Breaker`](crate::breaker::Breaker) and on no other.
//!
//! **What is not:** that a check was made *for this request*. A [`Pass`] is a token of some
//! bucket and a [`Ticket`] of some breaker, not necessarily those of this sandbox and
//! upstream; a [`Clearance`] is built from whatever verdicts its caller had; and the
//! request `R` is opaque, so that nothing here ties it to the permit's target. The one
//! function that runs the stages holds that together, by sending to the permit's target
//! and building the request anew from it. [`Clearance::nothing_configured`] can be said by
//! anybody: it is there to be searched for.
//!
//! The admission `A` holds the breaker's [`Ticket`](crate::breaker::Ticket) and settles it as
//! abandoned when it is dropped, so that a refusal needs no step of its own. A request that has
//! to wait for an answer gives its admission back and keeps the token it has paid
//! (`release`).
//!
//! ```
//! use policy::{allowlist::Permit, bucket::Pass, identity::Identity, proof::*};
//!
//! fn pass(identity: Identity, pass: Pass, permit: Permit, clearance: Clearance) {
//!     let admitted = Identified::new("request", identity).admit(pass, ());
//!     let permitted = admitted.permit(permit).expect("judged for this sandbox");
//!     let cleared: Cleared<&str, ()> = permitted.clear(clearance);
//! }
//! ```
//!
//! No stage can be skipped:
//!
//! ```compile_fail,E0599
//! use policy::{allowlist::Permit, identity::Identity, proof::*};
//!
//! fn skip_the_rate_limit(identity: Identity, permit: Permit) {
//!     let permitted = Identified::new("request", identity).permit(permit);
//! }
//! ```
//!
//! ```compile_fail,E0599
//! use policy::{bucket::Pass, identity::Identity, proof::*};
//!
//! fn skip_the_allowlist(identity: Identity, pass: Pass, clearance: Clearance) {
//!     let admitted = Identified::new("request", identity).admit(pass, ());
//!     let cleared = admitted.clear(clearance);
//! }
//! ```
//!
//! ```compile_fail,E0308
//! use policy::{identity::Identity, proof::*};
//!
//! fn skip_all(request: u8, identity: Identity) -> Cleared<u8, ()> {
//!     Identified::new(request, identity)
//! }
//! ```
//!
//! And no proof serves two requests:
//!
//! ```compile_fail,E0382
//! use policy::{bucket::Pass, identity::Identity, proof::*};
//!
//! fn twice(one: Identity, two: Identity, pass: Pass) {
//!     let first = Identified::new(1, one).admit(pass, ());
//!     let second = Identified::new(2, two).admit(pass, ());
//! }
//! ```

use crate::allowlist::Permit;
use crate::bucket::Pass;
use crate::identity::Identity;
use crate::reason::Reason;
use crate::verdict::{Denial, RuleName, Verdict};

/// A request whose sender is known.
#[must_use = "a request goes on or is refused"]
#[derive(Debug)]
pub struct Identified<R> {
    request: R,
    identity: Identity,
}

/// A request that the rate limit and the breaker let in.
#[must_use = "a request goes on or is refused"]
#[derive(Debug)]
pub struct Admitted<R, A> {
    request: R,
    identity: Identity,
    pass: Pass,
    admission: A,
}

/// A request that policy allows.
#[must_use = "a request goes on or is refused"]
#[derive(Debug)]
pub struct Permitted<R, A> {
    request: R,
    identity: Identity,
    pass: Pass,
    admission: A,
    permit: Permit,
}

/// A request whose content was checked. Only this may receive a credential and leave.
#[must_use = "a request goes on or is refused"]
#[derive(Debug)]
pub struct Cleared<R, A> {
    request: R,
    identity: Identity,
    pass: Pass,
    admission: A,
    permit: Permit,
    clearance: Clearance,
}

impl<R> Identified<R> {
    /// Ties a request to its sender.
    pub fn new(request: R, identity: Identity) -> Self {
        Self { request, identity }
    }

    /// The request.
    pub fn request(&self) -> &R {
        &self.request
    }

    /// Its sender.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Lets it in: a token was taken and the breaker asked.
    pub fn admit<A>(self, pass: Pass, admission: A) -> Admitted<R, A> {
        Admitted {
            request: self.request,
            identity: self.identity,
            pass,
            admission,
        }
    }
}

/// A permit that was judged for another sandbox, and the request it was meant for.
#[derive(Debug)]
pub struct Misused<R, A> {
    /// What to answer.
    pub denial: Denial,
    /// The request, as far as it came.
    pub request: Admitted<R, A>,
}

impl<R, A> Admitted<R, A> {
    /// The request.
    pub fn request(&self) -> &R {
        &self.request
    }

    /// Its sender.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Joins it with the permit for its target. A permit that was judged by the rules of
    /// another sandbox is refused: the fault is ours, and it must not open a door.
    pub fn permit(self, permit: Permit) -> Result<Permitted<R, A>, Misused<R, A>> {
        let judged_for = &permit.target().sandbox;
        if judged_for != self.identity.sandbox() {
            let denial = Denial::new(Reason::Internal, "proof:permit").because(format!(
                "a permit for {judged_for} was used for {}",
                self.identity.sandbox()
            ));
            return Err(Misused {
                denial,
                request: self,
            });
        }
        Ok(Permitted {
            request: self.request,
            identity: self.identity,
            pass: self.pass,
            admission: self.admission,
            permit,
        })
    }

    /// Gives the admission back, and keeps the request with the token it has paid.
    pub fn release(self) -> (R, Pass) {
        (self.request, self.pass)
    }

    /// The admission of what passes unread, for which there is no permit.
    pub fn into_admission(self) -> A {
        self.admission
    }
}

impl<R, A> Permitted<R, A> {
    /// The request.
    pub fn request(&self) -> &R {
        &self.request
    }

    /// The request, for stages that rewrite its content.
    pub fn request_mut(&mut self) -> &mut R {
        &mut self.request
    }

    /// Its sender.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// What was allowed, and by which rule.
    pub fn permit(&self) -> &Permit {
        &self.permit
    }

    /// Joins it with the result of the content checks.
    pub fn clear(self, clearance: Clearance) -> Cleared<R, A> {
        Cleared {
            request: self.request,
            identity: self.identity,
            pass: self.pass,
            admission: self.admission,
            permit: self.permit,
            clearance,
        }
    }

    /// Gives the admission back, and keeps the request with the token it has paid.
    pub fn release(self) -> (R, Pass) {
        (self.request, self.pass)
    }
}

/// What is left of a [`Cleared`] request once it is sent.
#[derive(Debug)]
pub struct Parts<R, A> {
    /// The request.
    pub request: R,
    /// Its sender.
    pub identity: Identity,
    /// The token it has paid.
    pub pass: Pass,
    /// The breaker's part, to be settled.
    pub admission: A,
    /// What was allowed: the target to dial and to send.
    pub permit: Permit,
    /// What the content checks said.
    pub clearance: Clearance,
}

impl<R, A> Cleared<R, A> {
    /// The request.
    pub fn request(&self) -> &R {
        &self.request
    }

    /// The request, for the stage that adds credentials.
    pub fn request_mut(&mut self) -> &mut R {
        &mut self.request
    }

    /// Its sender.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// What was allowed, and by which rule.
    pub fn permit(&self) -> &Permit {
        &self.permit
    }

    /// What the content checks said.
    pub fn clearance(&self) -> &Clearance {
        &self.clearance
    }

    /// Takes it apart, to send it.
    pub fn into_parts(self) -> Parts<R, A> {
        Parts {
            request: self.request,
            identity: self.identity,
            pass: self.pass,
            admission: self.admission,
            permit: self.permit,
            clearance: self.clearance,
        }
    }
}

/// Proof that the content checks were made, or that none was configured.
///
/// ```compile_fail,E0451
/// let clearance = policy::proof::Clearance { checks: 1, modified_by: Vec::new() };
/// ```
#[must_use = "a clearance is only worth something to the stage that demands it"]
#[derive(Debug, PartialEq, Eq)]
pub struct Clearance {
    checks: usize,
    modified_by: Vec<RuleName>,
}

impl Clearance {
    /// Clears content that every check allowed or changed; the first other verdict comes
    /// back. No verdicts clear nothing: a loop that ran over an empty list is a mistake,
    /// and a gate without checks says so with
    /// [`nothing_configured`](Self::nothing_configured).
    pub fn from_checks(verdicts: &[Verdict]) -> Result<Self, Verdict> {
        if verdicts.is_empty() {
            let denial = Denial::new(Reason::Internal, "proof:clearance");
            return Err(denial.because("no content check was made").into());
        }
        let mut modified_by = Vec::new();
        for verdict in verdicts {
            match verdict {
                Verdict::Allow { .. } => {}
                Verdict::Modify(change) => modified_by.push(change.rule.clone()),
                Verdict::Ask(_) | Verdict::Deny(_) => return Err(verdict.clone()),
            }
        }
        Ok(Self {
            checks: verdicts.len(),
            modified_by,
        })
    }

    /// No check is configured for this content. Audit tells it apart from 'checked'.
    pub fn nothing_configured() -> Self {
        Self {
            checks: 0,
            modified_by: Vec::new(),
        }
    }

    /// Whether any check was made.
    pub fn is_checked(&self) -> bool {
        self.checks > 0
    }

    /// The rules that had the content changed.
    pub fn modified_by(&self) -> &[RuleName] {
        &self.modified_by
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::allowlist::{Allowlist, HostRule, Target};
    use crate::breaker::{Breaker, BreakerConfig, Outcome, Ticket};
    use crate::bucket::{Rate, TokenBucket};
    use crate::clock::{Tick, UnixMillis};
    use crate::endpoint::Method;
    use crate::host::{Host, HostPattern};
    use crate::id::SandboxId;
    use crate::identity::{Lookup, identify};
    use crate::path::CleanPath;
    use crate::registration::{AuthMode, Registration};
    use crate::verdict::{Edits, Grant, Modification, Question};

    fn identity(id: &str) -> Identity {
        let row = Registration {
            id: SandboxId::parse(id).unwrap(),
            ip: None,
            repos: Vec::new(),
            auth_mode: AuthMode::User,
            created: UnixMillis::new(0),
            expires: UnixMillis::new(1),
            metadata: serde_json::Map::new(),
        };
        identify(Lookup::Found(Arc::new(row)), None, UnixMillis::new(0)).unwrap()
    }

    fn admitted(id: &str) -> Admitted<&'static str, Ticket> {
        let rate = Rate::new(1.0, 1).unwrap();
        let pass = TokenBucket::new().take(&rate, Tick::default()).unwrap();
        let ticket = Breaker::new(0)
            .admit(&BreakerConfig::default(), Tick::default())
            .unwrap();
        Identified::new("request", identity(id)).admit(pass, ticket)
    }

    fn permit(id: &str) -> Permit {
        let rule = HostRule::new(HostPattern::parse("x.example").unwrap());
        let target = Target {
            sandbox: SandboxId::parse(id).unwrap(),
            method: Method::parse("GET").unwrap(),
            host: Host::parse("x.example").unwrap(),
            port: 443,
            path: CleanPath::parse("/").unwrap(),
            program: None,
        };
        Allowlist::new(vec![rule]).judge(target).unwrap()
    }

    #[test]
    fn a_request_that_passed_every_stage_carries_every_proof() {
        let permitted = admitted("a").permit(permit("a")).unwrap();
        let cleared = permitted.clear(Clearance::nothing_configured());
        assert_eq!(cleared.request(), &"request");
        assert_eq!(cleared.identity().sandbox().as_str(), "a");
        assert!(!cleared.clearance().is_checked());
        let parts = cleared.into_parts();
        assert_eq!(parts.permit.target().port, 443);
        // A breaker it was not drawn from takes no notice of it.
        Breaker::new(0).settle(
            &BreakerConfig::default(),
            parts.admission,
            Outcome::Success,
            Tick::default(),
        );
    }

    #[test]
    fn a_permit_for_another_sandbox_is_refused_and_the_request_comes_back() {
        let misused = admitted("a").permit(permit("b")).unwrap_err();
        assert_eq!(misused.denial.reason, Reason::Internal);
        let (request, _pass) = misused.request.release();
        assert_eq!(request, "request");
    }

    #[test]
    fn only_checks_that_all_agree_clear_content() {
        let allow = Verdict::Allow {
            rule: "scan".into(),
        };
        let modify = Verdict::Modify(Box::new(Modification {
            rule: "scan:redact".into(),
            edits: Edits::Json("{}".to_owned()),
        }));
        let ask = Verdict::Ask(Box::new(Question {
            digest: [0; 32],
            rules: vec!["scan:ask".into()],
            sentences: vec!["Found.".to_owned()],
            evidence: None,
            grants: Grant::Request,
            snapshot: 0,
        }));
        let deny = Verdict::from(Denial::new(Reason::SecretFound, "scan:deny"));

        let clearance = Clearance::from_checks(&[allow.clone(), modify]).unwrap();
        assert!(clearance.is_checked());
        assert_eq!(clearance.modified_by(), ["scan:redact".into()]);
        for bad in [ask, deny] {
            let verdicts = [allow.clone(), bad.clone(), allow.clone()];
            assert_eq!(Clearance::from_checks(&verdicts), Err(bad));
        }
        assert!(Clearance::from_checks(&[]).is_err());
    }
}
