//! What multiplexing saves: one `Attach` stream with a frame a step against one `Generate` stream a request.
//!
//! Both sides run in this process over a real socket, paced like decoding. Prints, a mode and round: CPU microseconds
//! a token (all threads of both sides), messages a step, and the time from a step's end to its last reader.
//!
//! `cargo run --release -p branchline-worker --example attach_bench`
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a benchmark prints its result and may die")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use branchline_telemetry::Metrics;
use branchline_testkit::{EngineSetup, FakeEngine, within};
use branchline_worker::proto::engine_client::EngineClient;
use branchline_worker::proto::{GenerateRequest, SequenceDelta};
use branchline_worker::{Fleet, FleetOptions, PolicyKind, SubmitOptions, Worker};
use tokio::sync::Notify;
use tokio::task::JoinSet;

const RUNNING: u64 = 64;
const STEPS: u64 = 400;
const PACE: Duration = Duration::from_millis(4);
const ROUNDS: usize = 5;

/// Tokens that readers have seen of the present step.
#[derive(Default)]
struct Seen {
    tokens: AtomicU64,
    all: Notify,
}

impl Seen {
    fn add(&self, tokens: usize) {
        let tokens = tokens as u64;
        if self.tokens.fetch_add(tokens, Ordering::AcqRel) + tokens == RUNNING {
            self.all.notify_one();
        }
    }
}

#[derive(Clone, Copy)]
struct Round {
    cpu_us_per_token: f64,
    messages_per_step: f64,
    last_reader_us: f64,
}

/// Nanoseconds that all threads of this process have run.
fn cpu_ns() -> u64 {
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    let ran = |entry: std::io::Result<std::fs::DirEntry>| {
        let text = std::fs::read_to_string(entry.ok()?.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<u64>().ok()
    };
    threads.filter_map(ran).sum()
}

/// Runs the steps; `emit` sends the deltas of one.
async fn pace(engine: &FakeEngine, first: u64, seen: &Seen, emit: impl Fn(Vec<SequenceDelta>)) -> Round {
    let (cpu, messages) = (cpu_ns(), engine.messages());
    let mut delays = Vec::with_capacity(STEPS as usize);
    let mut ticks = tokio::time::interval(PACE);
    for step in 0..STEPS {
        ticks.tick().await;
        seen.tokens.store(0, Ordering::Release);
        let news = |handle| SequenceDelta {
            handle,
            token_ids: vec![step as u32],
            text: " word".into(),
            ..Default::default()
        };
        let started = Instant::now();
        emit((first..first + RUNNING).map(news).collect());
        within("every reader", seen.all.notified()).await;
        delays.push(started.elapsed().as_secs_f64() * 1e6);
    }
    Round {
        cpu_us_per_token: (cpu_ns() - cpu) as f64 / 1e3 / (STEPS * RUNNING) as f64,
        messages_per_step: (engine.messages() - messages) as f64 / STEPS as f64,
        last_reader_us: median(delays),
    }
}

fn request(number: u64) -> GenerateRequest {
    GenerateRequest { request_id: number.to_string(), token_ids: vec![1, 2, 3], ..Default::default() }
}

async fn attached(engine: &FakeEngine, worker: &Worker) -> Round {
    let (seen, before) = (Arc::new(Seen::default()), engine.submits().len());
    let mut readers = JoinSet::new();
    for number in 0..RUNNING {
        let mut stream = worker.submit(request(number), SubmitOptions::default()).unwrap();
        let seen = seen.clone();
        readers.spawn(async move {
            while let Some(delta) = stream.next().await {
                seen.add(delta.unwrap().token_ids.len());
            }
        });
    }
    within("all submits", engine.wait_until(|engine| engine.submits().len() == before + RUNNING as usize))
        .await;
    let first = engine.submits()[before].handle;
    pace(engine, first, &seen, |deltas| engine.emit(deltas)).await
}

async fn single(engine: &FakeEngine, address: &str) -> Round {
    let seen = Arc::new(Seen::default());
    let client = EngineClient::connect(address.to_owned()).await.unwrap();
    let mut readers = JoinSet::new();
    for number in 0..RUNNING {
        let (seen, mut client) = (seen.clone(), client.clone());
        readers.spawn(async move {
            let mut stream = client.generate(request(number)).await.unwrap().into_inner();
            while let Ok(Some(answer)) = stream.message().await {
                seen.add(answer.deltas.iter().map(|delta| delta.token_ids.len()).sum());
            }
        });
    }
    within("all streams", engine.wait_until(|engine| engine.singles() == RUNNING as usize)).await;
    let round = pace(engine, 0, &seen, |deltas| engine.emit_singly(deltas)).await;
    engine.end_singles();
    round
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn print(name: &str, rounds: &[Round]) {
    let of = |part: fn(&Round) -> f64| median(rounds.iter().map(part).collect());
    println!(
        "{name:10} {:8.2} us CPU a token  {:6.1} messages a step  {:7.0} us to the last reader",
        of(|round| round.cpu_us_per_token),
        of(|round| round.messages_per_step),
        of(|round| round.last_reader_us),
    );
}

#[tokio::main]
async fn main() {
    let engine = FakeEngine::start(EngineSetup::default()).await.unwrap();
    let options = FleetOptions { policy: PolicyKind::RoundRobin, ..Default::default() };
    let fleet = Fleet::new(options, Arc::new(Metrics::default()));
    let worker = fleet.add(&engine.url()).unwrap();
    within("readiness", fleet.wait_until(|_| worker.is_ready())).await;
    let address = engine.url().replace("grpc://", "http://");
    let (mut attach, mut generate) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        attach.push(attached(&engine, &worker).await);
        print("Attach", &attach[attach.len() - 1..]);
        generate.push(single(&engine, &address).await);
        print("Generate", &generate[generate.len() - 1..]);
    }
    println!("medians of {ROUNDS} rounds, {RUNNING} running, {STEPS} steps of {} ms", PACE.as_millis());
    print("Attach", &attach);
    print("Generate", &generate);
}
