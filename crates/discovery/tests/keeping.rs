//! What is done to a fleet: what may not be believed at once, what an operator decides, what can't be done.

use serde_json::{Value, json};

use crate::script::{Answer, Running, Then, pod, quick};

const A: &str = "10.0.0.1:80";
const B: &str = "10.0.0.2:80";

fn two() -> Vec<Value> {
    vec![pod("a", "1", "10.0.0.1", 90), pod("b", "2", "10.0.0.2", 91)]
}

fn broken() -> Answer {
    Answer::Watch(vec![], Then::Breaks)
}

#[tokio::test]
async fn an_empty_list_is_believed_only_when_it_is_said_twice() {
    let mut answers = vec![
        Answer::List("100", two(), ""),
        broken(),
        // A server that has just started and has read nothing yet.
        Answer::List("1", vec![], ""),
        Answer::List("140", two(), ""),
        Answer::Watch(vec![("ADDED", pod("c", "3", "10.0.0.3", 141))], Then::Breaks),
    ];
    answers.extend([Answer::List("150", vec![], ""), Answer::List("151", vec![], "")]);
    let running = Running::start(quick(), answers);
    running.until(&[]).await;
    running.when("all are gone", |one| one.sink.log.lock().len() == 6).await;
    let log = running.sink.log.lock().clone();
    let words: Vec<_> = log.iter().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(words, ["add", "add", "add", "gone", "gone", "gone"], "none was taken out before: {log:?}");
}

#[tokio::test]
async fn a_server_that_refuses_leaves_the_fleet_as_it_is_and_is_asked_until_it_answers() {
    let mut answers = vec![Answer::List("100", two(), ""), broken()];
    answers.extend((0..200).map(|_| Answer::Status(403)));
    answers.push(Answer::List("140", vec![pod("b", "2", "10.0.0.2", 91)], ""));
    let running = Running::start(quick(), answers);
    running.until(&[B]).await;
    assert_eq!(*running.sink.log.lock(), [format!("add {A}"), format!("add {B}"), format!("gone {A}")]);
    assert!(running.metrics.encode().contains(r#"discovery_failures_total{kind="forbidden"} 200"#));
}

#[tokio::test]
async fn what_an_operator_takes_out_stays_out_while_its_pod_lives() {
    let running = Running::start(quick(), [Answer::List("100", two(), "")]);
    running.until(&[A, B]).await;
    running.sink.fleet.lock().remove(A);
    // Neither a change of the pod nor the level brings it back.
    running.script.send("MODIFIED", pod("a", "1", "10.0.0.1", 101));
    running.script.send("ADDED", pod("c", "3", "10.0.0.3", 102));
    running.until(&[B, "10.0.0.3:80"]).await;
    running.script.send("DELETED", pod("a", "1", "10.0.0.1", 103));
    running.script.send("ADDED", pod("a", "4", "10.0.0.1", 104));
    running.until(&[A, B, "10.0.0.3:80"]).await;
    assert_eq!(running.sink.fleet.lock()[A].0, "4");
}

#[tokio::test]
async fn an_address_taken_by_another_pod_is_another_worker_even_if_the_end_of_the_first_was_not_told() {
    let running = Running::start(quick(), [Answer::List("100", vec![pod("a", "1", "10.0.0.1", 90)], "")]);
    running.until(&[A]).await;
    running.script.send("ADDED", pod("b", "2", "10.0.0.1", 101));
    running
        .when("the second pod", |one| one.sink.fleet.lock().get(A).is_some_and(|(uid, _)| uid == "2"))
        .await;
    assert_eq!(*running.sink.log.lock(), [format!("add {A}"), format!("replaced {A}"), format!("add {A}")]);
}

#[tokio::test]
async fn a_worker_that_cannot_be_added_is_tried_again() {
    let running = Running::start(quick(), [Answer::List("100", vec![], "")]);
    running.sink.barred.lock().push(A.to_owned());
    for pod in two() {
        running.script.send("ADDED", pod);
    }
    running.until(&[B]).await;
    running.when("four tries", |one| *one.sink.tries.lock() >= 4).await;
    running.sink.barred.lock().clear();
    running.until(&[A, B]).await;
}

#[tokio::test]
async fn a_pod_that_cannot_be_read_harms_no_other() {
    let mut bad = pod("bad", "9", "10.0.0.9", 92);
    bad["metadata"]["annotations"] = json!({"branchline.dev/worker-ports": "soon"});
    let mut all = two();
    all.push(bad);
    let running = Running::start(quick(), [Answer::List("100", all, "")]);
    running.until(&[A, B]).await;
}

#[tokio::test]
async fn what_discovery_does_is_counted() {
    let running = Running::start(quick(), [Answer::List("100", two(), "")]);
    running.until(&[A, B]).await;
    let watching = "branchline_router_discovery_watches 1";
    running.when("the watch", |one| one.metrics.encode().contains(watching)).await;
    let text = running.metrics.encode();
    for line in [
        r#"branchline_router_discovery_workers{state="ready"} 2"#,
        r#"branchline_router_discovery_changes_total{change="add"} 2"#,
        r#"branchline_router_discovery_lists_total{reason="start"} 1"#,
        "branchline_router_discovery_settle_duration_seconds_count 1",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
    let name = "branchline_router_discovery_last_heard_timestamp_seconds ";
    let heard = text.lines().find_map(|line| line.strip_prefix(name)).and_then(|time| time.parse().ok());
    assert!(heard.is_some_and(|time: u64| time > 1_700_000_000), "{heard:?}");
}
