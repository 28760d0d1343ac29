//! Mirrors: repositories whose upstream is reached with a key that no sandbox ever has.
//!
//! ```text
//!   agent's git ── upload-pack ──▶ mirror ◀── git fetch, with the key ──── upstream
//!              └── receive-pack ─▶ rules, reader of objects ──▶ upstream's own receive-pack
//! ```
//! What is fetched comes from the mirror, once that is what upstream has. A push is judged
//! like any other and then told to upstream in the client's own words; what is heard back is
//! upstream's answer, and the mirror learns of it with the next fetch.
//!
//! Upstream is spoken to by the system's git and ssh, at an address that the dialer has
//! checked. Whatever reads what an agent sends has neither the key nor a way to it.

pub mod output;
pub mod program;
pub mod room;
pub mod stale;
mod upkeep;
pub mod upstream;

use std::collections::BTreeMap;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use config::Settings;
use config::section::git;
use tokio::io::AsyncWriteExt;
use tokio::process::Child;

use self::output::Output;
use self::program::{Git, is_there};
use self::room::{Room, Rooms, Usage, name_of};
use self::stale::Stale;
use self::upkeep::GONE;
use self::upstream::{Asking, KEPT, Upstream};

/// Refs of upstream that are mirrored.
const MIRRORED: [&str; 2] = ["refs/heads/*", "refs/tags/*"];

/// For how long what a client was told is true enough to give it what it then asks for.
const FRESH_FOR: Duration = Duration::from_secs(60);

/// All mirrors of a gate, by name.
#[derive(Debug)]
pub struct Mirrors {
    each: Mutex<BTreeMap<String, Arc<Mirror>>>,
    rooms: Rooms,
    directory: PathBuf,
}

/// One mirrored upstream.
#[derive(Debug)]
pub struct Mirror {
    settings: git::MirrorSettings,
    git: Git,
    room: Arc<Room>,
    /// How many fetches have begun.
    begun: AtomicU64,
    /// The last fetch that ended.
    last: Mutex<Option<Last>>,
}

/// How old an answer may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Age {
    /// What upstream has now.
    Now,
    /// What upstream had when it was last asked, a moment ago.
    Recent,
}

/// A fetch that ended.
#[derive(Clone, Debug)]
struct Last {
    number: u64,
    at: Instant,
    result: Result<(), Stale>,
}

impl Mirrors {
    /// Mirrors that live in `directory`, which is made. Keys that a gate left there when it
    /// was killed are removed, and what it was about to remove.
    pub fn open(directory: &Path) -> std::io::Result<Self> {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)?;
        for entry in std::fs::read_dir(directory)? {
            let entry = entry?;
            let name = entry.file_name();
            if name.as_encoded_bytes().starts_with(KEPT.as_bytes()) {
                std::fs::remove_file(entry.path())?;
            } else if name.as_encoded_bytes().starts_with(GONE.as_bytes()) {
                std::fs::remove_dir_all(entry.path())?;
            }
        }
        Ok(Self {
            each: Mutex::default(),
            rooms: Rooms::default(),
            directory: directory.to_owned(),
        })
    }

    /// What is not installed here although the configured mirrors need it. Looks for programs,
    /// so it blocks.
    pub fn lacking(settings: &Settings) -> Option<String> {
        let mirrors = &settings.git.mirrors;
        let lacks = |program: &str, whose: &str| {
            format!("{whose} are unavailable: {program} is not installed where the gate runs")
        };
        if !mirrors.is_empty() && !is_there("git") {
            return Some(lacks("git", "git mirrors"));
        }
        let by_ssh = mirrors.iter().any(git::MirrorSettings::is_ssh);
        (by_ssh && !is_there("ssh")).then(|| lacks("ssh", "git mirrors that are reached by ssh"))
    }

    /// Where keys are kept while they are used.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The mirror that the operator configured so.
    pub fn find(&self, wanted: &git::MirrorSettings) -> Arc<Mirror> {
        let mut each = self.each.lock().unwrap_or_else(PoisonError::into_inner);
        let known = each.get(&wanted.name);
        if let Some(known) = known.filter(|known| known.settings == *wanted) {
            return Arc::clone(known);
        }
        let mirror = Arc::new(Mirror::new(wanted.clone(), self));
        each.insert(wanted.name.clone(), Arc::clone(&mirror));
        mirror
    }
}

impl Mirror {
    fn new(settings: git::MirrorSettings, all: &Mirrors) -> Self {
        let name = name_of(&settings);
        Self {
            git: Git::new(&all.directory.join(&name)),
            room: all.rooms.find(&name),
            settings,
            begun: AtomicU64::new(0),
            last: Mutex::default(),
        }
    }

    /// Its name, as the operator writes it.
    pub fn name(&self) -> &str {
        &self.settings.name
    }

    /// What the operator says of it.
    pub fn settings(&self) -> &git::MirrorSettings {
        &self.settings
    }

    /// Makes the mirror what upstream has. Of those who wait at the same time, one fetches:
    /// whatever began after somebody came is fresh enough for them.
    pub(crate) async fn refresh(&self, asking: &Asking<'_>) -> Result<(), Stale> {
        let came = self.begun.load(Ordering::SeqCst);
        // The semaphore is never closed.
        let _turn = self.room.turn.acquire().await;
        if let Some(last) = self.last().filter(|last| last.number > came) {
            return last.result;
        }
        let number = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let result = self.fetch(asking).await;
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(Last {
            number,
            at: Instant::now(),
            result: result.clone(),
        });
        result
    }

    /// The same for a client that was told a moment ago what there is. One that was not, or
    /// long ago, has to wait.
    pub(crate) async fn refresh_if_old(&self, asking: &Asking<'_>) -> Result<(), Stale> {
        match self.last() {
            Some(last) if last.result.is_ok() && last.at.elapsed() < FRESH_FOR => Ok(()),
            _ => self.refresh(asking).await,
        }
    }

