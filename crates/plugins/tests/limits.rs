//! The hostile set: each module ends within its limits, is counted under its own name, and harms nobody else.

mod kit;

use std::sync::Arc;
use std::time::{Duration, Instant};

use branchline_plugins::{Cause, RequestAction};
use kit::{Kit, guests, request};
use serde_json::json;

/// Far above any limit of these tests and far below what a module without limits would take.
const SOON: Duration = Duration::from_secs(20);

fn tight() -> serde_json::Value {
    json!({"limits": {"time_ms": 200, "memory_mib": 8}, "quarantine_after": 0})
}

#[tokio::test(flavor = "multi_thread")]
async fn each_hostile_module_ends_and_is_counted_under_its_own_name() {
    let kit = Kit::new();
    for (name, bytes, cause) in [
        ("spin", guests::spins(), Cause::Timeout),
        ("sleep", guests::sleeps(), Cause::Timeout),
        ("grow", guests::grows(), Cause::Limit),
        ("recurse", guests::recurses(), Cause::Trap),
        ("trap", guests::traps(), Cause::Trap),
        ("huge", guests::claims(u32::MAX), Cause::BadOutput),
        ("outside", guests::claims(64 << 20), Cause::BadOutput),
        ("crlf", guests::adds_header("x-a", b"1\r\nset-cookie: a=b"), Cause::BadOutput),
        ("utf8", guests::adds_header("x-a", b"\xff\xfe"), Cause::BadOutput),
        ("status0", guests::rejects(0, ""), Cause::BadOutput),
        ("status999", guests::rejects(999, ""), Cause::BadOutput),
        ("path", guests::writes_path("http://elsewhere/"), Cause::BadOutput),
    ] {
        let module = kit.load(name, tight(), bytes).await;
        let started = Instant::now();
        let failure = module.on_request(request()).await.result.expect_err(name);
        assert_eq!(failure.cause, cause, "{name}: {}", failure.detail);
        assert!(started.elapsed() < SOON, "{name} took {:?}", started.elapsed());
        assert_eq!(kit.count(name, cause.name()), 1, "{name}");
        assert!(module.lines(0).iter().any(|line| line.message.contains(cause.name())), "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fuel_ends_a_loop_that_has_all_the_time() {
    let kit = Kit::new();
    let settings = json!({"limits": {"time_ms": 60_000, "fuel": 5_000_000}});
    let module = kit.load("spin", settings, guests::spins()).await;
    let called = module.on_request(request()).await;
    assert_eq!(called.result.expect_err("it spins").cause, Cause::Fuel);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_hostile_calls_at_once_leave_a_good_module_working() {
    let kit = Kit::new();
    let good = kit.load("good", json!({}), guests::noop()).await;
    let bad =
        kit.load("spin", json!({"limits": {"time_ms": 300}, "quarantine_after": 0}), guests::spins()).await;
    let hostile: Vec<_> = (0..100)
        .map(|_| {
            let bad = Arc::clone(&bad);
            tokio::spawn(async move { bad.on_request(request()).await.result.expect_err("it spins").cause })
        })
        .collect();
    for _ in 0..50 {
        let called = good.on_request(request()).await;
        assert_eq!(called.result.expect("it works"), RequestAction::Continue);
    }
    for call in hostile {
        let cause = call.await.expect("no panic");
        // Those that found no place in time are told so.
        assert!(matches!(cause, Cause::Timeout | Cause::Busy), "{cause:?}");
    }
    assert_eq!(kit.count("good", "continue"), 50);
}

#[tokio::test(flavor = "multi_thread")]
async fn repeated_failures_quarantine_and_a_change_lets_the_module_back_in() {
    let kit = Kit::new();
    let module = kit.load("trap", json!({"quarantine_after": 3}), guests::traps()).await;
    for call in 0..3 {
        assert!(!module.is_quarantined(), "call {call}");
        assert_eq!(module.on_request(request()).await.result.expect_err("it traps").cause, Cause::Trap);
    }
    assert!(module.is_quarantined());
    let mended = kit
        .plugins
        .change(module.uuid(), &json!({}), Some(guests::noop().into()))
        .await
        .expect("a good module");
    assert!(!mended.is_quarantined());
    assert!(mended.on_request(request()).await.result.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instance_is_fresh_after_a_trap() {
    // The counter is a global of the instance: a second call on the same one would answer 429.
    let kit = Kit::new();
    let parts = r#"(global $calls (mut i32) (i32.const 0))
      (func (export "branchline:middleware/on-request@1.0.0#handle") (param i32) (result i32)
        (global.set $calls (i32.add (global.get $calls) (i32.const 1)))
        (i32.store8 (i32.const 0) (i32.const 0))
        (if (i32.gt_u (global.get $calls) (i32.const 1)) (then unreachable))
        (call $forget) (i32.const 0))"#;
    let module = kit.load("once", json!({}), guests::with("request-filter", "", parts)).await;
    for _ in 0..3 {
        assert!(module.on_request(request()).await.result.is_ok());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn loading_and_unloading_leaves_no_module_file_series_or_growing_memory() {
    let folder = tempfile::tempdir().expect("a folder");
    let kit = Kit::kept_in(Some(folder.path()));
    let rounds = std::env::var("BRANCHLINE_SOAK").map_or(60, |_| 1000);
    let mut settled = 0;
    for round in 0..rounds {
        // Other bytes each time, so that each is compiled.
        let module = kit.load("m", json!({}), guests::rejects(403, &format!("round {round}"))).await;
        assert!(matches!(module.on_request(request()).await.result, Ok(RequestAction::Reject(_))));
        kit.plugins.remove(module.uuid()).await.expect("it is there");
        if round == rounds / 3 {
            settled = resident();
        }
    }
    assert!(kit.plugins.is_empty());
    for part in ["modules", "bytes", "compiled"] {
        let left = std::fs::read_dir(folder.path().join(part)).map_or(0, Iterator::count);
        assert_eq!(left, 0, "{part}");
    }
    assert!(!kit.metrics.encode().contains("module=\"m\""));
    let grown = resident().saturating_sub(settled);
    println!("{rounds} modules loaded and unloaded: {} KiB more than after a third of them", grown >> 10);
    assert!(grown < 48 << 20, "{grown} bytes more than after a third of the rounds");
}

/// Resident bytes of this process.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    text.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).expect("a number") * 4096
}
