use proptest::prelude::*;

use super::*;

const CONFIG: BreakerConfig = BreakerConfig {
    failure_threshold: 3,
    recovery: Duration::from_secs(30),
    success_threshold: 2,
    probes: 2,
};

fn at(seconds: u64) -> Tick {
    Tick::from_nanos(seconds * 1_000_000_000)
}

fn run(breaker: &mut Breaker, outcome: UpstreamOutcome, now: Tick) {
    let ticket = breaker.admit(&CONFIG, now).unwrap();
    breaker.settle(&CONFIG, ticket, outcome, now);
}

/// A breaker that opened at time 0.
fn opened() -> Breaker {
    opened_with(0)
}

fn opened_with(id: u64) -> Breaker {
    let mut breaker = Breaker::new(id);
    for _ in 0..3 {
        run(&mut breaker, UpstreamOutcome::Failure, at(0));
    }
    assert_eq!(breaker.state(), BreakerState::Open);
    breaker
}

#[test]
fn consecutive_failures_open_breaker_and_successes_close_it() {
    let mut breaker = opened();
    assert_eq!(
        breaker.admit(&CONFIG, at(29)),
        Err(BreakerOpen {
            remaining: Duration::from_secs(1)
        })
    );
    run(&mut breaker, UpstreamOutcome::Success, at(30));
    assert_eq!(breaker.state(), BreakerState::HalfOpen);
    run(&mut breaker, UpstreamOutcome::Success, at(30));
    assert_eq!(breaker.state(), BreakerState::Closed);
    assert!(breaker.is_idle());
}

#[test]
fn success_resets_failure_count() {
    let mut breaker = Breaker::new(0);
    for _ in 0..1_000 {
        run(&mut breaker, UpstreamOutcome::Failure, at(0));
        run(&mut breaker, UpstreamOutcome::Failure, at(0));
        run(&mut breaker, UpstreamOutcome::Success, at(0));
    }
    assert_eq!(breaker.state(), BreakerState::Closed);
}

#[test]
fn failure_while_half_open_reopens_for_full_recovery() {
    let mut breaker = opened();
    run(&mut breaker, UpstreamOutcome::Success, at(40));
    run(&mut breaker, UpstreamOutcome::Failure, at(41));
    assert_eq!(breaker.state(), BreakerState::Open);
    let open = breaker.admit(&CONFIG, at(42)).unwrap_err();
    assert_eq!(open.remaining, Duration::from_secs(29));
    // Earlier successes do not count.
    run(&mut breaker, UpstreamOutcome::Success, at(80));
    assert_eq!(breaker.state(), BreakerState::HalfOpen);
}

#[test]
fn half_open_breaker_admits_limited_probes() {
    let mut breaker = opened();
    let first = breaker.admit(&CONFIG, at(30)).unwrap();
    let _second = breaker.admit(&CONFIG, at(35)).unwrap();
    let open = breaker.admit(&CONFIG, at(40)).unwrap_err();
    assert_eq!(open.remaining, Duration::from_secs(20));
    assert_eq!(open.seconds(), 20);
    breaker.settle(&CONFIG, first, UpstreamOutcome::Abandoned, at(41));
    assert_eq!(breaker.state(), BreakerState::HalfOpen);
    assert!(breaker.admit(&CONFIG, at(41)).is_ok());
    assert!(breaker.admit(&CONFIG, at(41)).is_err());
}

#[test]
fn lost_probe_does_not_block_breaker() {
    let mut breaker = opened();
    let lost = breaker.admit(&CONFIG, at(30)).unwrap();
    drop(breaker.admit(&CONFIG, at(30)).unwrap());
    assert!(breaker.admit(&CONFIG, at(59)).is_err());
    let fresh = breaker.admit(&CONFIG, at(60)).unwrap();
    // The lost ticket is returned after all, and does not free the lease of another.
    breaker.settle(&CONFIG, lost, UpstreamOutcome::Abandoned, at(61));
    let second = breaker.admit(&CONFIG, at(61)).unwrap();
    assert!(breaker.admit(&CONFIG, at(61)).is_err());
    breaker.settle(&CONFIG, fresh, UpstreamOutcome::Success, at(61));
    breaker.settle(&CONFIG, second, UpstreamOutcome::Success, at(61));
    assert_eq!(breaker.state(), BreakerState::Closed);
}

#[test]
fn late_outcome_of_probe_still_counts() {
    for (outcome, state) in [
        (UpstreamOutcome::Success, BreakerState::Closed),
        (UpstreamOutcome::Failure, BreakerState::Open),
        (UpstreamOutcome::Abandoned, BreakerState::HalfOpen),
    ] {
        let mut breaker = opened();
        let late = breaker.admit(&CONFIG, at(30)).unwrap();
        let other = breaker.admit(&CONFIG, at(70)).unwrap();
        breaker.settle(&CONFIG, other, UpstreamOutcome::Success, at(70));
        breaker.settle(&CONFIG, late, outcome, at(71));
        assert_eq!(breaker.state(), state, "{outcome:?}");
    }
}

