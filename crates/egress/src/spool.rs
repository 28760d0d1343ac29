//! Where a push waits for its verdict: a file without a name, and room for only so many.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use tokio::task::JoinHandle;

use crate::body::Broken;

/// What one sandbox may have waiting: two of the largest pushes.
const MOST_OF_ONE: u64 = 1 << 30;

/// What all may have waiting.
const MOST_OF_ALL: u64 = 4 << 30;

/// How much is read at a time.
const PIECE: usize = 64 * 1024;

/// The directory of the files, and how much is in them.
#[derive(Debug)]
pub struct Spools {
    dir: PathBuf,
    all: Arc<SpoolQuota>,
}

/// How much is waiting, and how much may.
#[derive(Debug)]
pub struct SpoolQuota {
    level: AtomicU64,
    most: u64,
}

/// One push, waiting. Its room is free when it is dropped.
#[derive(Debug)]
pub struct Spool {
    file: File,
    length: u64,
    tanks: [Arc<SpoolQuota>; 2],
}

impl Spools {
    /// Files go into `dir`, which is made when it is needed.
    pub fn new(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
            all: Arc::new(SpoolQuota::new(MOST_OF_ALL)),
        }
    }

    /// An empty one, on the account of `own`. Blocks.
    pub fn open(&self, own: &Arc<SpoolQuota>) -> io::Result<Spool> {
        std::fs::create_dir_all(&self.dir)?;
        Ok(Spool {
            file: tempfile::tempfile_in(&self.dir)?,
            length: 0,
            tanks: [Arc::clone(&self.all), Arc::clone(own)],
        })
    }
}

impl SpoolQuota {
    fn new(most: u64) -> Self {
        Self {
            level: AtomicU64::new(0),
            most,
        }
    }

    /// The account of one sandbox.
    pub fn of_one() -> Arc<Self> {
        Arc::new(Self::new(MOST_OF_ONE))
    }

    /// How many bytes are waiting.
    pub fn level(&self) -> u64 {
        self.level.load(Ordering::Acquire)
    }

    fn fill(&self, bytes: u64) -> bool {
        let filled = self
            .level
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |level| {
                let level = level.checked_add(bytes)?;
                (level <= self.most).then_some(level)
            });
        filled.is_ok()
    }

    fn drain(&self, bytes: u64) {
        self.level.fetch_sub(bytes, Ordering::AcqRel);
    }
}

/// There is no room for more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no room for more pushes at a time")]
pub struct NoRoom;

impl Spool {
    /// Adds to it. Blocks.
    pub fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let more = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        let [all, own] = &self.tanks;
        if !own.fill(more) {
            return Err(io::Error::other(NoRoom));
        }
        if !all.fill(more) {
            own.drain(more);
            return Err(io::Error::other(NoRoom));
        }
        self.length += more;
        self.file.write_all(bytes)
    }

    /// How long it is.
    pub fn len(&self) -> u64 {
        self.length
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Another handle to the file. Where it stands is shared with every other.
    pub fn file(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// The whole of it, as a body.
    pub fn into_body(self) -> Waiting {
        Waiting {
            spool: Arc::new(self),
            at: 0,
            reading: None,
        }
    }
}

impl Drop for Spool {
    fn drop(&mut self) {
        for tank in &self.tanks {
            tank.drain(self.length);
        }
    }
}

/// A spooled push on its way. The file is read where it may block.
pub struct Waiting {
    spool: Arc<Spool>,
    at: u64,
    reading: Option<JoinHandle<io::Result<Bytes>>>,
}

impl Waiting {
    fn left(&self) -> u64 {
        self.spool.length - self.at
    }
}

fn read(spool: &Spool, at: u64, length: usize) -> io::Result<Bytes> {
    let mut piece = vec![0; length];
    spool.file.read_exact_at(&mut piece, at)?;
    Ok(piece.into())
}

impl Body for Waiting {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        if self.left() == 0 {
            return Poll::Ready(None);
        }
        let (spool, at) = (Arc::clone(&self.spool), self.at);
        let length = usize::try_from(self.left()).map_or(PIECE, |left| left.min(PIECE));
        let reading = self
            .reading
            .get_or_insert_with(|| tokio::task::spawn_blocking(move || read(&spool, at, length)));
        let piece = ready!(Pin::new(reading).poll(cx));
        self.reading = None;
        let piece = piece.map_err(io::Error::other).flatten();
        Poll::Ready(Some(match piece {
            Ok(piece) => {
                self.at += u64::try_from(piece.len()).unwrap_or(u64::MAX);
                Ok(Frame::data(piece))
            }
            Err(error) => Err(error.into()),
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.left() == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left())
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    fn spools(most: u64) -> (tempfile::TempDir, Spools) {
        let dir = tempfile::tempdir().unwrap();
        let spools = Spools {
            dir: dir.path().join("spool"),
            all: Arc::new(SpoolQuota::new(most)),
        };
        (dir, spools)
    }

    fn is_full(result: io::Result<()>) -> bool {
        let error = result.unwrap_err();
        error.get_ref().is_some_and(|inner| inner.is::<NoRoom>())
    }

    #[tokio::test]
    async fn what_goes_in_comes_out_and_no_name_is_left() {
        let (dir, spools) = spools(1 << 20);
        let mut spool = spools.open(&SpoolQuota::of_one()).unwrap();
        let bytes: Vec<u8> = (0..200_000_u32).map(|n| n.to_le_bytes()[0]).collect();
        for piece in bytes.chunks(777) {
            spool.append(piece).unwrap();
        }
        let names = std::fs::read_dir(dir.path().join("spool")).unwrap();
        assert_eq!(names.count(), 0);
        let body = spool.into_body();
        assert_eq!(body.size_hint().exact(), Some(200_000));
        let read = body.collect().await.unwrap().to_bytes();
        assert!(read == bytes);
        assert_eq!(spools.all.level(), 0);
    }

    #[test]
    fn there_is_room_for_so_much_and_it_comes_back() {
        let (_dir, spools) = spools(10);
        let (one, two) = (Arc::new(SpoolQuota::new(6)), Arc::new(SpoolQuota::new(6)));
        let mut first = spools.open(&one).unwrap();
        first.append(&[0; 6]).unwrap();
        assert!(is_full(first.append(&[0])), "its own room is used up");
        let mut second = spools.open(&two).unwrap();
        second.append(&[0; 4]).unwrap();
        assert!(is_full(second.append(&[0])), "everybody's room is used up");
        drop(first);
        second.append(&[0; 2]).unwrap();
        drop(second);
        let levels = [&one, &two, &spools.all].map(|tank| tank.level());
        assert_eq!(levels, [0, 0, 0]);
    }
}
