//! The stages of a request through the gate, as types.
//!
//! ```text
//! Identified ──admit(RateLimitPass, A)──▶ Admitted ──permit(Permit)──▶ Permitted ──clear(Clearance)──▶ Cleared
//! ```
//!
//! Each stage takes a value that only the check before it can create, so code that skips a check
//! does not compile, and credentials are added to a [`Cleared`] request only.
//!
//! **What is proved:** every check was made, in this order; a pass, a ticket, a permit and a
//! clearance are used for one request each; the permit was issued for the sandbox that sends
//! (checked at run time by `permit`); a ticket affects only its own
//! [`Breaker`](crate::breaker::Breaker).
//!
//! **What is not proved:** that a check was made *for this request*. A [`RateLimitPass`] is from some
//! bucket and a [`Ticket`](crate::breaker::Ticket) from some breaker, not necessarily those of
//! this sandbox and upstream; a [`Clearance`] is built from the verdicts that the caller passes;
//! and the request `R` is opaque, so nothing here ties it to the permit's target. The function
//! that runs the stages is responsible for that: it sends to the permit's target and builds the
//! request from it. Any code can call [`Clearance::nothing_configured`]; its name makes such
//! calls easy to find.
//!
//! The admission `A` contains the breaker's [`Ticket`](crate::breaker::Ticket) and settles it as
//! abandoned when it is dropped, so that a refusal needs no extra step. A request that waits for
//! an approval returns its admission and keeps the rate limit token (`release`).
//!
//! ```
//! use policy::{allowlist::Permit, bucket::RateLimitPass, identity::Identity, proof::*};
//!
//! fn pass(identity: Identity, pass: RateLimitPass, permit: Permit, clearance: Clearance) {
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
//! use policy::{bucket::RateLimitPass, identity::Identity, proof::*};
//!
//! fn skip_the_allowlist(identity: Identity, pass: RateLimitPass, clearance: Clearance) {
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
//! use policy::{bucket::RateLimitPass, identity::Identity, proof::*};
//!
//! fn twice(one: Identity, two: Identity, pass: RateLimitPass) {
//!     let first = Identified::new(1, one).admit(pass, ());
//!     let second = Identified::new(2, two).admit(pass, ());
//! }
//! ```

use crate::allowlist::Permit;
use crate::bucket::RateLimitPass;
use crate::identity::Identity;
use crate::reason::Reason;
use crate::verdict::{Denial, RuleName, Verdict};

/// A request whose sender is known.
#[must_use = "a request is passed to the next stage or refused"]
#[derive(Debug)]
pub struct Identified<R> {
    request: R,
    identity: Identity,
}

/// A request that the rate limit and the breaker admitted.
#[must_use = "a request is passed to the next stage or refused"]
#[derive(Debug)]
pub struct Admitted<R, A> {
    request: R,
    identity: Identity,
    pass: RateLimitPass,
    admission: A,
}

/// A request that the policy allows.
#[must_use = "a request is passed to the next stage or refused"]
#[derive(Debug)]
pub struct Permitted<R, A> {
    request: R,
    identity: Identity,
    pass: RateLimitPass,
    admission: A,
    permit: Permit,
}

/// A request whose content was checked. Only this may receive a credential and be sent.
#[must_use = "a request is passed to the next stage or refused"]
#[derive(Debug)]
pub struct Cleared<R, A> {
    request: R,
    identity: Identity,
    pass: RateLimitPass,
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

    /// The sender of the request.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Admits the request: a token was taken, and the breaker admitted it.
    pub fn admit<A>(self, pass: RateLimitPass, admission: A) -> Admitted<R, A> {
        Admitted {
            request: self.request,
            identity: self.identity,
            pass,
            admission,
        }
    }
}

/// A permit was issued for another sandbox than the sender of the request.
#[derive(Debug)]
pub struct PermitMismatch<R, A> {
    /// The refusal.
    pub denial: Denial,
    /// The request in its previous stage.
    pub request: Admitted<R, A>,
}

impl<R, A> Admitted<R, A> {
    /// The request.
    pub fn request(&self) -> &R {
        &self.request
    }

