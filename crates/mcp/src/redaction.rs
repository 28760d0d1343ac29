//! Redaction of a message, also of one that is wrapped in another.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use policy::redaction::{BadRedaction, Pattern, Redaction};
use policy::splice::{self, NoJson};
use serde_json::Value;

/// Expressions that are kept compiled.
const MOST_PATTERNS: usize = 256;

/// A message of more bytes is changed where it keeps nobody waiting.
const LARGE: usize = 16 * 1024;

/// How the arguments of a wrapped call are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wrapping {
    /// As an object.
    Plain,
    /// As a text that holds JSON.
    Text,
}

/// Expressions, each compiled once. Cloning is cheap.
#[derive(Clone, Debug, Default)]
pub struct Patterns(Arc<Mutex<HashMap<String, Option<Pattern>>>>);

impl Patterns {
    /// The expression `text`; nothing where it is none.
    pub fn compile(&self, text: &str) -> Option<Pattern> {
        let known = |patterns: &Self| {
            let known = patterns.0.lock().unwrap_or_else(PoisonError::into_inner);
            known.get(text).cloned()
        };
        if let Some(known) = known(self) {
            return known;
        }
        let made = Pattern::compile(text);
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A policy that makes up expressions must not make us keep them all.
        if known.len() >= MOST_PATTERNS {
            known.clear();
        }
        known.insert(text.to_owned(), made.clone());
        made
    }
}

/// `text`, wrapped so, as a policy's `outputs` want it; nothing where `text` is so already.
pub(crate) async fn apply(
    patterns: &Patterns,
    outputs: Value,
    text: &str,
    wrappings: &[Wrapping],
) -> Result<Option<String>, BadRedaction> {
    let large = text.len() > LARGE;
    let (patterns, text, wrappings) = (patterns.clone(), text.to_owned(), wrappings.to_vec());
    let work = move || {
        let redaction = Redaction::read(&outputs, |text| patterns.compile(text))?;
        unwrapped(&redaction, &text, &wrappings)
    };
    if !large {
        return work();
    }
    let worked = tokio::task::spawn_blocking(work).await;
    worked.unwrap_or_else(|error| Err(BadRedaction::Shape(error.to_string())))
}

/// Changes the innermost call as the policy wants it, which saw only that, and searches what
/// is wrapped around it.
fn unwrapped(
    redaction: &Redaction,
    text: &str,
    wrappings: &[Wrapping],
) -> Result<Option<String>, BadRedaction> {
    let Some((wrapping, inner)) = wrappings.split_first() else {
        return redaction.apply(text);
    };
    let wrapped = splice::find(text, &["arguments"])?.ok_or(NoJson)?;
    let plain = match wrapping {
        Wrapping::Plain => wrapped.to_owned(),
        Wrapping::Text => {
            let arguments = splice::find(wrapped, &["arguments"])?.ok_or(NoJson)?;
            let arguments: String = serde_json::from_str(arguments).map_err(|_| NoJson)?;
            splice::set(wrapped, &["arguments"], &arguments)?
        }
    };
    let changed = unwrapped(redaction, &plain, inner)?;
    let around = redaction.search(&splice::set(text, &["arguments"], "null")?)?;
    if changed.is_none() && around.is_none() {
        return Ok(None);
    }
    let wrapped = match (changed, wrapping) {
        (None, _) => wrapped.to_owned(),
        (Some(changed), Wrapping::Plain) => changed,
        (Some(changed), Wrapping::Text) => match splice::find(&changed, &["arguments"])? {
            Some(arguments) => {
                let text = Value::from(arguments).to_string();
                splice::set(&changed, &["arguments"], &text)?
            }
            None => changed,
        },
    };
    let around = around.as_deref().unwrap_or(text);
    Ok(Some(splice::set(around, &["arguments"], &wrapped)?))
}