/// One request a second; all succeed but take longer than a lease.
#[test]
fn upstream_slower_than_lease_still_closes_breaker() {
    for probes in [1, 2] {
        let config = BreakerConfig { probes, ..CONFIG };
        let mut breaker = opened();
        let mut in_flight = std::collections::VecDeque::new();
        for second in 1..300 {
            if in_flight.front().is_some_and(|(_, due)| *due == second) {
                let (ticket, _) = in_flight.pop_front().unwrap();
                breaker.settle(&config, ticket, UpstreamOutcome::Success, at(second));
            }
            if let Ok(ticket) = breaker.admit(&config, at(second)) {
                in_flight.push_back((ticket, second + 40));
            }
        }
        assert_eq!(breaker.state(), BreakerState::Closed, "{probes} probes");
    }
}

#[test]
fn ticket_of_another_breaker_is_ignored() {
    let mut breaker = opened();
    let mut other = opened_with(1);
    let foreign = other.admit(&CONFIG, at(30)).unwrap();
    let own = breaker.admit(&CONFIG, at(30)).unwrap();
    breaker.settle(&CONFIG, foreign, UpstreamOutcome::Failure, at(31));
    assert_eq!(breaker.state(), BreakerState::HalfOpen);
    breaker.settle(&CONFIG, own, UpstreamOutcome::Failure, at(31));
    assert_eq!(breaker.state(), BreakerState::Open);
}

#[test]
fn outcome_of_earlier_generation_is_ignored() {
    let mut breaker = Breaker::new(0);
    let slow_failure = breaker.admit(&CONFIG, at(0)).unwrap();
    let slow_success = breaker.admit(&CONFIG, at(0)).unwrap();
    for _ in 0..3 {
        run(&mut breaker, UpstreamOutcome::Failure, at(0));
    }
    let probe = breaker.admit(&CONFIG, at(30)).unwrap();
    breaker.settle(&CONFIG, slow_failure, UpstreamOutcome::Failure, at(31));
    assert_eq!(breaker.state(), BreakerState::HalfOpen);
    breaker.settle(&CONFIG, slow_success, UpstreamOutcome::Success, at(31));
    breaker.settle(&CONFIG, probe, UpstreamOutcome::Success, at(31));
    assert_eq!(breaker.state(), BreakerState::HalfOpen);
}

#[test]
fn abandoned_request_never_counts() {
    let mut breaker = Breaker::new(0);
    for _ in 0..100 {
        run(&mut breaker, UpstreamOutcome::Abandoned, at(0));
    }
    assert!(breaker.is_idle());
    let mut breaker = opened();
    for second in 0..30 {
        assert!(breaker.admit(&CONFIG, at(second)).is_err());
    }
    for _ in 0..100 {
        run(&mut breaker, UpstreamOutcome::Abandoned, at(30));
    }
    assert_eq!(breaker.state(), BreakerState::HalfOpen);
}

#[test]
fn shorter_recovery_after_reload_applies_at_once() {
    let mut breaker = opened();
    let quick = BreakerConfig {
        recovery: Duration::from_secs(5),
        ..CONFIG
    };
    assert!(breaker.admit(&CONFIG, at(6)).is_err());
    assert!(breaker.admit(&quick, at(6)).is_ok());
}

#[test]
fn clock_going_back_does_not_extend_open_time() {
    let mut breaker = Breaker::new(0);
    for _ in 0..3 {
        run(&mut breaker, UpstreamOutcome::Failure, at(1_000_000));
    }
    let open = breaker.admit(&CONFIG, at(10)).unwrap_err();
    assert_eq!(open.remaining, CONFIG.recovery);
    assert!(breaker.admit(&CONFIG, at(40)).is_ok());
}

// Issue 14, number 17.
#[test]
fn state_at_is_half_open_once_recovery_has_passed() {
    let breaker = opened();
    assert_eq!(breaker.state_at(&CONFIG, at(29)), BreakerState::Open);
    assert_eq!(breaker.state_at(&CONFIG, at(30)), BreakerState::HalfOpen);
    assert_eq!(
        breaker.state(),
        BreakerState::Open,
        "state_at changes nothing"
    );
    assert_eq!(
        Breaker::new(0).state_at(&CONFIG, at(30)),
        BreakerState::Closed
    );

    let mut breaker = opened();
    run(&mut breaker, UpstreamOutcome::Failure, at(30));
    assert_eq!(breaker.state_at(&CONFIG, at(59)), BreakerState::Open);
    assert_eq!(breaker.state_at(&CONFIG, at(60)), BreakerState::HalfOpen);
}

