//! Body type of requests and responses, shared by all stages.

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Empty, Full};

pub use policy::ports::{BodyError, MessageBody};

/// An empty body.
pub fn empty() -> MessageBody {
    Empty::new().map_err(|never| match never {}).boxed_unsync()
}

/// A body from memory.
pub fn full(bytes: impl Into<Bytes>) -> MessageBody {
    Full::new(bytes.into())
        .map_err(|never| match never {})
        .boxed_unsync()
}

/// Reads a whole body of at most `max` bytes.
pub async fn read_whole(mut body: MessageBody, max: usize) -> Result<Bytes, BodyError> {
    let mut all = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let data = frame?.into_data().unwrap_or_default();
        if all.len().saturating_add(data.len()) > max {
            return Err("the body is too large".into());
        }
        all.extend_from_slice(&data);
    }
    Ok(all.freeze())
}
