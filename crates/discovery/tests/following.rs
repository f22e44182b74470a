//! Lists and watches: what an API server may answer, and what is asked next.

use branchline_discovery::Timing;
use serde_json::json;

use crate::script::{Answer, Running, Then, ms, pod, quick, unready};

const A: &str = "10.0.0.1:80";
const B: &str = "10.0.0.2:80";

fn list_a() -> Answer {
    Answer::List("100", vec![pod("a", "1", "10.0.0.1", 90)], "")
}

fn list_b() -> Answer {
    Answer::List("140", vec![pod("b", "2", "10.0.0.2", 130)], "")
}

#[tokio::test]
async fn events_after_a_list_change_the_fleet() {
    let running = Running::start(quick(), [list_a(), Answer::Watch(vec![], Then::Stays)]);
    running.until(&[A]).await;
    running.script.send("ADDED", pod("b", "2", "10.0.0.2", 101));
    running.until(&[A, B]).await;
    running.script.send("MODIFIED", unready(pod("a", "1", "10.0.0.1", 102)));
    running.until(&[B]).await;
    running.script.send("MODIFIED", pod("a", "1", "10.0.0.1", 103));
    running.until(&[A, B]).await;
    // A forced deletion: its last state has no address.
    let bare = json!({"metadata": {"name": "b", "namespace": "n", "uid": "2", "resourceVersion": "104"}});
    running.script.send("DELETED", bare);
    running.until(&[A]).await;
    let log = running.sink.log.lock().clone();
    let right = ["add", "add", "hold", "resume", "gone"];
    assert!(log.iter().map(|line| line.split(' ').next()).eq(right.map(Some)), "{log:?}");
    assert_eq!(running.script.watches(), ["100"]);
}

#[tokio::test]
async fn a_watch_that_ends_in_order_goes_on_from_its_last_version() {
    let bookmark = json!({"metadata": {"resourceVersion": "130"}});
    let running = Running::start(
        quick(),
        [
            list_a(),
            Answer::Watch(vec![("MODIFIED", pod("a", "1", "10.0.0.1", 120))], Then::Ends(300)),
            Answer::Watch(vec![("BOOKMARK", bookmark)], Then::Ends(300)),
        ],
    );
    running.when("three watches", |one| one.script.watches().len() == 3).await;
    assert_eq!(running.script.watches(), ["100", "120", "130"]);
    assert_eq!(running.script.lists().len(), 1);
}

#[tokio::test]
async fn an_expired_version_is_listed_again_in_the_stream_and_at_the_start_of_a_watch() {
    for status in [410, 504] {
        let gone = json!({"kind": "Status", "code": 410, "message": "too old resource version"});
        let running = Running::start(
            quick(),
            [
                list_a(),
                Answer::Watch(vec![("ERROR", gone)], Then::Stays),
                Answer::List("500", vec![pod("a", "1", "10.0.0.1", 90)], ""),
                Answer::Status(status),
                list_b(),
            ],
        );
        running.until(&[B]).await;
        running.when("the last watch", |one| one.script.watches().len() == 3).await;
        assert_eq!(running.script.watches(), ["100", "500", "140"]);
        assert_eq!(running.script.lists().len(), 3);
        assert!(running.metrics.encode().contains(r#"discovery_lists_total{reason="expired"} 2"#));
    }
}

#[tokio::test]
async fn a_version_that_is_always_expired_or_a_watch_that_ends_at_once_is_not_asked_for_in_a_circle() {
    for next in [Answer::Status(410), Answer::Watch(vec![], Then::Ends(0))] {
        let timing = Timing { pause: (ms(40), ms(160)), ..quick() };
        let running = Running::start(timing, (0..20).flat_map(|_| [list_a(), next.clone()]));
        running.when("six lists", |one| one.script.lists().len() >= 6).await;
        let lists = running.script.lists();
        let pauses: Vec<_> = lists.windows(2).map(|pair| pair[1] - pair[0]).collect();
        for (pause, least) in pauses.iter().zip([30, 60, 120, 120, 120]) {
            assert!(*pause >= ms(least), "{pauses:?}");
        }
        assert_eq!(running.sink.routable(), [A]);
    }
}

#[tokio::test]
async fn a_pod_deleted_while_the_watch_is_down_is_gone_by_the_next_list() {
    let both = vec![pod("a", "1", "10.0.0.1", 90), pod("b", "2", "10.0.0.2", 91)];
    let running = Running::start(
        quick(),
        [Answer::List("100", both, ""), Answer::Watch(vec![], Then::Breaks), Answer::Status(503), list_b()],
    );
    running.until(&[B]).await;
    assert_eq!(*running.sink.log.lock(), [format!("add {A}"), format!("add {B}"), format!("gone {A}")]);
}

#[tokio::test]
async fn a_silent_watch_is_given_up_and_all_is_listed_again() {
    let timing = Timing { stale: ms(1500), ..quick() };
    // The third one: a server that ends watches in order and never says anything is no better.
    for answers in [
        vec![list_a(), Answer::Watch(vec![], Then::Stays), list_b()],
        vec![
            list_a(),
            Answer::Watch(vec![], Then::Ends(800)),
            Answer::Watch(vec![], Then::Ends(900)),
            list_b(),
        ],
    ] {
        let running = Running::start(timing, answers);
        running.until(&[B]).await;
        assert!(running.metrics.encode().contains(r#"discovery_lists_total{reason="stale"} 1"#));
    }
}

#[tokio::test]
async fn a_call_without_an_answer_is_given_up() {
    let timing = Timing { answer: ms(100), ..quick() };
    let running = Running::start(timing, [Answer::Silence, list_a(), Answer::Silence, list_b()]);
    running.until(&[B]).await;
}

#[tokio::test]
async fn what_is_no_event_breaks_the_watch_and_nothing_else() {
    let odd = Answer::Watch(vec![("MODIFIED", json!([1, 2]))], Then::Stays);
    let running = Running::start(quick(), [list_a(), odd, list_b()]);
    running.until(&[B]).await;
}

#[tokio::test]
async fn a_long_list_is_read_page_by_page() {
    let first = Answer::List("100", vec![pod("a", "1", "10.0.0.1", 90)], "more/1=");
    let running = Running::start(quick(), [first, list_b()]);
    running.until(&[A, B]).await;
    assert!(running.script.calls.lock()[1].1.ends_with("&continue=more%2F1%3D"));
}

#[tokio::test]
async fn late_events_do_not_bring_back_what_is_past() {
    let running = Running::start(quick(), [Answer::List("100", vec![], "")]);
    for (kind, object) in [
        ("ADDED", pod("a", "1", "10.0.0.1", 101)),
        ("MODIFIED", pod("a", "1", "10.0.0.9", 104)),
        ("MODIFIED", pod("a", "1", "10.0.0.1", 103)),
        ("ADDED", pod("b", "2", "10.0.0.2", 105)),
        ("DELETED", pod("b", "2", "10.0.0.2", 107)),
        ("MODIFIED", pod("b", "2", "10.0.0.2", 106)),
        ("ADDED", pod("c", "3", "10.0.0.3", 108)),
    ] {
        running.script.send(kind, object);
    }
    running.until(&["10.0.0.3:80", "10.0.0.9:80"]).await;
}
