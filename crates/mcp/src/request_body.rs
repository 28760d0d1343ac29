//! Reads request bodies and limits how many large bodies are in memory at a time.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Body;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::answer::BodyStreamError;
use crate::rpc::MAX_MESSAGE_BYTES;

/// A body with more bytes counts as large.
const LARGE_BODY_BYTES: usize = 256 * 1024;

/// Maximum number of large bodies that are read and answered at a time.
const MAX_LARGE_BODIES: usize = 32;

/// How long a client may take to send a body.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// Limits the number of large bodies; a further large body waits for a permit.
#[derive(Debug)]
pub struct LargeBodyLimit(Semaphore);

/// The body is incomplete, late or too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadBodyError;

impl Default for LargeBodyLimit {
    fn default() -> Self {
        Self(Semaphore::new(MAX_LARGE_BODIES))
    }
}

impl LargeBodyLimit {
    /// Reads a whole body. A large body comes with its permit, to be held until the answer.
    pub async fn read<B>(
        &self,
        mut body: B,
    ) -> Result<(Bytes, Option<SemaphorePermit<'_>>), ReadBodyError>
    where
        B: Body<Data = Bytes> + Send + Unpin,
        B::Error: Into<BodyStreamError>,
    {
        let all = async {
            let (mut all, mut permit) = (BodyBuffer::default(), None);
            while let Some(frame) = body.frame().await {
                let Ok(frame) = frame else {
                    return Err(ReadBodyError);
                };
                let Ok(data) = frame.into_data() else {
                    continue;
                };
                let length = all.length() + data.len();
                if length > MAX_MESSAGE_BYTES {
                    return Err(ReadBodyError);
                }
                if length > LARGE_BODY_BYTES && permit.is_none() {
                    permit = Some(self.0.acquire().await.map_err(|_| ReadBodyError)?);
                }
                all.push(data);
            }
            Ok((all.into_bytes(), permit))
        };
        tokio::time::timeout(BODY_TIMEOUT, all)
            .await
            .unwrap_or(Err(ReadBodyError))
    }
}

/// The received part of a body. Most bodies are one chunk, which is not copied.
#[derive(Default)]
struct BodyBuffer {
    first: Bytes,
    all: BytesMut,
}

impl BodyBuffer {
    fn length(&self) -> usize {
        self.first.len() + self.all.len()
    }

    fn push(&mut self, data: Bytes) {
        if self.length() == 0 {
            self.first = data;
            return;
        }
        let first = std::mem::take(&mut self.first);
        self.all.extend_from_slice(&first);
        self.all.extend_from_slice(&data);
    }

    fn into_bytes(self) -> Bytes {
        if self.all.is_empty() {
            self.first
        } else {
            self.all.freeze()
        }
    }
}
