use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

/// Mirrors in a directory of their own, and settings that have one of them.
struct Dock {
    directory: tempfile::TempDir,
    mirrors: Mirrors,
    settings: Settings,
}

impl Dock {
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
        self.path(&name_of(&self.settings.git.mirrors[0]))
    }
}

const OLD: &str = "old-0123456789abcdef.git";

#[tokio::test]
async fn what_is_not_configured_goes_and_what_is_not_ours_stays() {
    let dock = Dock::new();
    let (link, file) = ("link-0123456789abcdef.git", "file-0123456789abcdef.git");
    for dir in [&dock.app(), &dock.path(OLD), &dock.path("mine.git")] {
        std::fs::create_dir_all(dir.join("objects")).unwrap();
    }
    symlink(dock.path("mine.git"), dock.path(link)).unwrap();
    std::fs::write(dock.path(file), "").unwrap();
    dock.mirrors.remove_others(&dock.settings).await;
    let mut left: Vec<_> = std::fs::read_dir(dock.path(""))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    left.sort();
    let mut expected = [
        dock.app(),
        dock.path(file),
        dock.path(link),
        dock.path("mine.git"),
    ];
    expected.sort();
    assert_eq!(left, expected);
    assert!(dock.path("mine.git").join("objects").exists());
}

#[tokio::test]
async fn a_mirror_in_use_stays_until_it_is_not() {
    let dock = Dock::new();
    std::fs::create_dir(dock.path(OLD)).unwrap();
    let usage = dock.mirrors.rooms.find(OLD).enter().await;
    dock.mirrors.remove_others(&dock.settings).await;
    assert!(dock.path(OLD).exists());
    drop(usage);
    dock.mirrors.remove_others(&dock.settings).await;
    assert!(!dock.path(OLD).exists());
}

#[tokio::test]
async fn what_a_killed_gate_did_not_remove_the_next_one_does() {
    let dock = Dock::new();
    let half = dock.path(&format!("{GONE}{OLD}"));
    std::fs::create_dir_all(half.join("objects")).unwrap();
    Mirrors::open(&dock.path("")).unwrap();
    assert!(!half.exists());
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

fn packs(repository: &Path) -> usize {
    let entries = std::fs::read_dir(repository.join("objects/pack")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name());
    names
        .filter(|name| name.as_encoded_bytes().ends_with(b".pack"))
        .count()
}

/// Fills a mirror with a pack per commit, and gives the last commit.
fn scatter(app: &Path) -> String {
    std::fs::create_dir_all(app).unwrap();
    git(app, &["init", "-q", "--bare", "-b", "main"]);
    let tree = git(app, &["hash-object", "-t", "tree", "-w", "/dev/null"]);
    let mut tip = git(app, &["commit-tree", "-m", "first", &tree]);
    for n in 0..=MOST_PACKS {
        let message = n.to_string();
        tip = git(app, &["commit-tree", "-m", &message, "-p", &tip, &tree]);
        git(app, &["update-ref", "refs/heads/main", &tip]);
        git(app, &["repack", "-q", "-d"]);
    }
    // Reached by nobody, and yet somebody may have been told of it.
    let other = git(app, &["commit-tree", "-m", "other", &tree]);
    git(app, &["update-ref", "refs/heads/other", &other]);
    git(app, &["repack", "-q", "-d"]);
    git(app, &["update-ref", "-d", "refs/heads/other"]);
    other
}

#[tokio::test]
async fn many_packs_become_one_and_who_is_being_served_does_not_notice() {
    let dock = Dock::new();
    let app = dock.app();
    let other = scatter(&app);
    assert!(packs(&app) > MOST_PACKS);

    // A client that was told what there is, and has not yet asked for it.
    let mirror = dock.mirrors.find(&dock.settings.git.mirrors[0]);
    let (mut child, _usage) = mirror.upload_pack(&[], None).await.unwrap();
    let (mut stdin, mut stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let mut told = vec![0; 4];
    stdout.read_exact(&mut told).await.unwrap();

    dock.mirrors.repack(&dock.settings).await;
    assert_eq!(packs(&app), 1);
    git(&app, &["fsck", "--strict"]);
    git(&app, &["cat-file", "-e", &other]);
    dock.mirrors.repack(&dock.settings).await;

    let tip = git(&app, &["rev-parse", "main"]);
    let want = format!("want {tip} ofs-delta\n");
    let asked = format!("{:04x}{want}00000009done\n", want.len() + 4);
    stdin.write_all(asked.as_bytes()).await.unwrap();
    drop(stdin);
    let mut answer = Vec::new();
    stdout.read_to_end(&mut answer).await.unwrap();
    let at = answer.windows(4).position(|four| four == b"PACK").unwrap();
    let clone = dock.path("clone");
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
    assert_eq!(count, (MOST_PACKS + 2).to_string());
}

#[tokio::test]
async fn what_is_in_few_pieces_or_not_there_is_left_alone() {
    let dock = Dock::new();
    dock.mirrors.repack(&dock.settings).await;
    assert!(!dock.app().exists());
    std::fs::create_dir_all(dock.app()).unwrap();
    git(&dock.app(), &["init", "-q", "--bare"]);
    git(
        &dock.app(),
        &["hash-object", "-t", "tree", "-w", "/dev/null"],
    );
    dock.mirrors.repack(&dock.settings).await;
    assert_eq!(packs(&dock.app()), 0);
}
