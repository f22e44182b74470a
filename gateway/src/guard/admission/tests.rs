//! What an admission lets in, makes wait and refuses, without a gateway around it.

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn admission(given: &[(&str, &str)]) -> Arc<Admission> {
    let given = given.iter().map(|(name, value)| ((*name).to_owned(), vec![(*value).to_owned()])).collect();
    let options = crate::config::resolve_arguments(given, None, std::iter::empty()).expect("good options");
    Admission::of(&options, &Arc::default()).expect("good files").expect("something is limited")
}

fn request(headers: &[(&'static str, &str)]) -> Request<Body> {
    let mut request = Request::new(Body::from("x".repeat(40)));
    for (name, value) in headers {
        request.headers_mut().insert(*name, value.parse().expect("a header"));
    }
    request
}

fn ask(admission: &Arc<Admission>, headers: &[(&'static str, &str)]) -> Result<Entry> {
    admission.ask(None, &mut request(headers))
}

fn enter(admission: &Arc<Admission>) -> Permit {
    match ask(admission, &[]).expect("it is let in") {
        Entry::In(permit) => permit,
        Entry::Waits(_) => panic!("a place is free"),
    }
}

fn queue(admission: &Arc<Admission>, headers: &[(&'static str, &str)]) -> Queued {
    match ask(admission, headers).expect("it may wait") {
        Entry::Waits(queued) => *queued,
        Entry::In(_) => panic!("no place is free"),
    }
}

/// As if twenty places had become free, so long after each other.
fn free_every(admission: &Admission, gap: Duration) {
    let start = Instant::now();
    for at in 0..20 {
        admission.queue.as_ref().expect("a queue").freed(start + gap * at);
    }
}

#[tokio::test]
async fn places_are_bounded_and_free_again_in_the_order_of_arrival() {
    let admission = admission(&[("max_concurrent_requests", "1"), ("queue_size", "2")]);
    let held = enter(&admission);
    let (first, second) = (queue(&admission, &[]), queue(&admission, &[]));
    let refused = ask(&admission, &[]).err().expect("the queue is full");
    assert_eq!(refused.code, ErrorCode::ResourceExhausted);
    assert!(refused.retry_after >= Some(SECOND), "{refused:?}");
    drop(held);
    let place = first.turn().await.expect("its turn");
    let second = tokio::spawn(second.turn());
    tokio::task::yield_now().await;
    assert!(!second.is_finished());
    drop(place);
    second.await.expect("no panic").expect("its turn");
}

#[tokio::test]
async fn who_leaves_the_queue_frees_his_place_in_it() {
    let given = [("max_concurrent_requests", "1"), ("queue_size", "1"), ("queue_timeout", "50ms")];
    let admission = admission(&given);
    let _held = enter(&admission);
    let waiting = || admission.waiting();
    let error = queue(&admission, &[]).turn().await.expect_err("its time is over");
    assert_eq!((error.code, waiting()), (ErrorCode::ResourceExhausted, 0));
    drop(queue(&admission, &[]));
    assert_eq!(waiting(), 0, "its client left");
}

#[tokio::test]
async fn a_deadline_that_passes_in_the_queue_ends_the_wait_and_a_hopeless_one_begins_none() {
    let admission = admission(&[("max_concurrent_requests", "1")]);
    let _held = enter(&admission);
    let soon = queue(&admission, &[("x-branchline-deadline-ms", "20")]);
    assert_eq!(soon.turn().await.expect_err("it is too late").code, ErrorCode::DeadlineExceeded);
    free_every(&admission, 7 * SECOND);
    let error = ask(&admission, &[("x-branchline-deadline-ms", "5000")]).err().expect("7 s are to be waited");
    assert_eq!(error.code, ErrorCode::ResourceExhausted);
    drop(queue(&admission, &[("x-branchline-deadline-ms", "60000")]));
    for bad in ["soon", "-1", "1.5", "99999999999999999999"] {
        let error = ask(&admission, &[("x-branchline-deadline-ms", bad)]).err().expect("no number");
        assert_eq!(error.field.as_deref(), Some("x-branchline-deadline-ms"));
    }
}

#[test]
fn the_wait_that_is_told_follows_the_pace() {
    let admission = admission(&[("max_concurrent_requests", "1")]);
    let _held = enter(&admission);
    free_every(&admission, 7 * SECOND);
    let told = admission.refusal("full", "").retry_after.expect("a wait");
    assert!((6.5..7.5).contains(&told.as_secs_f64()), "{told:?}");
}

#[tokio::test]
async fn tokens_are_charged_as_counted_else_as_sent_and_a_refused_request_costs_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("tenants.toml");
    std::fs::write(&path, "[default]\ntokens_per_minute = 100\n").expect("written");
    let file = path.to_str().expect("UTF-8");
    let admission = admission(&[
        ("tenant_file", file),
        ("tenant_header", "x-team"),
        ("max_concurrent_requests", "1"),
        ("queue_size", "0"),
    ]);
    let enter = |team: &str| match ask(&admission, &[("x-team", team)]) {
        Ok(Entry::In(permit)) => Ok(permit),
        Ok(Entry::Waits(_)) => panic!("nobody waits"),
        Err(error) => Err(error),
    };
    let counted = enter("a").expect("a place");
    for _ in 0..20 {
        assert!(enter("b").is_err(), "no place is free");
    }
    counted.used(150);
    drop(counted);
    let error = enter("a").expect_err("a owes 50");
    assert!(error.message.contains("tokens a minute"), "{error}");
    assert!((30.0..=37.0).contains(&error.retry_after.expect("a wait").as_secs_f64()), "{error:?}");
    let told = |team: &str, stream: bool, answer: &str| {
        let permit = enter(team).expect("refusals cost nothing");
        let mut usage = Usage::of_stream(stream);
        usage.read(answer.as_bytes());
        permit.told(&usage);
    };
    told("b", false, &"x".repeat(4 * 95));
    assert!(enter("b").is_err(), "ten of the prompt and 95 of the answer");
    told("c", true, &"data: a long piece of JSON that is no more than one token\n\n".repeat(80));
    told("c", true, &"data: 1\n\n".repeat(15));
    assert!(enter("c").is_err(), "twice ten and 95 events");
    told("d", false, r#"{"text":"a long answer","usage":{"prompt_tokens":99,"total_tokens":100}}"#);
    assert!(enter("d").is_err(), "the worker's own count stands");
}

#[tokio::test]
async fn what_kept_a_request_out_is_counted_by_its_reason() {
    let given = [("max_concurrent_requests", "1"), ("queue_size", "1"), ("queue_timeout", "10ms")];
    let admission = admission(&[&given[..], &[("max_bytes_in_flight", "100")]].concat());
    let _held = enter(&admission);
    let queued = queue(&admission, &[]);
    assert_eq!(admission.bytes(), 80);
    assert!(ask(&admission, &[]).is_err_and(|error| error.message.contains("max-bytes-in-flight")));
    assert!(queued.turn().await.is_err());
    let late = queue(&admission, &[("x-branchline-deadline-ms", "1")]);
    let mut small = Request::new(Body::empty());
    assert!(admission.ask(None, &mut small).is_err(), "the queue is full");
    assert!(late.turn().await.is_err());
    let count = |reason: &'static str| admission.metrics.admission_refused.with([reason]).get();
    let counts = ["bytes", "timeout", "full", "deadline", "allowance"].map(count);
    assert_eq!(counts, [1, 1, 1, 1, 0]);
    assert_eq!(admission.bytes(), 40, "who was kept out holds nothing");
}