#[test]
fn zero_in_configuration_counts_as_one() {
    let zeros = BreakerConfig {
        failure_threshold: 0,
        recovery: Duration::ZERO,
        success_threshold: 0,
        probes: 0,
    };
    let mut breaker = Breaker::new(0);
    let ticket = breaker.admit(&zeros, at(0)).unwrap();
    breaker.settle(&zeros, ticket, UpstreamOutcome::Failure, at(0));
    assert_eq!(breaker.state(), BreakerState::Open);
    let ticket = breaker.admit(&zeros, at(0)).unwrap();
    assert!(breaker.admit(&zeros, at(0)).is_err());
    breaker.settle(&zeros, ticket, UpstreamOutcome::Success, at(0));
    assert_eq!(breaker.state(), BreakerState::Closed);
}

#[derive(Clone, Debug)]
enum Step {
    Admit,
    Settle(usize, UpstreamOutcome),
    LoseTicket(usize),
    AdvanceTime(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let outcome = prop_oneof![
        Just(UpstreamOutcome::Success),
        Just(UpstreamOutcome::Failure),
        Just(UpstreamOutcome::Abandoned)
    ];
    prop_oneof![
        4 => Just(Step::Admit),
        4 => (0usize..8, outcome).prop_map(|(which, outcome)| Step::Settle(which, outcome)),
        1 => (0usize..8).prop_map(Step::LoseTicket),
        2 => (0u64..20).prop_map(Step::AdvanceTime),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn invariants_hold_for_any_sequence(steps in proptest::collection::vec(step(), 0..150)) {
        let mut breaker = Breaker::new(0);
        let mut held: Vec<(Ticket, u64)> = Vec::new();
        let mut now = 0;
        let mut opened_at = 0;
        for step in steps {
            let before = breaker.state();
            let reported = breaker.state_at(&CONFIG, at(now));
            match step {
                Step::Admit => match breaker.admit(&CONFIG, at(now)) {
                    Ok(ticket) => {
                        // An open breaker refuses until recovery has passed.
                        prop_assert!(before != BreakerState::Open || now >= opened_at + 30);
                        prop_assert_eq!(breaker.state(), reported);
                        prop_assert!(reported != BreakerState::Open);
                        held.push((ticket, now));
                        let probing = held
                            .iter()
                            .filter(|(ticket, since)| {
                                ticket.generation == breaker.generation
                                    && ticket.probe.is_some()
                                    && now < since + 30
                            })
                            .count();
                        // Never more than `probes` in flight.
                        prop_assert!(probing <= 2);
                    }
                    Err(open) => {
                        prop_assert!(before != BreakerState::Closed);
                        prop_assert!(!open.remaining.is_zero());
                        prop_assert!(open.remaining <= CONFIG.recovery);
                        // A refused attempt changes nothing, and the reported time is right.
                        prop_assert_eq!(breaker.state(), before);
                        let mut later = breaker.clone();
                        prop_assert!(later.admit(&CONFIG, at(now) + open.remaining).is_ok());
                    }
                },
                Step::Settle(which, outcome) if !held.is_empty() => {
                    let (ticket, _) = held.swap_remove(which % held.len());
                    breaker.settle(&CONFIG, ticket, outcome, at(now));
                    // Abandoned requests never count.
                    if outcome == UpstreamOutcome::Abandoned {
                        prop_assert_eq!(breaker.state(), before);
                    }
                    if outcome == UpstreamOutcome::Success {
                        prop_assert!(breaker.state() != BreakerState::Open || before == BreakerState::Open);
                    }
                }
                Step::LoseTicket(which) if !held.is_empty() => {
                    drop(held.swap_remove(which % held.len()));
                }
                Step::AdvanceTime(seconds) => now += seconds,
                Step::Settle(..) | Step::LoseTicket(_) => {}
            }
            if before != BreakerState::Open && breaker.state() == BreakerState::Open {
                opened_at = now;
            }
        }
        // The breaker can close again from any state.
        now += 60;
        for _ in 0..2 {
            run(&mut breaker, UpstreamOutcome::Success, at(now));
        }
        prop_assert_eq!(breaker.state(), BreakerState::Closed);
    }

    #[test]
    fn clock_jumps_never_panic(moments in proptest::collection::vec(any::<u64>(), 0..40)) {
        let mut breaker = Breaker::new(0);
        for nanos in moments {
            let now = Tick::from_nanos(nanos);
            match breaker.admit(&CONFIG, now) {
                Ok(ticket) => breaker.settle(&CONFIG, ticket, UpstreamOutcome::Failure, now),
                Err(open) => prop_assert!(open.remaining <= CONFIG.recovery),
            }
        }
    }
}
