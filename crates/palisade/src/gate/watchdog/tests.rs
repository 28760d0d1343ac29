use super::*;

// Issue 14, number 16.
#[test]
fn fifth_death_within_a_minute_ends_the_restarts() {
    let start = Instant::now();
    let mut deaths = Deaths::default();
    let mut at = |second: u64| deaths.record(start + Duration::from_secs(second));
    let waits: Vec<_> = (0..4).map(|n| at(n).map(|wait| wait.as_millis())).collect();
    assert_eq!(waits, [Some(100), Some(200), Some(400), Some(800)]);
    assert_eq!(at(4), None);
}

#[test]
fn deaths_far_apart_always_restart() {
    let start = Instant::now();
    let mut deaths = Deaths::default();
    for n in 0..100 {
        let wait = deaths.record(start + Duration::from_secs(n * 15));
        assert!(wait.is_some(), "death {n}");
    }
    assert_eq!(
        deaths.record(start + WINDOW * 100),
        Some(FIRST_BACKOFF),
        "a quiet minute resets the backoff"
    );
}

#[test]
fn only_an_unrequested_end_is_a_death() {
    let pid = Pid::from_raw(7);
    let gate = |stopping, stop_sent| GateProcess {
        pid,
        lines: None,
        partial: Vec::new(),
        ready: true,
        stopping,
        stop_sent,
        overdue: false,
        started: Instant::now(),
    };
    let killed = |signal| WaitStatus::Signaled(pid, signal, false);
    let exited = |code| WaitStatus::Exited(pid, code);
    for (status, stopping, stop_sent, dies) in [
        (exited(0), false, false, false),
        (exited(4), false, false, false),
        (exited(143), false, false, false),
        (killed(Signal::SIGTERM), false, false, false),
        (killed(Signal::SIGKILL), false, false, true),
        (killed(Signal::SIGKILL), true, false, false),
        (killed(Signal::SIGKILL), false, true, false),
        (killed(Signal::SIGABRT), false, false, true),
        (exited(1), false, false, true),
        (exited(1), true, false, false),
        (exited(2), false, false, true),
        (exited(101), false, false, true),
    ] {
        let end = gate(stopping, stop_sent).classify(status);
        assert_eq!(
            matches!(end, End::Died { .. }),
            dies,
            "{status:?} {stopping} {stop_sent}"
        );
    }
}

#[test]
fn lines_are_read_across_partial_writes() {
    let (reader, writer) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK).unwrap();
    let mut gate = GateProcess {
        pid: Pid::from_raw(7),
        lines: Some(File::from(reader)),
        partial: Vec::new(),
        ready: false,
        stopping: false,
        stop_sent: false,
        overdue: false,
        started: Instant::now(),
    };
    let mut writer = File::from(writer);
    for (piece, ready, stopping) in [
        ("rea", false, false),
        ("dy", false, false),
        ("\nstop", true, false),
        ("ping\nmore", true, true),
    ] {
        writer.write_all(piece.as_bytes()).unwrap();
        gate.read_lines();
        assert_eq!((gate.ready, gate.stopping), (ready, stopping), "{piece}");
    }
    drop(writer);
    gate.read_lines();
    assert!(gate.lines.is_none());
}
