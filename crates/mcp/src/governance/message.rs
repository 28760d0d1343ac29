//! A message of a tool as policy bundles read and change it.

use std::borrow::Cow;
use std::sync::Arc;

use async_trait::async_trait;
use decide::bundles::BundleSubject;
use decide::question::digest;
use policy::reason::Reason;
use policy::rego::Said;
use policy::verdict::{Denial, Digest, RuleName};
use serde_json::Value;

use super::Asked;
use super::input::{self, Parts, Subject};
use crate::redaction::{self, Patterns};

/// A message, read.
pub(super) struct PolicyMessage<'a> {
    asked: &'a Asked<'a>,
    patterns: &'a Patterns,
    subject: Subject<'a>,
}

impl<'a> PolicyMessage<'a> {
    pub(super) async fn read(asked: &'a Asked<'a>, patterns: &'a Patterns) -> Result<Self, Denial> {
        Ok(Self {
            asked,
            patterns,
            subject: Subject::read(asked, Parts::of(asked)).await?,
        })
    }

    /// The name of the tool or prompt that is asked for.
    pub(super) fn name(&self) -> &str {
        &self.subject.call.name
    }
}

#[async_trait]
impl BundleSubject for PolicyMessage<'_> {
    fn input(&self) -> &Arc<Value> {
        &self.subject.input
    }

    fn digest(&self) -> Digest {
        digest([self.subject.input.to_string().as_bytes()])
    }

    fn is_large(&self) -> bool {
        self.subject.large
    }

    /// A policy that wants something redacted has not allowed it as it is: where that cannot be
    /// done, the message is refused, even where failures pass.
    async fn propose(
        &self,
        rule: RuleName,
        outputs: Value,
        _: Said,
    ) -> Result<Option<String>, Denial> {
        let (target, wrappings) = self.subject.target(self.asked.moment);
        let redacted = redaction::apply(self.patterns, outputs, target, wrappings).await;
        redacted.map_err(|fault| {
            Denial::new(Reason::RegoDenied, rule)
                .saying("A policy wants this redacted, and that cannot be done.")
                .because(fault.to_string())
        })
    }

    async fn accept(&mut self, content: String) -> Result<(), Denial> {
        let parts = self.subject.parts.clone();
        let parts = parts.with(self.asked.moment, Cow::Owned(content));
        self.subject = Subject::read(self.asked, parts).await?;
        Ok(())
    }

    fn changed(&self) -> Result<Option<String>, Denial> {
        let moment = self.asked.moment;
        let old = Parts::of(self.asked).into_target(moment);
        match self.subject.parts.clone().into_target(moment) {
            // Also where one bundle takes back what another has changed.
            new if new == old => Ok(None),
            Some(text) => Ok(Some(text.into_owned())),
            None => Err(input::unreadable("nothing is left of it")),
        }
    }
}
