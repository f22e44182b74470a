use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn breaker() -> Breaker {
    Breaker::new(BreakerOptions::default())
}

/// One request from its choice to its verdict.
fn run(breaker: &Breaker, verdict: Verdict, now: Duration) -> Phase {
    let ticket = breaker.enter(now).unwrap();
    breaker.settle(ticket, verdict, now);
    breaker.phase(now)
}

#[test]
fn breaker_client_errors_are_neutral() {
    let first = breaker();
    for _ in 0..20 {
        assert_eq!(run(&first, Verdict::Neutral, SECOND), Phase::Closed);
    }
    let second = breaker();
    let mut phases: Vec<_> = (0..5).map(|_| run(&second, Verdict::Failure, SECOND)).collect();
    assert!(!second.admits(10 * SECOND) && second.enter(10 * SECOND).is_none());
    assert_eq!(second.wait(10 * SECOND), SECOND);
    let late = 11 * SECOND;
    phases.push(second.phase(late));
    for verdict in [Verdict::Neutral, Verdict::Neutral, Verdict::Failure] {
        phases.push(run(&second, verdict, late));
    }
    use Phase::{Closed, HalfOpen, Open};
    assert_eq!(phases, [Closed, Closed, Closed, Closed, Open, HalfOpen, HalfOpen, HalfOpen, Open]);
}

#[test]
fn half_of_the_last_twenty_opens_it_and_less_does_not() {
    let breaker = breaker();
    for number in 0..19 {
        let verdict = if number % 2 == 0 { Verdict::Failure } else { Verdict::Success };
        assert_eq!(run(&breaker, verdict, SECOND), Phase::Closed, "after {number}");
    }
    assert_eq!(run(&breaker, Verdict::Success, SECOND), Phase::Closed, "a success opens nothing");
    // Nineteen stay in view: the oldest, a failure, has left.
    assert_eq!(run(&breaker, Verdict::Failure, SECOND), Phase::Open);
    let calm = Breaker::new(BreakerOptions::default());
    for number in 0..200 {
        let verdict = if number % 3 == 0 { Verdict::Failure } else { Verdict::Success };
        assert_eq!(run(&calm, verdict, SECOND), Phase::Closed, "after {number}");
    }
}

#[test]
fn breaker_one_probe_at_a_time_and_two_successes_close_it() {
    let breaker = breaker();
    (0..5).for_each(|_| _ = run(&breaker, Verdict::Failure, SECOND));
    let late = 11 * SECOND;
    let probe = breaker.enter(late).unwrap();
    for _ in 0..19 {
        assert!(!breaker.admits(late) && breaker.enter(late).is_none());
    }
    assert_eq!(breaker.settle(probe, Verdict::Success, late), None);
    let second = breaker.enter(late).unwrap();
    assert!(breaker.enter(late).is_none());
    assert_eq!(breaker.settle(second, Verdict::Success, late), Some(Phase::Closed));
    assert!(breaker.admits(late));
}

#[test]
fn verdicts_from_before_it_opened_neither_close_nor_reopen_it() {
    let breaker = breaker();
    let early: Vec<_> = (0..10).map(|_| breaker.enter(SECOND).unwrap()).collect();
    for ticket in &early[..5] {
        breaker.settle(*ticket, Verdict::Failure, SECOND);
    }
    let late = 11 * SECOND;
    let probe = breaker.enter(late).unwrap();
    for ticket in &early[5..] {
        assert_eq!(breaker.settle(*ticket, Verdict::Failure, late), None);
    }
    assert_eq!(breaker.phase(late), Phase::HalfOpen);
    breaker.settle(probe, Verdict::Success, late);
    assert_eq!(run(&breaker, Verdict::Success, late), Phase::Closed);
}

#[test]
fn a_breaker_of_zero_failures_never_opens() {
    let breaker = Breaker::new(BreakerOptions { failures: 0, ..BreakerOptions::default() });
    (0..100).for_each(|_| assert_eq!(run(&breaker, Verdict::Failure, SECOND), Phase::Closed));
}
