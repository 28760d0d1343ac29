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

fn run(breaker: &mut Breaker, outcome: Outcome, now: Tick) {
    let ticket = breaker.admit(&CONFIG, now).unwrap();
    breaker.settle(&CONFIG, ticket, outcome, now);
}

/// Opened at 0.
fn opened() -> Breaker {
    opened_with(0)
}

fn opened_with(id: u64) -> Breaker {
    let mut breaker = Breaker::new(id);
    for _ in 0..3 {
        run(&mut breaker, Outcome::Failure, at(0));
    }
    assert_eq!(breaker.state(), State::Open);
    breaker
}

#[test]
fn failures_in_a_row_open_it_and_successes_close_it_again() {
    let mut breaker = opened();
    assert_eq!(
        breaker.admit(&CONFIG, at(29)),
        Err(Open {
            remaining: Duration::from_secs(1)
        })
    );
    run(&mut breaker, Outcome::Success, at(30));
    assert_eq!(breaker.state(), State::HalfOpen);
    run(&mut breaker, Outcome::Success, at(30));
    assert_eq!(breaker.state(), State::Closed);
    assert!(breaker.is_idle());
}

#[test]
fn a_success_forgives_the_failures_before_it() {
    let mut breaker = Breaker::new(0);
    for _ in 0..1_000 {
        run(&mut breaker, Outcome::Failure, at(0));
        run(&mut breaker, Outcome::Failure, at(0));
        run(&mut breaker, Outcome::Success, at(0));
    }
    assert_eq!(breaker.state(), State::Closed);
}

#[test]
fn one_failure_in_half_open_opens_it_for_the_full_time() {
    let mut breaker = opened();
    run(&mut breaker, Outcome::Success, at(40));
    run(&mut breaker, Outcome::Failure, at(41));
    assert_eq!(breaker.state(), State::Open);
    let open = breaker.admit(&CONFIG, at(42)).unwrap_err();
    assert_eq!(open.remaining, Duration::from_secs(29));
    // Successes from before do not count.
    run(&mut breaker, Outcome::Success, at(80));
    assert_eq!(breaker.state(), State::HalfOpen);
}

#[test]
fn half_open_admits_a_bounded_number_of_probes() {
    let mut breaker = opened();
    let first = breaker.admit(&CONFIG, at(30)).unwrap();
    let _second = breaker.admit(&CONFIG, at(35)).unwrap();
    let open = breaker.admit(&CONFIG, at(40)).unwrap_err();
    assert_eq!(open.remaining, Duration::from_secs(20));
    assert_eq!(open.seconds(), 20);
    breaker.settle(&CONFIG, first, Outcome::Abandoned, at(41));
    assert_eq!(breaker.state(), State::HalfOpen);
    assert!(breaker.admit(&CONFIG, at(41)).is_ok());
    assert!(breaker.admit(&CONFIG, at(41)).is_err());
}

#[test]
fn a_lost_probe_does_not_lock_it() {
    let mut breaker = opened();
    let lost = breaker.admit(&CONFIG, at(30)).unwrap();
    drop(breaker.admit(&CONFIG, at(30)).unwrap());
    assert!(breaker.admit(&CONFIG, at(59)).is_err());
    let fresh = breaker.admit(&CONFIG, at(60)).unwrap();
    // It comes back after all, and takes nobody's place with it.
    breaker.settle(&CONFIG, lost, Outcome::Abandoned, at(61));
    let second = breaker.admit(&CONFIG, at(61)).unwrap();
    assert!(breaker.admit(&CONFIG, at(61)).is_err());
    breaker.settle(&CONFIG, fresh, Outcome::Success, at(61));
    breaker.settle(&CONFIG, second, Outcome::Success, at(61));
    assert_eq!(breaker.state(), State::Closed);
}

#[test]
fn a_late_answer_of_a_probe_still_counts() {
    for (outcome, state) in [
        (Outcome::Success, State::Closed),
        (Outcome::Failure, State::Open),
        (Outcome::Abandoned, State::HalfOpen),
    ] {
        let mut breaker = opened();
        let late = breaker.admit(&CONFIG, at(30)).unwrap();
        let other = breaker.admit(&CONFIG, at(70)).unwrap();
        breaker.settle(&CONFIG, other, Outcome::Success, at(70));
        breaker.settle(&CONFIG, late, outcome, at(71));
        assert_eq!(breaker.state(), state, "{outcome:?}");
    }
}

