//! Modules that behave: actions, store, streams, both contracts, the table and its folder.

mod kit;

use std::sync::Arc;

use branchline_core::ErrorCode;
use branchline_plugins::{
    CandidateView, EventAction, Events, Hook, NewEvent, RequestAction, ResponseAction, ResponseView,
    RouteAction, RouteView,
};
use kit::{Kit, guests, request, spec};
use serde_json::json;

#[tokio::test(flavor = "multi_thread")]
async fn a_module_continues_modifies_and_rejects() {
    let kit = Kit::new();
    let noop = kit.load("noop", json!({}), guests::noop()).await;
    assert_eq!(noop.on_request(request()).await.result.expect("an action"), RequestAction::Continue);
    let header = kit.load("header", json!({}), guests::adds_header("x-added", b"yes")).await;
    let Ok(RequestAction::Modify(changes)) = header.on_request(request()).await.result else {
        panic!("modify")
    };
    assert_eq!(
        (changes.headers.set[0].name.as_str(), changes.headers.set[0].value.as_str()),
        ("x-added", "yes")
    );
    let gate = kit.load("gate", json!({}), guests::rejects(403, "no")).await;
    let Ok(RequestAction::Reject(reply)) = gate.on_request(request()).await.result else { panic!("reject") };
    assert_eq!((reply.status, reply.body.as_slice()), (403, &b"no"[..]));
    let called = noop.on_request(request()).await;
    assert!(called.cost.fuel > 0 && called.cost.memory_bytes >= 128 << 10, "{:?}", called.cost);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_module_that_says_so_sees_bodies() {
    let kit = Kit::new();
    let plain = kit.load("plain", json!({}), guests::noop()).await;
    let reader = kit.load("reader", json!({}), guests::reads_body()).await;
    let routed =
        kit.load("routed", json!({"routes": {"models": ["m"]}}), guests::adds_header("a", b"b")).await;
    assert_eq!((plain.waits_for_request_body(), plain.sees_request_body()), (false, false));
    assert_eq!((reader.waits_for_request_body(), reader.sees_request_body()), (true, true));
    assert_eq!((routed.waits_for_request_body(), routed.sees_request_body()), (true, false));
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_share_the_store_and_a_dry_run_does_not_touch_it() {
    let kit = Kit::new();
    let module = kit.load("budget", json!({}), guests::budget(2)).await;
    let twin = module.twin();
    for _ in 0..5 {
        drop(twin.on_request(request()).await);
    }
    for free in [true, true, false, false] {
        let action = twin_free(&module.on_request(request()).await.result.expect("an action"));
        assert_eq!(action, free);
    }
    assert_eq!(kit.count("budget", "reject"), 2, "the twin's calls are not counted");
}

fn twin_free(action: &RequestAction) -> bool {
    matches!(action, RequestAction::Continue)
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_can_be_changed_and_replaced() {
    let kit = Kit::new();
    let marks = kit.load("marks", json!({}), guests::marks_responses(203, "x-seen", "1")).await;
    let view = ResponseView { status: 200, ..ResponseView::default() };
    let Ok(ResponseAction::Modify(changes)) = marks.on_response(request(), view.clone()).await.result else {
        panic!("modify")
    };
    assert_eq!((changes.status, changes.headers.set[0].value.as_str()), (Some(203), "1"));
    let hides =
        kit.load("hides", json!({}), guests::rejects_responses("on-response", 451, "hidden", false)).await;
    let Ok(ResponseAction::Reject(reply)) = hides.on_response(request(), view).await.result else {
        panic!("reject")
    };
    assert_eq!((reply.status, reply.body.as_slice()), (451, &b"hidden"[..]));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_events_of_a_stream_reach_one_instance_in_order() {
    let kit = Kit::new();
    let module = kit.load("events", json!({}), guests::writes_events("{\"x\":1}", 2, true)).await;
    let (mut events, request) = (Events::new(Arc::clone(&module)), Arc::new(request()));
    let event = NewEvent { name: None, data: "{\"x\":1}".to_owned() };
    for index in 0..3 {
        let action = events.event(&request, None, format!("event {index}")).await.result.expect("an action");
        let wanted = match index {
            2 => EventAction::Stop(vec![event.clone()]),
            _ => EventAction::Replace(vec![event.clone()]),
        };
        assert_eq!(action, wanted, "event {index}");
    }
    let quiet = kit.load("quiet", json!({}), guests::reads_events()).await;
    let mut events = Events::new(quiet);
    for _ in 0..2000 {
        assert_eq!(
            events.event(&request, None, "x".repeat(500)).await.result.expect("fits"),
            EventAction::Continue
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_picks_among_the_candidates_it_is_shown() {
    let kit = Kit::new();
    let module = kit.load("canary", json!({}), guests::picks(1)).await;
    let candidate =
        |id: &str| CandidateView { id: id.to_owned(), url: format!("http://{id}"), ..Default::default() };
    let view = RouteView { candidates: vec![candidate("w1"), candidate("w2")], ..RouteView::default() };
    assert_eq!(module.on_route(view).await.result.expect("a choice"), RouteAction::Pick("w2".to_owned()));
    let alone = RouteView { candidates: vec![candidate("w1")], ..RouteView::default() };
    assert!(module.on_route(alone).await.result.is_err(), "the second of one is nobody");
}

#[tokio::test(flavor = "multi_thread")]
async fn modules_of_sglangs_gateway_run_as_they_are() {
    let kit = Kit::new();
    let header =
        kit.load("smg", json!({"hooks": ["on-request"]}), guests::smg_adds_header("x-smg", "1")).await;
    assert!(header.sees_request_body() && header.skips_streams());
    let Ok(RequestAction::Modify(changes)) = header.on_request(request()).await.result else {
        panic!("modify")
    };
    assert_eq!(changes.headers.set[0].name, "x-smg");
    let older = kit.load("sgl-gate", json!({}), guests::smg_of("sgl:model-gateway", 409)).await;
    let Ok(RequestAction::Reject(reply)) = older.on_request(request()).await.result else {
        panic!("the package's older name is known, too")
    };
    assert_eq!(reply.status, 409);
    let gate = kit.load("smg-gate", json!({}), guests::smg_rejects(403)).await;
    let Ok(RequestAction::Reject(reply)) = gate.on_request(request()).await.result else { panic!("reject") };
    assert_eq!(reply.status, 403);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_module_is_refused_with_what_to_do() {
    let kit = Kit::new();
    let core = wat(&guests::text("", ""));
    let world = "package a:b;\nworld w { export f: func(); }";
    let stranger = branchline_plugins::componentize::component(
        b"(module (func (export \"f\")))",
        &[("w.wit", world)],
        "w",
    );
    for (bytes, words) in [
        (Vec::new(), "no WebAssembly component"),
        (b"#!/bin/sh".to_vec(), "no WebAssembly component"),
        (core, "core module"),
        (b"\x7fELF\x02\x01".to_vec(), "never accepted"),
        (b"\0asm\x0d\0\x01\0broken".to_vec(), "refused"),
        (stranger.expect("a component"), "exports no hook"),
    ] {
        let error = kit.plugins.add(spec("bad", &json!({})), bytes).await.expect_err(words);
        assert_eq!(
            (error.code, error.field.as_deref()),
            (ErrorCode::InvalidArgument, Some("module")),
            "{error}"
        );
        assert!(error.message.contains(words), "{error}");
    }
    let error = kit.plugins.add(spec("bad", &json!({"hooks": ["on-route"]})), guests::noop()).await;
    assert_eq!(error.expect_err("it has no on-route").field.as_deref(), Some("hooks"));
    assert!(kit.plugins.is_empty() && !kit.metrics.encode().contains("bad"));
}

fn wat(text: &str) -> Vec<u8> {
    wat::parse_str(text).expect("good text")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_bytes_are_the_same_module_and_a_taken_name_is_refused() {
    let kit = Kit::new();
    let (first, new) = kit.plugins.add(spec("m", &json!({})), guests::noop()).await.expect("a module");
    let (again, new_again) =
        kit.plugins.add(spec("m", &json!({})), guests::noop()).await.expect("the module");
    assert_eq!((new, new_again, first.uuid() == again.uuid()), (true, false, true));
    let error = kit.plugins.add(spec("m", &json!({})), guests::traps()).await.expect_err("taken");
    assert_eq!(error.code, ErrorCode::Conflict);
    assert_eq!(kit.plugins.chain().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn order_decides_and_equal_order_keeps_the_order_of_loading() {
    let kit = Kit::new();
    for (name, order) in [("c", 5), ("a", 0), ("b", 0), ("z", -1)] {
        kit.load(name, json!({"order": order}), guests::rejects(403, name)).await;
    }
    let names =
        || kit.plugins.chain().iter().map(|module| module.spec.name.clone()).collect::<Vec<_>>().join(" ");
    assert_eq!(names(), "z a b c");
    let c = kit.plugins.chain().iter().find(|module| module.spec.name == "c").expect("c").uuid();
    kit.plugins.change(c, &json!({"order": -2}), None).await.expect("a good change");
    assert_eq!(names(), "c z a b");
}

#[tokio::test(flavor = "multi_thread")]
async fn modules_survive_a_restart_with_their_settings_and_order() {
    let folder = tempfile::tempdir().expect("a folder");
    let uuid = {
        let kit = Kit::kept_in(Some(folder.path()));
        kit.load("first", json!({}), guests::noop()).await;
        let second = kit.load("second", json!({"fail": "open", "config": {"a": 1}}), guests::traps()).await;
        kit.plugins.change(second.uuid(), &json!({"limits": {"time_ms": 77}}), None).await.expect("good");
        second.uuid()
    };
    let kit = Kit::kept_in(Some(folder.path()));
    kit.plugins.restore_all().await.expect("both are there");
    let chain = kit.plugins.chain();
    assert_eq!(chain.iter().map(|m| m.spec.name.as_str()).collect::<Vec<_>>(), ["first", "second"]);
    let second = kit.plugins.get(uuid).expect("under its old id");
    assert!(second.fails_open() && second.wants(Hook::OnRequest));
    assert_eq!((second.spec.limits.time_ms, second.spec.config_text().as_str()), (77, r#"{"a":1}"#));
    assert!(chain[0].on_request(request()).await.result.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_folder_with_damaged_bytes_is_refused_and_damaged_compiled_code_is_not_used() {
    let folder = tempfile::tempdir().expect("a folder");
    let sha256 = {
        let kit = Kit::kept_in(Some(folder.path()));
        kit.load("m", json!({}), guests::noop()).await.sha256().to_owned()
    };
    let compiled: Vec<_> = std::fs::read_dir(folder.path().join("compiled"))
        .expect("there")
        .map(|e| e.expect("read").path())
        .collect();
    assert_eq!(compiled.len(), 1);
    std::fs::write(&compiled[0], vec![7; 100]).expect("it writes");
    let kit = Kit::kept_in(Some(folder.path()));
    kit.plugins.restore_all().await.expect("compiled again");
    std::fs::write(folder.path().join("bytes").join(format!("{sha256}.wasm")), b"\0asm").expect("it writes");
    let error = Kit::kept_in(Some(folder.path())).plugins.restore_all().await.expect_err("damaged");
    assert!(error.message.contains("'m'") && error.message.contains("damaged"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_configuration_reaches_the_module_as_json_text() {
    let kit = Kit::new();
    for (config, text) in
        [(json!({"a": [1, "é"]}), r#"{"a":[1,"é"]}"#), (json!(null), ""), (json!("plain"), "\"plain\"")]
    {
        let name = format!("m{}", text.len());
        let module = kit.load(&name, json!({"config": config}), guests::echoes_config()).await;
        let Ok(RequestAction::Reject(reply)) = module.on_request(request()).await.result else {
            panic!("it answers its configuration")
        };
        assert_eq!(String::from_utf8_lossy(&reply.body), text);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_host_function_does_what_the_contract_says() {
    let kit = Kit::new();
    let module = kit.load("host", json!({}), guests::uses_host()).await;
    for _ in 0..2 {
        let called = module.on_request(request()).await;
        let Ok(RequestAction::Reject(reply)) = called.result else { panic!("{:?}", called.result) };
        assert_eq!(String::from_utf8_lossy(&reply.body), "value");
    }
    let metrics = kit.metrics.encode();
    for line in [
        "branchline_router_wasm_module_count_total{module=\"host\",name=\"name\",label=\"label\"} 6",
        "branchline_router_wasm_module_value{module=\"host\",name=\"name\",label=\"label\"} -7",
        "branchline_router_wasm_module_seconds_count{module=\"host\",name=\"name\",label=\"label\"} 2",
    ] {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }
    let lines = module.lines(0);
    assert_eq!(lines.iter().map(|line| line.message.as_str()).collect::<Vec<_>>(), ["name", "name"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_chatters_keeps_twenty_lines() {
    let kit = Kit::new();
    let module = kit.load("chatter", json!({}), guests::chatters(500)).await;
    assert!(module.on_request(request()).await.result.is_ok());
    assert_eq!(module.lines(0).len(), 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_over_the_output_limit_is_refused_without_being_copied_whole() {
    let kit = Kit::new();
    let settings = json!({"limits": {"output_kib": 4}});
    let fits = kit.load("fits", settings.clone(), guests::claims(3 << 10)).await;
    assert!(matches!(fits.on_request(request()).await.result, Ok(RequestAction::Reject(_))));
    let large = kit.load("large", settings, guests::claims(100 << 10)).await;
    let failure = large.on_request(request()).await.result.expect_err("it is too large");
    assert_eq!(failure.cause, branchline_plugins::Cause::BadOutput, "{}", failure.detail);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_module_with_one_place_makes_the_second_call_wait_or_say_busy() {
    let kit = Kit::new();
    let settings = json!({"limits": {"time_ms": 300, "concurrency": 1}, "quarantine_after": 0});
    let module = kit.load("spin", settings, guests::spins()).await;
    let calls: Vec<_> = (0..2)
        .map(|_| {
            let module = Arc::clone(&module);
            tokio::spawn(
                async move { module.on_request(request()).await.result.expect_err("it spins").cause },
            )
        })
        .collect();
    let mut causes = Vec::new();
    for call in calls {
        causes.push(call.await.expect("no panic").name());
    }
    causes.sort_unstable();
    // The second gets its place when the first's time is over, which is about when its own is.
    assert!(causes.contains(&"timeout"), "{causes:?}");
    assert!(causes.iter().all(|cause| ["timeout", "busy"].contains(cause)), "{causes:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_change_leaves_the_old_module_in_place() {
    let kit = Kit::new();
    let module = kit.load("gate", json!({}), guests::rejects(403, "old")).await;
    for (changes, bytes) in [
        (json!({"limits": {"time_ms": 0}}), None),
        (json!({}), Some(b"nonsense".to_vec())),
        (json!({"hooks": ["on-route"]}), Some(guests::noop())),
        (json!({"name": "other"}), None),
    ] {
        let upload = bytes.map(Into::into);
        assert!(kit.plugins.change(module.uuid(), &changes, upload).await.is_err(), "{changes}");
    }
    let now = kit.plugins.get(module.uuid()).expect("still there");
    let Ok(RequestAction::Reject(reply)) = now.on_request(request()).await.result else {
        panic!("it rejects")
    };
    assert_eq!(reply.body, b"old");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replaced_module_keeps_its_store_and_a_held_one_goes_on_working() {
    let kit = Kit::new();
    let old = kit.load("budget", json!({}), guests::budget(3)).await;
    for _ in 0..2 {
        assert_eq!(old.on_request(request()).await.result.expect("free"), RequestAction::Continue);
    }
    let new = kit
        .plugins
        .change(old.uuid(), &json!({"order": 1}), Some(guests::budget(4).into()))
        .await
        .expect("good");
    assert_eq!(new.on_request(request()).await.result.expect("the third"), RequestAction::Continue);
    // A request that began before the change still has the old module, whose budget is used up now.
    assert!(matches!(old.on_request(request()).await.result, Ok(RequestAction::Reject(_))));
    kit.plugins.remove(new.uuid()).await.expect("it is there");
    assert!(old.on_request(request()).await.result.is_ok(), "also after it was removed");
}
