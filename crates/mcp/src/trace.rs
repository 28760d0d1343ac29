//! W3C Trace Context: one trace from a hook through the bridge to the tool.
//!
//! Without a collector this gate creates no spans; the trace of a client is still passed to the
//! tool.

use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// Name of the header and of the `_meta` field that identify a span.
pub const TRACEPARENT: &str = "traceparent";

/// Makes `span` a child of the span that the traceparent `parent` identifies.
pub fn continue_from(span: &Span, parent: Option<&str>) {
    let Some(parent) = parent.and_then(parse_traceparent) else {
        return;
    };
    let parent = opentelemetry::Context::new().with_remote_span_context(parent);
    if let Err(error) = span.set_parent(parent) {
        tracing::debug!(%error, "mcp span not attached to its parent trace");
    }
}

/// The traceparent of `span`; none if no collector is configured.
pub fn traceparent_of(span: &Span) -> Option<String> {
    let context = span.context();
    let own = context.span().span_context().clone();
    own.is_valid().then(|| format_traceparent(&own))
}

/// Parses `00-<32 hex>-<16 hex>-<2 hex>`, version 00 of the standard. Later versions may append
/// more fields.
fn parse_traceparent(text: &str) -> Option<SpanContext> {
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

fn format_traceparent(context: &SpanContext) -> String {
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
    fn traceparent_is_parsed_as_the_standard_requires() {
        let good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        assert_eq!(
            parse_traceparent(good)
                .map(|context| format_traceparent(&context))
                .as_deref(),
            Some(good)
        );
        let later = "cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more";
        assert!(parse_traceparent(later).is_some());
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
            assert!(parse_traceparent(bad).is_none(), "{bad}");
        }
    }
}