/// One request a second, and every answer is good but takes longer than a lease.
#[test]
fn an_upstream_slower_than_its_recovery_closes_it_again() {
    for probes in [1, 2] {
        let config = BreakerConfig { probes, ..CONFIG };
        let mut breaker = opened();
        let mut in_flight = std::collections::VecDeque::new();
        for second in 1..300 {
            if in_flight.front().is_some_and(|(_, due)| *due == second) {
                let (ticket, _) = in_flight.pop_front().unwrap();
                breaker.settle(&config, ticket, Outcome::Success, at(second));
            }
            if let Ok(ticket) = breaker.admit(&config, at(second)) {
                in_flight.push_back((ticket, second + 40));
            }
        }
        assert_eq!(breaker.state(), State::Closed, "{probes} probes");
    }
}

#[test]
fn a_ticket_of_another_breaker_changes_nothing() {
    let mut breaker = opened();
    let mut other = opened_with(1);
    let foreign = other.admit(&CONFIG, at(30)).unwrap();
    let own = breaker.admit(&CONFIG, at(30)).unwrap();
    breaker.settle(&CONFIG, foreign, Outcome::Failure, at(31));
    assert_eq!(breaker.state(), State::HalfOpen);
    breaker.settle(&CONFIG, own, Outcome::Failure, at(31));
    assert_eq!(breaker.state(), State::Open);
}

#[test]
fn an_outcome_from_an_earlier_generation_changes_nothing() {
    let mut breaker = Breaker::new(0);
    let slow_failure = breaker.admit(&CONFIG, at(0)).unwrap();
    let slow_success = breaker.admit(&CONFIG, at(0)).unwrap();
    for _ in 0..3 {
        run(&mut breaker, Outcome::Failure, at(0));
    }
    let probe = breaker.admit(&CONFIG, at(30)).unwrap();
    breaker.settle(&CONFIG, slow_failure, Outcome::Failure, at(31));
    assert_eq!(breaker.state(), State::HalfOpen);
    breaker.settle(&CONFIG, slow_success, Outcome::Success, at(31));
    breaker.settle(&CONFIG, probe, Outcome::Success, at(31));
    assert_eq!(breaker.state(), State::HalfOpen);
}

#[test]
fn what_we_refuse_ourselves_never_counts() {
    let mut breaker = Breaker::new(0);
    for _ in 0..100 {
        run(&mut breaker, Outcome::Abandoned, at(0));
    }
    assert!(breaker.is_idle());
    let mut breaker = opened();
    for second in 0..30 {
        assert!(breaker.admit(&CONFIG, at(second)).is_err());
    }
    for _ in 0..100 {
        run(&mut breaker, Outcome::Abandoned, at(30));
    }
    assert_eq!(breaker.state(), State::HalfOpen);
}

#[test]
fn a_shorter_recovery_after_a_reload_applies_at_once() {
    let mut breaker = opened();
    let quick = BreakerConfig {
        recovery: Duration::from_secs(5),
        ..CONFIG
    };
    assert!(breaker.admit(&CONFIG, at(6)).is_err());
    assert!(breaker.admit(&quick, at(6)).is_ok());
}

#[test]
fn a_clock_that_goes_back_never_keeps_it_open_for_longer() {
    let mut breaker = Breaker::new(0);
    for _ in 0..3 {
        run(&mut breaker, Outcome::Failure, at(1_000_000));
    }
    let open = breaker.admit(&CONFIG, at(10)).unwrap_err();
    assert_eq!(open.remaining, CONFIG.recovery);
    assert!(breaker.admit(&CONFIG, at(40)).is_ok());
}

// Issue 14, number 17.
#[test]
fn state_at_is_half_open_once_recovery_has_passed() {
    let breaker = opened();
    assert_eq!(breaker.state_at(&CONFIG, at(29)), State::Open);
    assert_eq!(breaker.state_at(&CONFIG, at(30)), State::HalfOpen);
    assert_eq!(breaker.state(), State::Open, "reading changes nothing");
    assert_eq!(Breaker::new(0).state_at(&CONFIG, at(30)), State::Closed);

    let mut breaker = opened();
    run(&mut breaker, Outcome::Failure, at(30));
    assert_eq!(breaker.state_at(&CONFIG, at(59)), State::Open);
    assert_eq!(breaker.state_at(&CONFIG, at(60)), State::HalfOpen);
}

