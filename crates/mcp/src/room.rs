//! Bodies of requests, and how many large ones there may be at a time.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Body;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::answer::Broken;
use crate::rpc::LONGEST;

/// A body of more bytes is a large one.
const LARGE: usize = 256 * 1024;

/// Large bodies that are read and answered at a time.
const MOST_LARGE: usize = 32;

/// How long a client may take to send a body.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// Room for large bodies; who finds none waits.
#[derive(Debug)]
pub struct Room(Semaphore);

/// A body did not come, or is too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unread;

impl Default for Room {
    fn default() -> Self {
        Self(Semaphore::new(MOST_LARGE))
    }
}

impl Room {
    /// All of a body, and the place it has if it is a large one.
    pub async fn read<B>(&self, mut body: B) -> Result<(Bytes, Option<SemaphorePermit<'_>>), Unread>
    where
        B: Body<Data = Bytes> + Send + Unpin,
        B::Error: Into<Broken>,
    {
        let all = async {
            let (mut all, mut place) = (Pieces::default(), None);
            while let Some(frame) = body.frame().await {
                let Ok(frame) = frame else { return Err(Unread) };
                let Ok(data) = frame.into_data() else {
                    continue;
                };
                let length = all.length() + data.len();
                if length > LONGEST {
                    return Err(Unread);
                }
                if length > LARGE && place.is_none() {
                    place = Some(self.0.acquire().await.map_err(|_| Unread)?);
                }
                all.push(data);
            }
            Ok((all.whole(), place))
        };
        tokio::time::timeout(BODY_TIMEOUT, all)
            .await
            .unwrap_or(Err(Unread))
    }
}

/// What came of a body. Most are one piece, which is not copied.
#[derive(Default)]
struct Pieces {
    first: Bytes,
    all: BytesMut,
}

impl Pieces {
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

    fn whole(self) -> Bytes {
        if self.all.is_empty() {
            self.first
        } else {
            self.all.freeze()
        }
    }
}
