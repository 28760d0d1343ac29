//! Git mirrors: local copies of repositories whose upstream is reached with the operator's key.
//!
//! ```text
//!   agent's git ── upload-pack ──▶ mirror ◀── git fetch, with the key ──── upstream
//!              └── receive-pack ─▶ rules, pack reader ──▶ upstream's own receive-pack
//! ```
//! A fetch is served from the mirror after the mirror was refreshed from upstream. A push is
//! decided like any other push and then sent to upstream unchanged; the client receives
//! upstream's response, and the next refresh brings the new refs into the mirror.
//!
//! The gate connects to upstream with the system's git and ssh, at an address that the dialer
//! has checked. The processes that read an agent's input have no access to the key.

pub mod directory;
pub mod error;
pub mod git_command;
mod maintenance;
pub mod output;
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

use self::directory::{MirrorDirectories, MirrorDirectory, UsageGuard, directory_name};
use self::error::MirrorError;
use self::git_command::{BareRepository, is_installed};
use self::maintenance::REMOVED_PREFIX;
use self::output::ChildOutput;
use self::upstream::{MirrorUpstream, TEMP_FILE_PREFIX, UpstreamAccess};

/// Upstream refs that are mirrored.
const MIRRORED_REFS: [&str; 2] = ["refs/heads/*", "refs/tags/*"];

/// How long a refresh is recent enough for the second request of a fetch, which follows the ref
/// advertisement.
const MAX_REFRESH_AGE: Duration = Duration::from_secs(60);

/// All mirrors of the gate.
#[derive(Debug)]
pub struct Mirrors {
    /// Mirrors by name.
    by_name: Mutex<BTreeMap<String, Arc<Mirror>>>,
    directories: MirrorDirectories,
    directory: PathBuf,
}

/// One mirrored upstream.
#[derive(Debug)]
pub struct Mirror {
    settings: git::MirrorSettings,
    git: BareRepository,
    directory: Arc<MirrorDirectory>,
    /// Number of refreshes that have begun.
    refreshes_begun: AtomicU64,
    /// The last finished refresh.
    last_refresh: Mutex<Option<FinishedRefresh>>,
}

/// Maximum age of the mirror's content for a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaxAge {
    /// The mirror is refreshed first.
    Zero,
    /// A refresh within the last minute is sufficient.
    OneMinute,
}

/// A finished refresh.
#[derive(Clone, Debug)]
struct FinishedRefresh {
    number: u64,
    at: Instant,
    result: Result<(), MirrorError>,
}

impl Mirrors {
    /// Opens the mirrors in `directory`, which is created if necessary. Removes key files and
    /// half-removed mirrors that a killed gate left there.
    pub fn open(directory: &Path) -> std::io::Result<Self> {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)?;
        for entry in std::fs::read_dir(directory)? {
            let entry = entry?;
            let name = entry.file_name();
            if name
                .as_encoded_bytes()
                .starts_with(TEMP_FILE_PREFIX.as_bytes())
            {
                std::fs::remove_file(entry.path())?;
            } else if name
                .as_encoded_bytes()
                .starts_with(REMOVED_PREFIX.as_bytes())
            {
                std::fs::remove_dir_all(entry.path())?;
            }
        }
        Ok(Self {
            by_name: Mutex::default(),
            directories: MirrorDirectories::default(),
            directory: directory.to_owned(),
        })
    }

    /// Reports a program that the configured mirrors need and that is not installed. Blocks.
    pub fn missing_program(settings: &Settings) -> Option<String> {
        let mirrors = &settings.git.mirrors;
        let message = |program: &str, mirrors: &str| {
            format!("{mirrors} are unavailable: {program} is not installed where the gate runs")
        };
        if !mirrors.is_empty() && !is_installed("git") {
            return Some(message("git", "git mirrors"));
        }
        let by_ssh = mirrors.iter().any(git::MirrorSettings::is_ssh);
        (by_ssh && !is_installed("ssh"))
            .then(|| message("ssh", "git mirrors that are reached by ssh"))
    }

    /// The directory of the mirrors, which also has the key files while they are in use.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The mirror with these settings.
    pub fn find(&self, wanted: &git::MirrorSettings) -> Arc<Mirror> {
        let mut by_name = self.by_name.lock().unwrap_or_else(PoisonError::into_inner);
        let existing = by_name.get(&wanted.name);
        if let Some(existing) = existing.filter(|existing| existing.settings == *wanted) {
            return Arc::clone(existing);
        }
        let mirror = Arc::new(Mirror::new(wanted.clone(), self));
        by_name.insert(wanted.name.clone(), Arc::clone(&mirror));
        mirror
    }
}

