//! What a message carries, in the one type that every stage takes and gives.

use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Empty, Full};
use policy::ports;

/// Why a body ended before its time.
pub type Broken = ports::BodyError;

/// A body on its way through the gate: it streams, whatever is behind it.
pub type Content = ports::Content;

/// A body without a byte.
pub fn empty() -> Content {
    Empty::new().map_err(|never| match never {}).boxed_unsync()
}

/// A body that is already there.
pub fn full(bytes: impl Into<Bytes>) -> Content {
    Full::new(bytes.into())
        .map_err(|never| match never {})
        .boxed_unsync()
}

/// All of a body, if that is not more than `most`.
pub async fn whole(mut body: Content, most: usize) -> Result<Bytes, Broken> {
    let mut all = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let data = frame?.into_data().unwrap_or_default();
        if all.len().saturating_add(data.len()) > most {
            return Err("there is too much of it".into());
        }
        all.extend_from_slice(&data);
    }
    Ok(all.freeze())
}