    /// The sender of the request.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Adds the permit for the request's target. A permit for another sandbox is refused: that is
    /// a bug of the gate, and must not allow the request.
    pub fn permit(self, permit: Permit) -> Result<Permitted<R, A>, PermitMismatch<R, A>> {
        let permit_sandbox = &permit.target().sandbox;
        if permit_sandbox != self.identity.sandbox() {
            let denial = Denial::new(Reason::Internal, "proof:permit").with_evidence(format!(
                "a permit for {permit_sandbox} was used for {}",
                self.identity.sandbox()
            ));
            return Err(PermitMismatch {
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

    /// Drops the admission, and returns the request with its rate limit token.
    pub fn release(self) -> (R, RateLimitPass) {
        (self.request, self.pass)
    }

    /// The admission, for a connection whose content is not read and that needs no permit.
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

    /// The sender of the request.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The permit: the allowed target, and the rule that allowed it.
    pub fn permit(&self) -> &Permit {
        &self.permit
    }

    /// Adds the result of the content checks.
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

    /// Drops the admission, and returns the request with its rate limit token.
    pub fn release(self) -> (R, RateLimitPass) {
        (self.request, self.pass)
    }
}

/// The parts of a [`Cleared`] request.
#[derive(Debug)]
pub struct Parts<R, A> {
    /// The request.
    pub request: R,
    /// The sender of the request.
    pub identity: Identity,
    /// The rate limit token.
    pub pass: RateLimitPass,
    /// The admission, to be settled with the outcome.
    pub admission: A,
    /// The permit with the target of the request.
    pub permit: Permit,
    /// The result of the content checks.
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

    /// The sender of the request.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The permit: the allowed target, and the rule that allowed it.
    pub fn permit(&self) -> &Permit {
        &self.permit
    }

    /// The result of the content checks.
    pub fn clearance(&self) -> &Clearance {
        &self.clearance
    }

    /// Splits the request into its parts, for sending.
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
#[must_use = "a clearance is required by the next stage"]
#[derive(Debug, PartialEq, Eq)]
pub struct Clearance {
    checks: usize,
    modified_by: Vec<RuleName>,
}

impl Clearance {
    /// Clears content that every check allowed or changed; otherwise returns the first other
    /// verdict. An empty list is refused, because it is probably a bug: a gate without checks
    /// calls [`nothing_configured`](Self::nothing_configured).
    pub fn from_checks(verdicts: &[Verdict]) -> Result<Self, Verdict> {
        if verdicts.is_empty() {
            let denial = Denial::new(Reason::Internal, "proof:clearance");
            return Err(denial.with_evidence("no content check was made").into());
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

    /// The clearance of content for which no check is configured. Audit records distinguish it
    /// from checked content.
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

    /// The rules that changed the content.
    pub fn modified_by(&self) -> &[RuleName] {
        &self.modified_by
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::allowlist::{Allowlist, HostRule, Target};
    use crate::breaker::{Breaker, BreakerConfig, Ticket, UpstreamOutcome};
    use crate::bucket::{Rate, TokenBucket};
    use crate::clock::{Tick, UnixMillis};
    use crate::endpoint::Method;
    use crate::host::{Host, HostPattern};
    use crate::id::SandboxId;
    use crate::identity::{RegistrationLookup, identify};
    use crate::path::CleanPath;
    use crate::registration::{AuthMode, Registration};
    use crate::verdict::{Edits, Grant, Modification, Question};

    fn identity(id: &str) -> Identity {
        let row = Registration {
            id: SandboxId::parse(id).unwrap(),
            ip: None,
            repos: Vec::new(),
            auth_mode: AuthMode::User,
            credentials: Vec::new(),
            created: UnixMillis::new(0),
            expires: UnixMillis::new(1),
            metadata: serde_json::Map::new(),
        };
        identify(
            RegistrationLookup::Found(Arc::new(row)),
            None,
            UnixMillis::new(0),
        )
        .unwrap()
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
    fn request_after_all_stages_has_all_proofs() {
        let permitted = admitted("a").permit(permit("a")).unwrap();
        let cleared = permitted.clear(Clearance::nothing_configured());
        assert_eq!(cleared.request(), &"request");
        assert_eq!(cleared.identity().sandbox().as_str(), "a");
        assert!(!cleared.clearance().is_checked());
        let parts = cleared.into_parts();
        assert_eq!(parts.permit.target().port, 443);
        // Another breaker ignores the ticket.
        Breaker::new(0).settle(
            &BreakerConfig::default(),
            parts.admission,
            UpstreamOutcome::Success,
            Tick::default(),
        );
    }

    #[test]
    fn permit_for_another_sandbox_is_refused_and_request_returned() {
        let misused = admitted("a").permit(permit("b")).unwrap_err();
        assert_eq!(misused.denial.reason, Reason::Internal);
        let (request, _pass) = misused.request.release();
        assert_eq!(request, "request");
    }

    #[test]
    fn content_is_cleared_only_if_every_check_allows() {
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