    fn last(&self) -> Option<Last> {
        let last = self.last.lock();
        last.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The answer to a question of git's that the gate asks itself.
    pub async fn ask(
        &self,
        asking: &Asking<'_>,
        question: Vec<u8>,
        age: Age,
    ) -> Result<Output, Stale> {
        match age {
            Age::Now => self.refresh(asking).await?,
            Age::Recent => self.refresh_if_old(asking).await?,
        }
        self.answer(question.into(), Some("version=2")).await
    }

    /// Begins to serve a fetch. The directory is in use until that ends.
    pub(crate) async fn upload_pack(
        &self,
        arguments: &[&str],
        protocol: Option<&'static str>,
    ) -> Result<(Child, Usage), Stale> {
        let usage = self.room.enter().await;
        Ok((self.git.upload_pack(arguments, protocol)?, usage))
    }

    pub(crate) async fn answer(
        &self,
        question: Bytes,
        protocol: Option<&'static str>,
    ) -> Result<Output, Stale> {
        let (mut child, usage) = self.upload_pack(&["--stateless-rpc"], protocol).await?;
        let stdin = child.stdin.take();
        tokio::spawn(async move {
            if let Some(mut stdin) = stdin {
                // A program that has heard enough hangs up.
                let _ = stdin.write_all(&question).await;
            }
        });
        Ok(Output::new(child, b"").using(usage))
    }

    async fn fetch(&self, asking: &Asking<'_>) -> Result<(), Stale> {
        let _usage = self.room.enter().await;
        let upstream = Upstream::reach(&self.settings, asking).await?;
        let theirs = Refs::read(&self.git.list(&upstream).await?).ok_or_else(Stale::refs)?;
        if self.git.exists().await {
            self.git.tidy(self.room.is_repacked()).await;
        } else {
            self.git.init(theirs.object_format()).await?;
        }
        let ours = self.git.refs().await?;
        if Refs::read(&ours).is_none_or(|ours| ours.each != theirs.each) {
            self.git.fetch(&upstream, &MIRRORED).await?;
        }
        if let Some(head) = &theirs.head {
            self.git.point_head(head).await?;
        }
        Ok(())
    }
}

/// A list of refs.
#[derive(Debug, Default, PartialEq, Eq)]
struct Refs {
    /// Names and what they point to.
    each: BTreeMap<Vec<u8>, Vec<u8>>,
    /// What HEAD stands for.
    head: Option<String>,
}

impl Refs {
    /// Reads `id<tab or space>name` lines, and `ref: name<tab>HEAD` where HEAD stands for
    /// something. What is below neither branches nor tags is left out, and what tags stand
    /// for.
    fn read(list: &[u8]) -> Option<Self> {
        let mut refs = Self::default();
        for line in list.split(|byte| *byte == b'\n') {
            if line.is_empty() {
                continue;
            }
            let at = line.iter().rposition(|byte| matches!(byte, b'\t' | b' '))?;
            let (value, name) = (line.get(..at)?, line.get(at + 1..)?);
            if let Some(target) = value.strip_prefix(b"ref: ") {
                if name == b"HEAD" {
                    refs.head = Some(String::from_utf8(target.to_vec()).ok()?);
                }
                continue;
            }
            let is_id = matches!(value.len(), 40 | 64) && value.iter().all(u8::is_ascii_hexdigit);
            if !is_id {
                return None;
            }
            let mirrored = name.starts_with(b"refs/heads/") || name.starts_with(b"refs/tags/");
            if mirrored && !name.ends_with(b"^{}") {
                refs.each.insert(name.to_vec(), value.to_vec());
            }
        }
        Some(refs)
    }

    /// How upstream names its objects, as far as it has any.
    fn object_format(&self) -> &'static str {
        match self.each.values().next().map(Vec::len) {
            Some(64) => "sha256",
            _ => "sha1",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_a_killed_gate_left_are_removed_and_mirrors_stay() {
        let directory = tempfile::tempdir().unwrap();
        let (key, kept) = (directory.path().join(".kept-1"), directory.path().join("a"));
        std::fs::write(&key, "secret").unwrap();
        std::fs::create_dir(&kept).unwrap();
        Mirrors::open(directory.path()).unwrap();
        assert!(!key.exists() && kept.exists());
    }

    #[test]
    fn a_list_of_refs_is_read_as_git_prints_it() {
        let one = "1".repeat(40);
        let listed = format!(
            "ref: refs/heads/trunk\tHEAD\n{one}\tHEAD\n{one}\trefs/heads/trunk\n\
             {one}\trefs/tags/v1\n{one}\trefs/tags/v1^{{}}\n{one}\trefs/pull/1/head\n"
        );
        let theirs = Refs::read(listed.as_bytes()).unwrap();
        assert_eq!(theirs.head.as_deref(), Some("refs/heads/trunk"));
        let ours = format!("{one} refs/heads/trunk\n{one} refs/tags/v1\n");
        assert_eq!(Refs::read(ours.as_bytes()).unwrap().each, theirs.each);
        assert_eq!(theirs.object_format(), "sha1");
        let long = format!("{}\trefs/heads/a\n", "2".repeat(64));
        let long = Refs::read(long.as_bytes()).unwrap();
        assert_eq!(long.object_format(), "sha256");
        assert_eq!(Refs::read(b""), Some(Refs::default()));
        for bad in [
            "refs/heads/a",
            "abc\trefs/heads/a",
            "ref: \u{ff}",
            "fatal: x",
        ] {
            assert_eq!(Refs::read(bad.as_bytes()), None, "{bad}");
        }
    }
}