#[test]
fn zeros_in_the_configuration_count_as_one() {
    let zeros = BreakerConfig {
        failure_threshold: 0,
        recovery: Duration::ZERO,
        success_threshold: 0,
        probes: 0,
    };
    let mut breaker = Breaker::new(0);
    let ticket = breaker.admit(&zeros, at(0)).unwrap();
    breaker.settle(&zeros, ticket, Outcome::Failure, at(0));
    assert_eq!(breaker.state(), State::Open);
    let ticket = breaker.admit(&zeros, at(0)).unwrap();
    assert!(breaker.admit(&zeros, at(0)).is_err());
    breaker.settle(&zeros, ticket, Outcome::Success, at(0));
    assert_eq!(breaker.state(), State::Closed);
}

#[derive(Clone, Debug)]
enum Step {
    Ask,
    Settle(usize, Outcome),
    Lose(usize),
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let outcome = prop_oneof![
        Just(Outcome::Success),
        Just(Outcome::Failure),
        Just(Outcome::Abandoned)
    ];
    prop_oneof![
        4 => Just(Step::Ask),
        4 => (0usize..8, outcome).prop_map(|(which, outcome)| Step::Settle(which, outcome)),
        1 => (0usize..8).prop_map(Step::Lose),
        2 => (0u64..20).prop_map(Step::Pass),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn the_invariants_hold_whatever_happens(steps in proptest::collection::vec(step(), 0..150)) {
        let mut breaker = Breaker::new(0);
        let mut held: Vec<(Ticket, u64)> = Vec::new();
        let mut now = 0;
        let mut opened_at = 0;
        for step in steps {
            let before = breaker.state();
            let reported = breaker.state_at(&CONFIG, at(now));
            match step {
                Step::Ask => match breaker.admit(&CONFIG, at(now)) {
                    Ok(ticket) => {
                        // Open refuses until recovery has passed.
                        prop_assert!(before != State::Open || now >= opened_at + 30);
                        prop_assert_eq!(breaker.state(), reported);
                        prop_assert!(reported != State::Open);
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
                        prop_assert!(before != State::Closed);
                        prop_assert!(!open.remaining.is_zero());
                        prop_assert!(open.remaining <= CONFIG.recovery);
                        // Asking changes nothing, and the time named is the truth.
                        prop_assert_eq!(breaker.state(), before);
                        let mut later = breaker.clone();
                        prop_assert!(later.admit(&CONFIG, at(now) + open.remaining).is_ok());
                    }
                },
                Step::Settle(which, outcome) if !held.is_empty() => {
                    let (ticket, _) = held.swap_remove(which % held.len());
                    breaker.settle(&CONFIG, ticket, outcome, at(now));
                    // Our own refusals never count.
                    if outcome == Outcome::Abandoned {
                        prop_assert_eq!(breaker.state(), before);
                    }
                    if outcome == Outcome::Success {
                        prop_assert!(breaker.state() != State::Open || before == State::Open);
                    }
                }
                Step::Lose(which) if !held.is_empty() => {
                    drop(held.swap_remove(which % held.len()));
                }
                Step::Pass(seconds) => now += seconds,
                Step::Settle(..) | Step::Lose(_) => {}
            }
            if before != State::Open && breaker.state() == State::Open {
                opened_at = now;
            }
        }
        // However it got here, it can close again.
        now += 60;
        for _ in 0..2 {
            run(&mut breaker, Outcome::Success, at(now));
        }
        prop_assert_eq!(breaker.state(), State::Closed);
    }

    #[test]
    fn no_jump_of_the_clock_panics(moments in proptest::collection::vec(any::<u64>(), 0..40)) {
        let mut breaker = Breaker::new(0);
        for nanos in moments {
            let now = Tick::from_nanos(nanos);
            match breaker.admit(&CONFIG, now) {
                Ok(ticket) => breaker.settle(&CONFIG, ticket, Outcome::Failure, now),
                Err(open) => prop_assert!(open.remaining <= CONFIG.recovery),
            }
        }
    }
}
