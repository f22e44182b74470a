//! A stream of an engine that dies goes on at another one that promises the same bits, or ends in one error event.

use crate::kit::Gateway;
use branchline_testkit::{Act, EngineSetup, FakeEngine, within};
use branchline_worker::proto::{self, FinishReason, SequenceDelta};
use serde_json::{Value, json};

const WORDS: [&str; 6] = ["one ", "two ", "three ", "four ", "five ", "six"];

/// Sequence `index` from word `first` on, up to the one before `last`.
fn words(index: u32, first: usize, last: usize) -> Vec<Act> {
    let word = |at: usize| {
        let report = (at == first).then_some(proto::PromptReport { prompt_tokens: 1, cached_tokens: 0 });
        Act::send(SequenceDelta {
            index,
            token_ids: vec![at as u32],
            text: WORDS[at].into(),
            prompt: report,
            ..Default::default()
        })
    };
    (first..last).map(word).collect()
}

/// An engine that dies after `cut` words of each sequence, and says the rest to whoever resumes.
async fn mortal(cut: usize, numerics: &str) -> FakeEngine {
    let mut setup = EngineSetup::default();
    setup.info.numerics_id = numerics.into();
    let engine = FakeEngine::start(setup).await.expect("a free port");
    engine.script(move |request| match &request.resume {
        Some(resume) => {
            let had = resume.emitted_token_ids.len();
            assert_eq!(resume.emitted_token_ids, (0..had as u32).collect::<Vec<_>>());
            assert_eq!(resume.emitted_text_bytes as usize, WORDS[..had].concat().len());
            let end = Act::finish(0, FinishReason::Stop, WORDS.len() as u32);
            [words(0, had, WORDS.len()), vec![end]].concat()
        }
        None => {
            let n = request.sampling.as_ref().and_then(|sampling| sampling.n).unwrap_or(1);
            let all = (0..n).flat_map(|index| words(index, 0, cut));
            all.chain([Act::Wait(std::time::Duration::from_millis(30)), Act::Die]).collect()
        }
    });
    engine
}

async fn pair(cut: usize, numerics: [&str; 2], given: &[(&str, &str)]) -> (FakeEngine, FakeEngine, Gateway) {
    let (first, second) = (mortal(cut, numerics[0]).await, mortal(cut, numerics[1]).await);
    let gateway = Gateway::start(given, &[first.url(), second.url()]).await;
    (first, second, gateway)
}

fn body(more: &Value) -> String {
    let mut body =
        json!({"model": "fake", "prompt": "x", "stream": true, "stream_options": {"include_usage": true}});
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body.to_string()
}

#[tokio::test]
async fn a_stream_cut_after_any_token_is_joined_without_a_seam_and_flagged() {
    for cut in 1..WORDS.len() {
        let (first, second, gateway) = pair(cut, ["n", "n"], &[]).await;
        let answer = gateway.post("/v1/completions", &body(&json!({}))).await;
        let events = answer.events();
        assert_eq!(events.last().map(String::as_str), Some("[DONE]"), "{}", answer.text());
        let events: Vec<Value> =
            events[..events.len() - 1].iter().map(|event| serde_json::from_str(event).unwrap()).collect();
        let text: String = events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
        assert_eq!(text, WORDS.concat(), "cut {cut}");
        let usage = &events.last().unwrap()["usage"];
        assert_eq!((&usage["continuations"], &usage["completion_tokens"]), (&json!(1), &json!(6)));
        let submits: Vec<_> = [&first, &second].iter().flat_map(|engine| engine.submits()).collect();
        let requests: Vec<_> = submits.into_iter().map(|submit| submit.request.unwrap()).collect();
        let seeds: Vec<_> = requests.iter().map(|request| request.sampling.clone().unwrap().seed).collect();
        assert!(seeds.len() == 2 && seeds[0].is_some() && seeds[0] == seeds[1], "the same numbers are drawn");
        assert!(gateway.get("/metrics").await.text().contains("branchline_router_continuations_total 1"));
    }
}

#[tokio::test]
async fn each_sequence_of_a_request_goes_on_where_it_was() {
    let (_first, _second, gateway) = pair(2, ["n", "n"], &[]).await;
    let answer =
        gateway.post("/v1/completions", &json!({"model": "fake", "prompt": "x", "n": 3}).to_string()).await;
    let choices = answer.json()["choices"].as_array().cloned().unwrap_or_default();
    assert_eq!(choices.len(), 3, "{}", answer.text());
    assert!(choices.iter().all(|choice| choice["text"] == WORDS.concat()), "{choices:?}");
}

#[tokio::test]
async fn without_a_worker_of_the_same_bits_the_stream_ends_in_one_error_event() {
    for (numerics, wanted) in [(["n", "m"], "true"), (["", ""], "true"), (["n", "n"], "false")] {
        let (_first, _second, gateway) = pair(3, numerics, &[("continue_streams", wanted)]).await;
        let answer = gateway.post("/v1/completions", &body(&json!({}))).await;
        let events = answer.events();
        let last = events.last().expect("an event");
        assert!(
            last.contains("\"error\"") && !answer.text().contains("[DONE]"),
            "{numerics:?}: {}",
            answer.text()
        );
        assert_eq!(gateway.load(), 0);
    }
}

#[tokio::test]
async fn an_abort_reaches_each_sequence_that_was_continued() {
    let (first, second, gateway) = pair(2, ["n", "n"], &[]).await;
    for engine in [&first, &second] {
        engine.script(|request| match &request.resume {
            Some(_) => Vec::new(),
            None => {
                let all = (0..3).flat_map(|index| words(index, 0, 2));
                all.chain([Act::Wait(std::time::Duration::from_millis(30)), Act::Die]).collect()
            }
        });
    }
    let body = json!({"text": "x", "sampling_params": {"n": 3}, "rid": "r"}).to_string();
    let mut client = gateway.send("POST", "/generate", &[], &body).await;
    let heir = within("the continuation", async {
        loop {
            if let Some(heir) = [&first, &second].into_iter().find(|engine| engine.submits().len() == 3) {
                return heir;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    })
    .await;
    let told = gateway.post("/abort_request", r#"{"rid":"r"}"#).await.json();
    let mut ids: Vec<_> = heir.aborts().into_iter().map(|abort| abort.request_id).collect();
    ids.sort();
    assert_eq!(ids, ["r", "r#1", "r#2"], "{told}");
    client.answer().await;
    assert_eq!((&told["aborted"], gateway.load()), (&json!(1), 0));
}
