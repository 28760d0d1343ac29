//! Start, limits and end of the child process.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sandbox::pack_reader::{PackReaderError, PackReaderLimits, PackReaderPool};

use crate::fixture::{Repo, file, pack_reader};

fn shell_script_reader(text: &str) -> PackReaderPool {
    let arguments = vec![OsString::from("-c"), OsString::from(text)];
    PackReaderPool::new(PathBuf::from("/bin/sh"), arguments, 1)
}

fn limits(change: impl FnOnce(&mut PackReaderLimits)) -> PackReaderLimits {
    let mut limits = PackReaderLimits::default();
    change(&mut limits);
    limits
}

async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let waiting = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(30), waiting).await;
    assert!(waited.is_ok(), "{what}");
}

fn pid(file: &Path) -> Option<u32> {
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

fn is_running(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| !stat.contains(") Z "))
}

#[tokio::test]
async fn program_that_is_no_pack_reader_is_an_error() {
    let repo = Repo::new();
    let context = repo.context(&repo.commit("x"));
    for (program, text) in [
        ("/bin/false", "exited without an answer"),
        ("/nonexistent", "the child could not be started"),
    ] {
        let reader = PackReaderPool::new(PathBuf::from(program), Vec::new(), 1);
        let error = reader.read(&context, None, Vec::new()).await.unwrap_err();
        assert!(matches!(error, PackReaderError::Child(_)), "{error:?}");
        assert!(error.to_string().contains(text), "{error}");
    }
    let reader = shell_script_reader("kill -SEGV $$");
    let error = reader.read(&context, None, Vec::new()).await.unwrap_err();
    assert!(error.to_string().contains("SIGSEGV"), "{error}");
    // A truncated or malformed answer is an error.
    for line in [
        "printf '{\"Found\":'",
        "printf 'yes'",
        "printf '{\"Found\":{}}'",
    ] {
        let reader = shell_script_reader(line);
        let result = reader.read(&context, None, Vec::new()).await;
        assert!(matches!(result, Err(PackReaderError::Child(_))), "{line}");
    }
}

#[tokio::test]
async fn child_that_hangs_is_killed() {
    let repo = Repo::new();
    let context = repo.context(&repo.commit("x"));
    let file = repo.dir().join("pid");
    let reader = shell_script_reader(&format!("echo $$ > {}; exec sleep 1000", file.display()))
        .with_limits(limits(|limits| limits.seconds = 5));
    let error = reader.read(&context, None, Vec::new()).await.unwrap_err();
    assert!(matches!(error, PackReaderError::TimedOut(5)), "{error:?}");
    let pid = pid(&file).unwrap();
    until("the child is gone", || !is_running(pid)).await;
}

#[tokio::test]
async fn child_of_cancelled_call_is_killed_and_next_call_starts() {
    let repo = Repo::new();
    let context = repo.context(&repo.commit("x"));
    let file = repo.dir().join("pid");
    let reader = shell_script_reader(&format!("echo $$ >> {}; exec sleep 1000", file.display()));
    let start_call = |reader: PackReaderPool| {
        let context = context.clone();
        tokio::spawn(async move { reader.read(&context, None, Vec::new()).await })
    };
    let first = start_call(reader.clone());
    until("the first has started", || pid(&file).is_some()).await;
    let second = start_call(reader);
    // The pool allows one child, which is running.
    let lines = || std::fs::read_to_string(&file).unwrap().lines().count();
    let both_started = until("both have started", || lines() == 2);
    let both_started = tokio::time::timeout(Duration::from_millis(300), both_started).await;
    assert!(both_started.is_err(), "the second started beside the first");
    let first_pid = pid(&file).unwrap();
    first.abort();
    until("the first is gone", || !is_running(first_pid)).await;
    until("the second has started", || lines() == 2).await;
    second.abort();
}

#[tokio::test]
async fn child_without_memory_or_time_is_an_error() {
    let repo = Repo::new();
    // Random bytes, so that the pack is as large as the file and its second version is a delta.
    let mut seed = 1_u64;
    let bytes: Vec<u8> = std::iter::repeat_with(|| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 33).to_le_bytes()[0]
    })
    .take(16 << 20)
    .collect();
    for version in 0..2 {
        let text = [&bytes[..], &[version]].concat();
        std::fs::write(repo.dir().join("large"), text).unwrap();
        repo.commit("large");
    }
    let context = repo.context(&repo.rev("HEAD"));
    let bytes = repo.pack_bytes(&["HEAD"], &["--delta-base-offset"]);
    assert!(bytes.len() < 20 << 20, "git made no delta");
    let pack = || Some(file(&bytes));
    let without_memory = pack_reader().with_limits(limits(|limits| limits.memory = 32 << 20));
    let error = without_memory
        .read(&context, pack(), Vec::new())
        .await
        .unwrap_err();
    assert!(error.to_string().contains("memory"), "{error}");
    let without_time = pack_reader().with_limits(limits(|limits| limits.processor = 0));
    let error = without_time
        .read(&context, pack(), Vec::new())
        .await
        .unwrap_err();
    assert!(matches!(error, PackReaderError::Child(_)), "{error:?}");
    let found = pack_reader()
        .read(&context, pack(), Vec::new())
        .await
        .unwrap();
    assert_eq!(found.objects, 6);
}
