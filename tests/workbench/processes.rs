//! Finds processes by a mark in their environment, which their children inherit.

use std::sync::atomic::{AtomicU32, Ordering};

use testkit::wait;

/// The variable that carries the mark.
pub(crate) const MARK: &str = "PALISADE_TEST_MARK";

static NEXT: AtomicU32 = AtomicU32::new(0);

/// A mark that is unique to the test.
pub(crate) fn mark() -> String {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("{}-{number}", std::process::id())
}

/// The processes with the mark: id and command line.
pub(crate) fn marked(mark: &str) -> Vec<(i32, String)> {
    let wanted = format!("{MARK}={mark}");
    std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| {
            let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment
                .split(|byte| *byte == 0)
                .any(|pair| pair == wanted.as_bytes())
        })
        .map(|pid| {
            let args = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let args = String::from_utf8_lossy(&args).replace('\0', " ");
            (pid, args)
        })
        .collect()
}

/// Waits until no process has the mark.
pub(crate) fn wait_for_none(mark: &str) {
    wait::until_or(
        || marked(mark).is_empty().then_some(()),
        || format!("the end of {:?}", marked(mark)),
    );
}

/// Waits until a process with the mark has exactly this command line.
pub(crate) fn wait_for(mark: &str, args: &str) -> i32 {
    wait::until_or(
        || {
            let all = marked(mark);
            all.iter()
                .find(|(_, line)| line.trim_end() == args)
                .map(|(pid, _)| *pid)
        },
        || format!("{args:?} among {:?}", marked(mark)),
    )
}
