//! The child's life and end.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sandbox::judge::{Judge, JudgeError, JudgeLimits};

use crate::place::{Repo, file, judge};

fn script(text: &str) -> Judge {
    let arguments = vec![OsString::from("-c"), OsString::from(text)];
    Judge::new(PathBuf::from("/bin/sh"), arguments, 1)
}

fn limits(change: impl FnOnce(&mut JudgeLimits)) -> JudgeLimits {
    let mut limits = JudgeLimits::default();
    change(&mut limits);
    limits
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let waiting = async {
        while !holds() {
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
async fn a_program_that_is_no_judge_is_a_clear_error() {
    let repo = Repo::new();
    let case = repo.case(&repo.commit("x"));
    for (program, said) in [
        ("/bin/false", "ended without an answer"),
        ("/nonexistent", "was not started"),
    ] {
        let judge = Judge::new(PathBuf::from(program), Vec::new(), 1);
        let error = judge.judge(&case, None, Vec::new()).await.unwrap_err();
        assert!(matches!(error, JudgeError::Child(_)), "{error:?}");
        assert!(error.to_string().contains(said), "{error}");
    }
    let judge = script("kill -SEGV $$");
    let error = judge.judge(&case, None, Vec::new()).await.unwrap_err();
    assert!(error.to_string().contains("SIGSEGV"), "{error}");
    // An answer that was broken off, or is none, is no answer.
    for said in [
        "printf '{\"Found\":'",
        "printf 'yes'",
        "printf '{\"Found\":{}}'",
    ] {
        let judge = script(said);
        let judged = judge.judge(&case, None, Vec::new()).await;
        assert!(matches!(judged, Err(JudgeError::Child(_))), "{said}");
    }
}

#[tokio::test]
async fn one_that_hangs_is_given_up_and_gone() {
    let repo = Repo::new();
    let case = repo.case(&repo.commit("x"));
    let file = repo.dir().join("pid");
    let judge = script(&format!("echo $$ > {}; exec sleep 1000", file.display()))
        .with_limits(limits(|limits| limits.seconds = 5));
    let error = judge.judge(&case, None, Vec::new()).await.unwrap_err();
    assert!(matches!(error, JudgeError::TimedOut(5)), "{error:?}");
    let pid = pid(&file).unwrap();
    until("the child is gone", || !is_running(pid)).await;
}

#[tokio::test]
async fn one_whose_caller_went_away_is_ended_and_the_next_has_its_turn() {
    let repo = Repo::new();
    let case = repo.case(&repo.commit("x"));
    let file = repo.dir().join("pid");
    let judge = script(&format!("echo $$ >> {}; exec sleep 1000", file.display()));
    let calling = |judge: Judge| {
        let case = case.clone();
        tokio::spawn(async move { judge.judge(&case, None, Vec::new()).await })
    };
    let first = calling(judge.clone());
    until("the first has started", || pid(&file).is_some()).await;
    let second = calling(judge);
    // There is one place, and it is taken.
    let lines = || std::fs::read_to_string(&file).unwrap().lines().count();
    let both = until("both have started", || lines() == 2);
    let both = tokio::time::timeout(Duration::from_millis(300), both).await;
    assert!(both.is_err(), "the second started beside the first");
    let first_pid = pid(&file).unwrap();
    first.abort();
    until("the first is gone", || !is_running(first_pid)).await;
    until("the second has started", || lines() == 2).await;
    second.abort();
}

#[tokio::test]
async fn one_without_memory_or_time_is_a_clear_error() {
    let repo = Repo::new();
    // Random, so that the pack is as large as the file, and its versions differences.
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
    let case = repo.case(&repo.rev("HEAD"));
    let bytes = repo.pack_bytes(&["HEAD"], &["--delta-base-offset"]);
    assert!(bytes.len() < 20 << 20, "git made no difference");
    let pack = || Some(file(&bytes));
    let small = judge().with_limits(limits(|limits| limits.memory = 32 << 20));
    let error = small.judge(&case, pack(), Vec::new()).await.unwrap_err();
    assert!(error.to_string().contains("memory"), "{error}");
    let hasty = judge().with_limits(limits(|limits| limits.processor = 0));
    let error = hasty.judge(&case, pack(), Vec::new()).await.unwrap_err();
    assert!(matches!(error, JudgeError::Child(_)), "{error:?}");
    let found = judge().judge(&case, pack(), Vec::new()).await.unwrap();
    assert_eq!(found.objects, 6);
}
