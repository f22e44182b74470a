//! The contract's bytes, as both languages must write them. The same messages stand as text beside the files.
//!
//! `BRANCHLINE_WRITE_GOLDEN=1` writes the files anew.
#![allow(clippy::unwrap_used, reason = "helpers of tests may fail like tests")]

use std::path::PathBuf;

use branchline_worker::proto::{self, FinishReason, kv_event::Change};
use prost::Message;

fn check<M: Message + Default + PartialEq + std::fmt::Debug>(name: &str, message: &M) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/contract/golden").join(name);
    let bytes = message.encode_to_vec();
    if std::env::var_os("BRANCHLINE_WRITE_GOLDEN").is_some() {
        std::fs::write(&path, &bytes).unwrap();
    }
    let golden = std::fs::read(&path).unwrap();
    assert_eq!(bytes, golden, "{name} is encoded differently");
    assert_eq!(&M::decode(&golden[..]).unwrap(), message, "{name} is decoded differently");
}

#[test]
fn a_generate_request_has_its_golden_bytes() {
    let sampling = proto::SamplingParams {
        // Zeros that were given must survive: absent and zero differ.
        temperature: Some(0.0),
        top_p: Some(0.5),
        top_k: Some(-1),
        seed: Some(u64::MAX),
        n: Some(2),
        max_tokens: Some(0),
        stop: vec!["\n\n".into(), "é".into()],
        stop_token_ids: vec![2],
        ignore_eos: Some(false),
        logit_bias: [(300, -100.0)].into(),
        ..Default::default()
    };
    let request = proto::GenerateRequest {
        request_id: "request-1".into(),
        token_ids: vec![0, 1, 127, 128, 49151],
        sampling: Some(sampling),
        logprobs: Some(proto::LogprobParams {
            output: Some(true),
            top_k: Some(5),
            input_start: Some(0),
            token_ids: vec![7, 8],
        }),
        cache_namespace: Some(proto::CacheNamespace {
            cache_salt: Some(String::new()),
            extra_key: Some("key".into()),
            adapter: None,
            adapter_digest: None,
        }),
        deadline_ms: Some(60_000),
        traceparent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".into(),
        ..Default::default()
    };
    check("generate_request.bin", &request);
}

#[test]
fn a_step_frame_has_its_golden_bytes() {
    let top = |ids: &[u32], logprobs: &[f32]| proto::TopLogprobs {
        token_ids: ids.to_vec(),
        logprobs: logprobs.to_vec(),
    };
    let first = proto::SequenceDelta {
        handle: 1,
        token_ids: vec![28, 300],
        text: "東京".into(),
        logprobs: Some(proto::TokenLogprobs {
            token_ids: vec![28, 300],
            logprobs: vec![-0.5, -1.25],
            top: vec![top(&[28, 9], &[-0.5, -2.0]), top(&[300], &[-1.25])],
            ..Default::default()
        }),
        prompt: Some(proto::PromptReport { prompt_tokens: 12, cached_tokens: 8 }),
        ..Default::default()
    };
    let finish = proto::Finish {
        reason: FinishReason::Stop.into(),
        completion_tokens: 3,
        retractions: 1,
        timings: Some(proto::Timings {
            queue_ms: 0.5,
            prefill_ms: 12.25,
            decode_ms: 100.0,
            ..Default::default()
        }),
        matched: Some(proto::finish::Matched::MatchedStop("\n\n".into())),
        ..Default::default()
    };
    let second = proto::SequenceDelta { handle: 2, index: 1, finish: Some(finish), ..Default::default() };
    let error = proto::Error {
        code: proto::ErrorCode::InvalidArgument.into(),
        message: "temperature is 101; give 0 to 100".into(),
        field: "sampling.temperature".into(),
        retry_after_ms: Some(0),
    };
    let third = proto::SequenceDelta { handle: 3, error: Some(error), ..Default::default() };
    check("step_frame.bin", &proto::StepFrame { step: 1 << 40, deltas: vec![first, second, third] });
}

#[test]
fn cache_events_have_their_golden_bytes() {
    let stored = proto::BlocksStored {
        parent_hash: u64::MAX,
        block_hashes: vec![1, 0x0123_4567_89ab_cdef],
        token_ids: vec![5, 6, 7, 8],
    };
    let removed = proto::BlocksRemoved { block_hashes: vec![2] };
    let events = [Change::Cleared(proto::BlocksCleared {}), Change::Stored(stored), Change::Removed(removed)]
        .map(|change| proto::KvEvent { change: Some(change) })
        .to_vec();
    let batch = proto::SubscribeKvEventsResponse {
        epoch: 3,
        sequence: 9,
        snapshot: false,
        snapshot_end: false,
        events,
        page_size: 2,
    };
    check("kv_events.bin", &batch);
}