impl Mirror {
    fn new(settings: git::MirrorSettings, all: &Mirrors) -> Self {
        let name = directory_name(&settings);
        Self {
            git: BareRepository::new(&all.directory.join(&name)),
            directory: all.directories.find(&name),
            settings,
            refreshes_begun: AtomicU64::new(0),
            last_refresh: Mutex::default(),
        }
    }

    /// The name in the operator's settings.
    pub fn name(&self) -> &str {
        &self.settings.name
    }

    /// The operator's settings of the mirror.
    pub fn settings(&self) -> &git::MirrorSettings {
        &self.settings
    }

    /// Refreshes the mirror from upstream. Concurrent callers share one refresh: a caller uses the
    /// result of any refresh that began after its call.
    pub(crate) async fn refresh(&self, access: &UpstreamAccess<'_>) -> Result<(), MirrorError> {
        let begun_before = self.refreshes_begun.load(Ordering::SeqCst);
        // The semaphore is never closed.
        let _permit = self.directory.fetch_slot.acquire().await;
        if let Some(last) = self
            .last_refresh()
            .filter(|last| last.number > begun_before)
        {
            return last.result;
        }
        let number = self.refreshes_begun.fetch_add(1, Ordering::SeqCst) + 1;
        let result = self.fetch(access).await;
        *self
            .last_refresh
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(FinishedRefresh {
            number,
            at: Instant::now(),
            result: result.clone(),
        });
        result
    }

    /// Refreshes the mirror unless the last refresh succeeded and is recent.
    pub(crate) async fn refresh_if_old(
        &self,
        access: &UpstreamAccess<'_>,
    ) -> Result<(), MirrorError> {
        match self.last_refresh() {
            Some(last) if last.result.is_ok() && last.at.elapsed() < MAX_REFRESH_AGE => Ok(()),
            _ => self.refresh(access).await,
        }
    }

