use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

/// Mirrors in a temporary directory, and settings with one of them.
struct MaintenanceFixture {
    directory: tempfile::TempDir,
    mirrors: Mirrors,
    settings: Settings,
}

impl MaintenanceFixture {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let config = directory.path().join("palisade.yaml");
        let text = "version: \"1.0\"\ngit:\n  mirrors:\n    - name: app\n      \
                    upstream: 'https://git.example/app'\n";
        std::fs::write(&config, text).unwrap();
        let settings = config::load(Some(&config), &|_| None).unwrap();
        Self {
            mirrors: Mirrors::open(&directory.path().join("mirrors")).unwrap(),
            directory,
            settings,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join("mirrors").join(name)
    }

    fn app(&self) -> PathBuf {
        self.path(&directory_name(&self.settings.git.mirrors[0]))
    }
}

/// The directory of a mirror that is not configured any more.
const UNCONFIGURED: &str = "old-0123456789abcdef.git";

#[tokio::test]
async fn unconfigured_mirrors_are_removed_and_other_files_stay() {
    let fixture = MaintenanceFixture::new();
    let (link, file) = ("link-0123456789abcdef.git", "file-0123456789abcdef.git");
    for dir in [
        &fixture.app(),
        &fixture.path(UNCONFIGURED),
        &fixture.path("mine.git"),
    ] {
        std::fs::create_dir_all(dir.join("objects")).unwrap();
    }
    symlink(fixture.path("mine.git"), fixture.path(link)).unwrap();
    std::fs::write(fixture.path(file), "").unwrap();
    fixture.mirrors.remove_unconfigured(&fixture.settings).await;
    let mut left: Vec<_> = std::fs::read_dir(fixture.path(""))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    left.sort();
    let mut expected = [
        fixture.app(),
        fixture.path(file),
        fixture.path(link),
        fixture.path("mine.git"),
    ];
    expected.sort();
    assert_eq!(left, expected);
    assert!(fixture.path("mine.git").join("objects").exists());
}

#[tokio::test]
async fn mirror_in_use_is_removed_later() {
    let fixture = MaintenanceFixture::new();
    std::fs::create_dir(fixture.path(UNCONFIGURED)).unwrap();
    let usage = fixture
        .mirrors
        .directories
        .find(UNCONFIGURED)
        .acquire()
        .await;
    fixture.mirrors.remove_unconfigured(&fixture.settings).await;
    assert!(fixture.path(UNCONFIGURED).exists());
    drop(usage);
    fixture.mirrors.remove_unconfigured(&fixture.settings).await;
    assert!(!fixture.path(UNCONFIGURED).exists());
}

#[tokio::test]
async fn half_removed_mirror_is_removed_on_open() {
    let fixture = MaintenanceFixture::new();
    let half_removed = fixture.path(&format!("{REMOVED_PREFIX}{UNCONFIGURED}"));
    std::fs::create_dir_all(half_removed.join("objects")).unwrap();
    Mirrors::open(&fixture.path("")).unwrap();
    assert!(!half_removed.exists());
}

fn git(dir: &Path, args: &[&str]) -> String {
    let mut command = Command::new("git");
    command
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap())
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("HOME", "/nonexistent")
        .args(["-c", "user.name=A", "-c", "user.email=a@example.com"])
        .args(args)
        .current_dir(dir);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{args:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn pack_count(repository: &Path) -> usize {
    let entries = std::fs::read_dir(repository.join("objects/pack")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name());
    names
        .filter(|name| name.as_encoded_bytes().ends_with(b".pack"))
        .count()
}

/// Fills a mirror with one pack per commit. Returns an unreachable commit.
fn create_many_packs(app: &Path) -> String {
    std::fs::create_dir_all(app).unwrap();
    git(app, &["init", "-q", "--bare", "-b", "main"]);
    let tree = git(app, &["hash-object", "-t", "tree", "-w", "/dev/null"]);
    let mut tip = git(app, &["commit-tree", "-m", "first", &tree]);
    for n in 0..=MAX_PACKS {
        let message = n.to_string();
        tip = git(app, &["commit-tree", "-m", &message, "-p", &tip, &tree]);
        git(app, &["update-ref", "refs/heads/main", &tip]);
        git(app, &["repack", "-q", "-d"]);
    }
    // No ref reaches this commit any more, but a client may still request it.
    let other = git(app, &["commit-tree", "-m", "other", &tree]);
    git(app, &["update-ref", "refs/heads/other", &other]);
    git(app, &["repack", "-q", "-d"]);
    git(app, &["update-ref", "-d", "refs/heads/other"]);
    other
}

#[tokio::test]
async fn repack_leaves_one_pack_and_running_fetch_succeeds() {
    let fixture = MaintenanceFixture::new();
    let app = fixture.app();
    let other = create_many_packs(&app);
    assert!(pack_count(&app) > MAX_PACKS);

    // A client that has received the ref advertisement and not yet sent its request.
    let mirror = fixture.mirrors.find(&fixture.settings.git.mirrors[0]);
    let (mut child, _usage) = mirror.upload_pack(&[], None).await.unwrap();
    let (mut stdin, mut stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let mut advertised = vec![0; 4];
    stdout.read_exact(&mut advertised).await.unwrap();

    fixture.mirrors.repack(&fixture.settings).await;
    assert_eq!(pack_count(&app), 1);
    git(&app, &["fsck", "--strict"]);
    git(&app, &["cat-file", "-e", &other]);
    fixture.mirrors.repack(&fixture.settings).await;

    let tip = git(&app, &["rev-parse", "main"]);
    let want = format!("want {tip} ofs-delta\n");
    let request = format!("{:04x}{want}00000009done\n", want.len() + 4);
    stdin.write_all(request.as_bytes()).await.unwrap();
    drop(stdin);
    let mut answer = Vec::new();
    stdout.read_to_end(&mut answer).await.unwrap();
    let at = answer.windows(4).position(|four| four == b"PACK").unwrap();
    let clone = fixture.path("clone");
    std::fs::create_dir(&clone).unwrap();
    git(&clone, &["init", "-q", "--bare"]);
    let mut unpacking = Command::new("git")
        .args(["index-pack", "--stdin", "--strict"])
        .current_dir(&clone)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut pipe = unpacking.stdin.take().unwrap();
    pipe.write_all(&answer[at..]).unwrap();
    drop(pipe);
    assert!(unpacking.wait().unwrap().success());
    let count = git(&clone, &["rev-list", "--count", &tip]);
    assert_eq!(count, (MAX_PACKS + 2).to_string());
}

#[tokio::test]
async fn mirror_with_few_packs_is_not_repacked() {
    let fixture = MaintenanceFixture::new();
    fixture.mirrors.repack(&fixture.settings).await;
    assert!(!fixture.app().exists());
    std::fs::create_dir_all(fixture.app()).unwrap();
    git(&fixture.app(), &["init", "-q", "--bare"]);
    git(
        &fixture.app(),
        &["hash-object", "-t", "tree", "-w", "/dev/null"],
    );
    fixture.mirrors.repack(&fixture.settings).await;
    assert_eq!(pack_count(&fixture.app()), 0);
}
