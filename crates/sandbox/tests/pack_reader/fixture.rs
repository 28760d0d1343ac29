//! Test fixture: a repository, the packs that a push from it would send, and a pack reader.

use std::ffi::OsString;
use std::io::{Seek, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use policy::push::{Findings, ObjectFormat, PushContext};
use policy::refs::{ObjectId, RefName, RefUpdate};
use sandbox::pack_reader::{PackFile, PackReaderError, PackReaderPool};
use tempfile::TempDir;

pub(crate) struct Repo {
    pub(crate) temp: TempDir,
    pub(crate) format: ObjectFormat,
}

pub(crate) fn pack_reader() -> PackReaderPool {
    PackReaderPool::new(
        PathBuf::from(env!("CARGO_BIN_EXE_sandbox-pack-reader")),
        Vec::<OsString>::new(),
        2,
    )
}

/// A fake token, assembled from two parts so that scanners do not find it in the sources.
pub(crate) fn token() -> String {
    format!("{}_{}", "ghp", "q7Rk2VbX9sLm4ZtYc1WdNf8HgJpA3uE5oTi6")
}

pub(crate) fn id(hex: &str) -> ObjectId {
    ObjectId::parse(hex.as_bytes()).unwrap()
}

impl Repo {
    pub(crate) fn new() -> Self {
        Self::with_format(ObjectFormat::Sha1)
    }

    pub(crate) fn with_format(format: ObjectFormat) -> Self {
        let repo = Self {
            temp: tempfile::tempdir().unwrap(),
            format,
        };
        let name = match format {
            ObjectFormat::Sha1 => "--object-format=sha1",
            ObjectFormat::Sha256 => "--object-format=sha256",
        };
        repo.git(&["init", "-q", "-b", "main", name]);
        repo
    }

    pub(crate) fn dir(&self) -> &Path {
        self.temp.path()
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut git = Command::new("git");
        git.args(args)
            .current_dir(self.dir())
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap())
            .env("HOME", "/nonexistent")
            .env("GIT_CONFIG_NOSYSTEM", "1")
            .env("GIT_AUTHOR_NAME", "A")
            .env("GIT_AUTHOR_EMAIL", "a@example.com")
            .env("GIT_COMMITTER_NAME", "A")
            .env("GIT_COMMITTER_EMAIL", "a@example.com")
            .env("GIT_AUTHOR_DATE", "1700000000 +0000")
            .env("GIT_COMMITTER_DATE", "1700000000 +0000");
        git
    }

    pub(crate) fn git(&self, args: &[&str]) -> String {
        self.git_with(args, b"")
    }

    pub(crate) fn git_with(&self, args: &[&str], input: &[u8]) -> String {
        let out = self.output(args, input);
        String::from_utf8_lossy(&out).trim_end().to_owned()
    }

    fn output(&self, args: &[&str], input: &[u8]) -> Vec<u8> {
        let mut child = self
            .command(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(input).unwrap();
        let output = child.wait_with_output().unwrap();
        let printed = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "git {args:?}: {printed}");
        output.stdout
    }

    pub(crate) fn write(&self, path: &str, text: &str) {
        let path = self.dir().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    /// Commits everything and returns the commit's id.
    pub(crate) fn commit(&self, message: &str) -> String {
        self.git(&["add", "-A"]);
        self.git(&["commit", "-q", "--allow-empty", "-m", message]);
        self.rev("HEAD")
    }

    pub(crate) fn rev(&self, name: &str) -> String {
        self.git(&["rev-parse", name])
    }

    /// The bytes of a pack with the objects of these revisions.
    pub(crate) fn pack_bytes(&self, revisions: &[&str], options: &[&str]) -> Vec<u8> {
        let mut args = vec!["pack-objects", "-q", "--stdout", "--revs"];
        args.extend(options);
        self.output(&args, format!("{}\n", revisions.join("\n")).as_bytes())
    }

    /// A pack with the objects of these revisions.
    pub(crate) fn pack(&self, revisions: &[&str]) -> PackFile {
        file(&self.pack_bytes(revisions, &["--delta-base-offset"]))
    }

    /// A pack with exactly these objects.
    pub(crate) fn pack_of(&self, objects: &[&str]) -> PackFile {
        let args = ["pack-objects", "-q", "--stdout"];
        file(&self.output(&args, format!("{}\n", objects.join("\n")).as_bytes()))
    }

    /// A pack of upstream's commits and trees at a revision, as a fetch with `blob:none` receives.
    pub(crate) fn base(&self, revision: &str) -> PackFile {
        let listed = self.git(&["rev-list", "--objects", "--filter=blob:none", revision]);
        let ids: Vec<&str> = listed
            .lines()
            .filter_map(|line| line.split(' ').next())
            .collect();
        self.pack_of(&ids)
    }

    pub(crate) fn zero(&self) -> String {
        "0".repeat(match self.format {
            ObjectFormat::Sha1 => 40,
            ObjectFormat::Sha256 => 64,
        })
    }

    /// A push of one new branch to `new`.
    pub(crate) fn context(&self, new: &str) -> PushContext {
        self.context_from(&self.zero(), new)
    }

    pub(crate) fn context_from(&self, old: &str, new: &str) -> PushContext {
        PushContext {
            format: self.format,
            updates: vec![RefUpdate {
                name: RefName::parse(b"refs/heads/palisade/fix").unwrap(),
                old: id(old),
                new: id(new),
            }],
            options: Vec::new(),
            default_tip: None,
            restricted: vec![".github/workflows".to_owned(), ".github/actions".to_owned()],
            scan: true,
        }
    }
}

/// A pack at an offset in a file, as the gate spools it.
pub(crate) fn file(pack: &[u8]) -> PackFile {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(b"0000 what came before").unwrap();
    let offset = file.stream_position().unwrap();
    file.write_all(pack).unwrap();
    PackFile { file, offset }
}

pub(crate) async fn read(
    context: &PushContext,
    pack: PackFile,
) -> Result<Findings, PackReaderError> {
    pack_reader().read(context, Some(pack), Vec::new()).await
}