    fn last_refresh(&self) -> Option<FinishedRefresh> {
        let last = self.last_refresh.lock();
        last.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Runs an upload-pack request of the gate itself.
    pub async fn query(
        &self,
        access: &UpstreamAccess<'_>,
        request: Vec<u8>,
        max_age: MaxAge,
    ) -> Result<ChildOutput, MirrorError> {
        match max_age {
            MaxAge::Zero => self.refresh(access).await?,
            MaxAge::OneMinute => self.refresh_if_old(access).await?,
        }
        self.upload_pack_rpc(request.into(), Some("version=2"))
            .await
    }

    /// Starts `git upload-pack` on the mirror. The directory is in use until the returned guard is
    /// dropped.
    pub(crate) async fn upload_pack(
        &self,
        arguments: &[&str],
        protocol: Option<&'static str>,
    ) -> Result<(Child, UsageGuard), MirrorError> {
        let usage = self.directory.acquire().await;
        Ok((self.git.upload_pack(arguments, protocol)?, usage))
    }

    /// Runs `git upload-pack` for one request of smart HTTP and returns its output.
    pub(crate) async fn upload_pack_rpc(
        &self,
        request: Bytes,
        protocol: Option<&'static str>,
    ) -> Result<ChildOutput, MirrorError> {
        let (mut child, usage) = self.upload_pack(&["--stateless-rpc"], protocol).await?;
        let stdin = child.stdin.take();
        tokio::spawn(async move {
            if let Some(mut stdin) = stdin {
                // An error means that git closed its input early, which is allowed.
                let _ = stdin.write_all(&request).await;
            }
        });
        Ok(ChildOutput::new(child, b"").with_usage_guard(usage))
    }

    async fn fetch(&self, access: &UpstreamAccess<'_>) -> Result<(), MirrorError> {
        let _usage = self.directory.acquire().await;
        let upstream = MirrorUpstream::resolve(&self.settings, access).await?;
        let upstream_refs = RefList::parse(&self.git.list_upstream(&upstream).await?)
            .ok_or_else(MirrorError::unreadable_refs)?;
        if self.git.exists().await {
            self.git
                .remove_leftovers(self.directory.is_repacking())
                .await;
        } else {
            self.git.init(upstream_refs.object_format()).await?;
        }
        let mirror_refs = self.git.refs().await?;
        if RefList::parse(&mirror_refs)
            .is_none_or(|mirror_refs| mirror_refs.ids != upstream_refs.ids)
        {
            self.git.fetch(&upstream, &MIRRORED_REFS).await?;
        }
        if let Some(head) = &upstream_refs.head {
            self.git.set_head(head).await?;
        }
        Ok(())
    }
}

/// A list of refs as git prints it.
#[derive(Debug, Default, PartialEq, Eq)]
struct RefList {
    /// Object ids by ref name.
    ids: BTreeMap<Vec<u8>, Vec<u8>>,
    /// The branch that HEAD points to.
    head: Option<String>,
}

impl RefList {
    /// Parses lines `id<tab or space>name` and `ref: name<tab>HEAD`. Keeps branches and tags;
    /// leaves out other refs and peeled tags (`^{}`).
    fn parse(list: &[u8]) -> Option<Self> {
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
                refs.ids.insert(name.to_vec(), value.to_vec());
            }
        }
        Some(refs)
    }

    /// The object format of upstream; SHA-1 if it has no refs.
    fn object_format(&self) -> &'static str {
        match self.ids.values().next().map(Vec::len) {
            Some(64) => "sha256",
            _ => "sha1",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_removes_leftover_keys_and_keeps_mirrors() {
        let directory = tempfile::tempdir().unwrap();
        let (key, mirror) = (directory.path().join(".kept-1"), directory.path().join("a"));
        std::fs::write(&key, "secret").unwrap();
        std::fs::create_dir(&mirror).unwrap();
        Mirrors::open(directory.path()).unwrap();
        assert!(!key.exists() && mirror.exists());
    }

    #[test]
    fn ref_list_of_git_is_parsed() {
        let one = "1".repeat(40);
        let listed = format!(
            "ref: refs/heads/trunk\tHEAD\n{one}\tHEAD\n{one}\trefs/heads/trunk\n\
             {one}\trefs/tags/v1\n{one}\trefs/tags/v1^{{}}\n{one}\trefs/pull/1/head\n"
        );
        let upstream_refs = RefList::parse(listed.as_bytes()).unwrap();
        assert_eq!(upstream_refs.head.as_deref(), Some("refs/heads/trunk"));
        let mirror_refs = format!("{one} refs/heads/trunk\n{one} refs/tags/v1\n");
        assert_eq!(
            RefList::parse(mirror_refs.as_bytes()).unwrap().ids,
            upstream_refs.ids
        );
        assert_eq!(upstream_refs.object_format(), "sha1");
        let long = format!("{}\trefs/heads/a\n", "2".repeat(64));
        let long = RefList::parse(long.as_bytes()).unwrap();
        assert_eq!(long.object_format(), "sha256");
        assert_eq!(RefList::parse(b""), Some(RefList::default()));
        for bad in [
            "refs/heads/a",
            "abc\trefs/heads/a",
            "ref: \u{ff}",
            "fatal: x",
        ] {
            assert_eq!(RefList::parse(bad.as_bytes()), None, "{bad}");
        }
    }
}
