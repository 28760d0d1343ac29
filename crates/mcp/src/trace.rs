//! One trace from a hook through the bridge to the tool, in the words of W3C Trace Context.
//!
//! Without a collector nobody makes spans; a trace that somebody else began still passes
//! through to the tool.

use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// The header, and the field of `_meta`, that name a span.
pub const TRACEPARENT: &str = "traceparent";

/// Makes `span` a child of the span that `parent` names.
pub fn continue_from(span: &Span, parent: Option<&str>) {
    let Some(parent) = parent.and_then(read) else {
        return;
    };
    let parent = opentelemetry::Context::new().with_remote_span_context(parent);
    if let Err(error) = span.set_parent(parent) {
        tracing::debug!(%error, "a span has no place in its trace");
    }
}

/// The name of `span`, where somebody collects spans.
pub fn name_of(span: &Span) -> Option<String> {
    let context = span.context();
    let own = context.span().span_context().clone();
    own.is_valid().then(|| write(&own))
}

/// `00-<32 hex>-<16 hex>-<2 hex>`, as version 00 of the standard has it. A later version may
/// say more behind that.
fn read(text: &str) -> Option<SpanContext> {
    let mut parts = text.trim().split('-');
    let mut part = |length: usize| {
        let part = parts.next()?;
        let is_hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        (part.len() == length && part.bytes().all(is_hex)).then_some(part)
    };
    let (version, trace, span, flags) = (part(2)?, part(32)?, part(16)?, part(2)?);
    if version == "ff" || (version == "00" && parts.next().is_some()) {
        return None;
    }
    let flags = u8::from_str_radix(flags, 16).ok()?;
    let context = SpanContext::new(
        TraceId::from_hex(trace).ok()?,
        SpanId::from_hex(span).ok()?,
        TraceFlags::new(flags) & TraceFlags::SAMPLED,
        true,
        TraceState::default(),
    );
    context.is_valid().then_some(context)
}

fn write(context: &SpanContext) -> String {
    format!(
        "00-{}-{}-{:02x}",
        context.trace_id(),
        context.span_id(),
        context.trace_flags().to_u8()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_standard_calls_a_name_is_one() {
        let good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        assert_eq!(
            read(good).map(|context| write(&context)).as_deref(),
            Some(good)
        );
        let later = "cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more";
        assert!(read(later).is_some());
        for bad in [
            "",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319-b7ad6b7169203331-01",
        ] {
            assert!(read(bad).is_none(), "{bad}");
        }
    }
}
