//! Content of results: texts, resources, a minimal image and a minimal sound.

use serde_json::{Value, json};

/// One red pixel, PNG.
pub(crate) const PNG: &str = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg==";

/// A WAV file without samples.
pub(crate) const WAV: &str = "UklGRiQAAABXQVZFZm10IBAAAAABAAEAQB8AAIA+AAACABAAZGF0YQAAAAA=";

/// The image as content.
pub(crate) fn image() -> Value {
    json!({"type": "image", "data": PNG, "mimeType": "image/png"})
}

/// A text as content.
pub(crate) fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

/// A resource as content.
pub(crate) fn resource(uri: &str, kind: &str, text: &str) -> Value {
    json!({"type": "resource", "resource": {"uri": uri, "mimeType": kind, "text": text}})
}
