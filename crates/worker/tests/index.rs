//! The exact index over a real event stream, and the choices it leads to.
#![allow(clippy::unwrap_used, reason = "helpers of tests may fail like tests")]

use std::sync::Arc;

use branchline_prefix::{hash, namespace};
use branchline_telemetry::Metrics;
use branchline_testkit::{EngineSetup, FakeEngine, within};
use branchline_worker::proto::{self, kv_event::Change};
use branchline_worker::{Fleet, FleetOptions, RouteQuery};

const PROMPT: [u32; 41] = [5; 41];

fn hashes() -> Vec<u64> {
    hash::chain_all(&namespace::encode(None, None, None, "0"), &PROMPT, 4)
}

fn batch(epoch: u64, sequence: u64, change: Change) -> proto::SubscribeKvEventsResponse {
    proto::SubscribeKvEventsResponse {
        epoch,
        sequence,
        page_size: 4,
        events: vec![proto::KvEvent { change: Some(change) }],
        ..Default::default()
    }
}

fn stored(hashes: &[u64]) -> Change {
    Change::Stored(proto::BlocksStored { block_hashes: hashes.to_vec(), ..Default::default() })
}

async fn pair() -> (FakeEngine, FakeEngine, Arc<Fleet>) {
    let first = FakeEngine::start(EngineSetup::default()).await.unwrap();
    let second = FakeEngine::start(EngineSetup::default()).await.unwrap();
    let fleet = Fleet::new(FleetOptions::default(), Arc::new(Metrics::default()));
    for engine in [&first, &second] {
        fleet.add(&engine.url()).unwrap();
        within("a subscription", engine.wait_until(|engine| engine.subscriptions() == 1)).await;
    }
    (first, second, fleet)
}

async fn indexed(fleet: &Fleet, worker: usize, blocks: usize) {
    let id = fleet.workers()[worker].id;
    within("the index follows", async {
        while fleet.indexed_blocks(id) != blocks {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

fn query() -> RouteQuery<'static> {
    RouteQuery { token_ids: &PROMPT, ..Default::default() }
}

#[tokio::test]
async fn choices_follow_the_engines_events() {
    let (first, second, fleet) = pair().await;
    second.publish(batch(1, 1, stored(&hashes()[..8])));
    indexed(&fleet, 1, 8).await;
    let choice = fleet.choose(Some("fake"), &query()).unwrap();
    assert_eq!((choice.worker.id.0, choice.predicted_cached_tokens), (1, 32));
    drop(choice);
    second.publish(batch(1, 2, Change::Removed(proto::BlocksRemoved { block_hashes: hashes() })));
    first.publish(batch(1, 1, stored(&hashes())));
    indexed(&fleet, 1, 0).await;
    indexed(&fleet, 0, 10).await;
    let choice = fleet.choose(Some("fake"), &query()).unwrap();
    assert_eq!((choice.worker.id.0, choice.predicted_cached_tokens), (0, 40));
}

#[tokio::test]
async fn a_gap_leads_to_a_new_subscription_whose_snapshot_counts() {
    let (first, _second, fleet) = pair().await;
    first.publish(batch(1, 1, stored(&hashes()[..2])));
    indexed(&fleet, 0, 2).await;
    first.set_snapshot(&hashes()[..5]);
    first.publish(batch(1, 3, stored(&hashes()[2..3])));
    within("a second subscription", first.wait_until(|engine| engine.subscriptions() == 2)).await;
    indexed(&fleet, 0, 5).await;
    assert!(fleet.workers()[0].is_ready(), "a broken event stream costs no request");
}

#[tokio::test]
async fn a_dead_engine_leaves_the_index() {
    let (first, _second, fleet) = pair().await;
    first.publish(batch(1, 1, stored(&hashes())));
    indexed(&fleet, 0, 10).await;
    first.kill();
    indexed(&fleet, 0, 0).await;
}

#[tokio::test]
async fn a_prompt_on_its_way_draws_its_like_until_it_is_over() {
    let (_first, _second, fleet) = pair().await;
    let prompt: Vec<u32> = (0..400).collect();
    let query = RouteQuery { token_ids: &prompt, ..Default::default() };
    let first = fleet.choose(None, &query).unwrap();
    assert_eq!(first.predicted_cached_tokens, 0);
    let twin = fleet.choose(None, &query).unwrap();
    assert_eq!((twin.worker.id, twin.predicted_cached_tokens), (first.worker.id, 396));
    drop((first, twin));
    assert_eq!(
        fleet.choose(None, &query).unwrap().predicted_cached_tokens,
        0,
        "the first one left nothing behind"
    );
}

#[tokio::test]
async fn an_engine_without_events_serves_all_the_same() {
    let engine = FakeEngine::start(EngineSetup { without_events: true, ..Default::default() }).await.unwrap();
    let fleet = Fleet::new(FleetOptions::default(), Arc::new(Metrics::default()));
    let worker = fleet.add(&engine.url()).unwrap();
    within("readiness", fleet.wait_until(|_| worker.is_ready())).await;
    assert_eq!(fleet.choose(None, &query()).unwrap().predicted_cached_tokens, 0);
}
