mod simulation;

use super::*;

const SECOND: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_millis(700);

fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

fn health() -> Health {
    Health::new(HealthOptions::default())
}

#[test]
fn a_silent_worker_is_put_aside_until_its_probe_and_a_byte_clears_it() {
    let health = health();
    assert_eq!(health.stand(SECOND), Stand::Well);
    assert_eq!(health.patience_left(SECOND, PATIENCE, ms(1500)), ms(200));
    assert_eq!(health.patience_left(SECOND, PATIENCE, ms(1700)), Duration::ZERO);
    assert!(health.suspect(PATIENCE, ms(1700)) && !health.suspect(PATIENCE, ms(1701)));
    assert_eq!((health.stand(ms(1702)), health.word(ms(1702))), (Stand::Aside, "suspected"));
    let late = 12 * SECOND;
    assert_eq!(health.stand(late), Stand::Well, "one probe may pass");
    let probe = health.enter(late).unwrap();
    assert_eq!(health.stand(late), Stand::Aside, "and only one");
    health.settle(probe, Verdict::Neutral, late);
    assert_eq!(health.stand(late), Stand::Aside, "it brought nothing, so the wait starts anew");
    health.heard(late);
    assert_eq!(health.stand(late), Stand::Well);
}

#[test]
fn a_worker_that_sends_other_answers_gets_time_and_in_the_end_none() {
    let health = health();
    let chosen = SECOND;
    for at in (1000..3800).step_by(100) {
        health.heard(ms(at));
        assert!(health.patience_left(chosen, PATIENCE, ms(at)) > Duration::ZERO, "{at}");
    }
    health.heard(ms(3800));
    assert_eq!(health.patience_left(chosen, PATIENCE, ms(3800)), Duration::ZERO);
    health.suspect(PATIENCE, ms(3800));
    health.heard(ms(3900));
    assert_eq!(health.stand(ms(3900)), Stand::Aside, "it starves newcomers: old streams prove nothing");
    health.begun(ms(4000), 0, SECOND);
    assert_eq!(health.stand(ms(4000)), Stand::Well);
}

#[test]
fn a_worker_that_asks_to_be_left_alone_is_the_last_choice_until_then() {
    let health = health();
    health.rest(2 * SECOND, SECOND);
    assert_eq!((health.stand(ms(2999)), health.stand(ms(3000))), (Stand::Aside, Stand::Well));
    health.rest(Duration::from_secs(86_400), SECOND);
    assert_eq!(health.stand(61 * SECOND), Stand::Well, "an absurd wait is cut");
}

#[test]
fn an_open_breaker_shuts_a_worker_that_is_well_otherwise() {
    let health = health();
    for _ in 0..5 {
        let entry = health.enter(SECOND).unwrap();
        health.settle(entry, Verdict::Failure, SECOND);
    }
    assert_eq!((health.stand(SECOND), health.word(SECOND)), (Stand::Shut, "broken"));
}

#[test]
fn a_worker_that_has_become_ready_gets_its_share_by_and_by() {
    let health = health();
    health.warm_up(SECOND);
    let shares = [1, 6, 11, 99].map(|second| (health.share(second * SECOND) * 100.0).round());
    assert_eq!(shares, [10.0, 55.0, 100.0, 100.0]);
}
