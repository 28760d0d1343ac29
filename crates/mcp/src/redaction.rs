//! Applies the redactions of a policy to a message, also to a call that is wrapped in another call.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use policy::redaction::{BadRedaction, Pattern, Redaction};
use policy::splice::{self, InvalidJson};
use serde_json::Value;

/// Maximum number of cached compiled expressions.
const MAX_PATTERNS: usize = 256;

/// A message with more bytes is redacted on a blocking thread.
const LARGE_MESSAGE_BYTES: usize = 16 * 1024;

/// Encoding of the arguments of a wrapped call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wrapping {
    /// A JSON object.
    Plain,
    /// A string that contains JSON.
    Text,
}

/// Cache of compiled regular expressions. Cloning shares the cache.
#[derive(Clone, Debug, Default)]
pub struct PatternCache(Arc<Mutex<HashMap<String, Option<Pattern>>>>);

impl PatternCache {
    /// Compiles the expression `text`; none if it is invalid.
    pub fn compile(&self, text: &str) -> Option<Pattern> {
        let cached = |patterns: &Self| {
            let cache = patterns.0.lock().unwrap_or_else(PoisonError::into_inner);
            cache.get(text).cloned()
        };
        if let Some(cached) = cached(self) {
            return cached;
        }
        let compiled = Pattern::compile(text);
        let mut cache = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Bounds the cache for policies that generate expressions.
        if cache.len() >= MAX_PATTERNS {
            cache.clear();
        }
        cache.insert(text.to_owned(), compiled.clone());
        compiled
    }
}

/// Applies a policy's `outputs` to `text`, which is wrapped as `wrappings` describe. None if the
/// text does not change.
pub(crate) async fn apply(
    patterns: &PatternCache,
    outputs: Value,
    text: &str,
    wrappings: &[Wrapping],
) -> Result<Option<String>, BadRedaction> {
    let large = text.len() > LARGE_MESSAGE_BYTES;
    let (patterns, text, wrappings) = (patterns.clone(), text.to_owned(), wrappings.to_vec());
    let work = move || {
        let redaction = Redaction::read(&outputs, |text| patterns.compile(text))?;
        redact_wrapped(&redaction, &text, &wrappings)
    };
    if !large {
        return work();
    }
    let worked = tokio::task::spawn_blocking(work).await;
    worked.unwrap_or_else(|error| Err(BadRedaction::Shape(error.to_string())))
}

/// Redacts the innermost call, which is the only part that the policy received. The wrapping text
/// is searched for the redaction's patterns.
fn redact_wrapped(
    redaction: &Redaction,
    text: &str,
    wrappings: &[Wrapping],
) -> Result<Option<String>, BadRedaction> {
    let Some((wrapping, inner)) = wrappings.split_first() else {
        return redaction.apply(text);
    };
    let wrapped = splice::find(text, &["arguments"])?.ok_or(InvalidJson)?;
    let plain = match wrapping {
        Wrapping::Plain => wrapped.to_owned(),
        Wrapping::Text => {
            let arguments = splice::find(wrapped, &["arguments"])?.ok_or(InvalidJson)?;
            let arguments: String = serde_json::from_str(arguments).map_err(|_| InvalidJson)?;
            splice::set(wrapped, &["arguments"], &arguments)?
        }
    };
    let changed = redact_wrapped(redaction, &plain, inner)?;
    let outer = redaction.apply_rules(&splice::set(text, &["arguments"], "null")?)?;
    if changed.is_none() && outer.is_none() {
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
    let outer = outer.as_deref().unwrap_or(text);
    Ok(Some(splice::set(outer, &["arguments"], &wrapped)?))
}
