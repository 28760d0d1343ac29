//! Spool: unnamed temporary files for bodies that wait for a verdict, within quotas.

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

use crate::body::BodyError;

/// Spooled bytes per sandbox: two of the largest pushes.
const MAX_PER_SANDBOX: u64 = 1 << 30;

/// Spooled bytes of all sandboxes.
const MAX_TOTAL: u64 = 4 << 30;

/// Size of one read.
const CHUNK_SIZE: usize = 64 * 1024;

/// The spool directory and its quota.
#[derive(Debug)]
pub struct Spools {
    dir: PathBuf,
    all: Arc<SpoolQuota>,
}

/// Bytes that are spooled, and their limit.
#[derive(Debug)]
pub struct SpoolQuota {
    used_bytes: AtomicU64,
    max: u64,
}

/// A spooled body. Dropping it frees its quota.
#[derive(Debug)]
pub struct Spool {
    file: File,
    length: u64,
    quotas: [Arc<SpoolQuota>; 2],
}

impl Spools {
    /// Files go into `dir`, which is created on demand.
    pub fn new(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
            all: Arc::new(SpoolQuota::new(MAX_TOTAL)),
        }
    }

    /// Opens an empty spool that counts against the quota `own`. Blocks.
    pub fn open(&self, own: &Arc<SpoolQuota>) -> io::Result<Spool> {
        std::fs::create_dir_all(&self.dir)?;
        Ok(Spool {
            file: tempfile::tempfile_in(&self.dir)?,
            length: 0,
            quotas: [Arc::clone(&self.all), Arc::clone(own)],
        })
    }
}

impl SpoolQuota {
    fn new(max: u64) -> Self {
        Self {
            used_bytes: AtomicU64::new(0),
            max,
        }
    }

    /// The quota of one sandbox.
    pub fn for_sandbox() -> Arc<Self> {
        Arc::new(Self::new(MAX_PER_SANDBOX))
    }

    /// Number of spooled bytes.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Acquire)
    }

    fn reserve(&self, bytes: u64) -> bool {
        let reserved = self
            .used_bytes
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |level| {
                let level = level.checked_add(bytes)?;
                (level <= self.max).then_some(level)
            });
        reserved.is_ok()
    }

    fn release(&self, bytes: u64) {
        self.used_bytes.fetch_sub(bytes, Ordering::AcqRel);
    }
}

/// A spool quota is exhausted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the spool quota is exhausted")]
pub struct SpoolFull;

impl Spool {
    /// Appends bytes. Blocks.
    pub fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let more = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        let [all, own] = &self.quotas;
        if !own.reserve(more) {
            return Err(io::Error::other(SpoolFull));
        }
        if !all.reserve(more) {
            own.release(more);
            return Err(io::Error::other(SpoolFull));
        }
        self.length += more;
        self.file.write_all(bytes)
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.length
    }

    /// Whether the spool is empty.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Another handle to the file. All handles share the file position.
    pub fn file(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Converts the spool into a body.
    pub fn into_body(self) -> SpoolBody {
        SpoolBody {
            spool: Arc::new(self),
            at: 0,
            reading: None,
        }
    }
}

impl Drop for Spool {
    fn drop(&mut self) {
        for quota in &self.quotas {
            quota.release(self.length);
        }
    }
}

/// A body that reads a spool, on a blocking thread.
pub struct SpoolBody {
    spool: Arc<Spool>,
    at: u64,
    reading: Option<JoinHandle<io::Result<Bytes>>>,
}

impl SpoolBody {
    fn left(&self) -> u64 {
        self.spool.length - self.at
    }
}

fn read(spool: &Spool, at: u64, length: usize) -> io::Result<Bytes> {
    let mut piece = vec![0; length];
    spool.file.read_exact_at(&mut piece, at)?;
    Ok(piece.into())
}

impl Body for SpoolBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        if self.left() == 0 {
            return Poll::Ready(None);
        }
        let (spool, at) = (Arc::clone(&self.spool), self.at);
        let length = usize::try_from(self.left()).map_or(CHUNK_SIZE, |left| left.min(CHUNK_SIZE));
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

    fn spools(max: u64) -> (tempfile::TempDir, Spools) {
        let dir = tempfile::tempdir().unwrap();
        let spools = Spools {
            dir: dir.path().join("spool"),
            all: Arc::new(SpoolQuota::new(max)),
        };
        (dir, spools)
    }

    fn is_full(result: io::Result<()>) -> bool {
        let error = result.unwrap_err();
        error.get_ref().is_some_and(|inner| inner.is::<SpoolFull>())
    }

    #[tokio::test]
    async fn spooled_bytes_are_read_back_and_no_file_name_remains() {
        let (dir, spools) = spools(1 << 20);
        let mut spool = spools.open(&SpoolQuota::for_sandbox()).unwrap();
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
        assert_eq!(spools.all.used_bytes(), 0);
    }

    #[test]
    fn quotas_limit_spools_and_are_freed_on_drop() {
        let (_dir, spools) = spools(10);
        let (one, two) = (Arc::new(SpoolQuota::new(6)), Arc::new(SpoolQuota::new(6)));
        let mut first = spools.open(&one).unwrap();
        first.append(&[0; 6]).unwrap();
        assert!(
            is_full(first.append(&[0])),
            "the sandbox quota is exhausted"
        );
        let mut second = spools.open(&two).unwrap();
        second.append(&[0; 4]).unwrap();
        assert!(is_full(second.append(&[0])), "the total quota is exhausted");
        drop(first);
        second.append(&[0; 2]).unwrap();
        drop(second);
        let levels = [&one, &two, &spools.all].map(|quota| quota.used_bytes());
        assert_eq!(levels, [0, 0, 0]);
    }
}
