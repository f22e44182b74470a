//! What hostile modules cost those who do not meet them: the real binary under attack, by turns with quiet.
//!
//! Prints its figures; a test of functions only. `make soak` runs it for longer (`BRANCHLINE_SOAK`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use branchline_testkit::{ScriptedWorker, Step, response, within};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::guests;
use crate::process::Process;

const CHAT: &str = r#"{"model":"m","messages":[{"role":"user","content":"x"}]}"#;
const PATH: &str = "/v1/chat/completions";
/// Calls of hostile modules at once.
const ATTACKERS: usize = 100;
/// Between two good requests.
const PACE: Duration = Duration::from_millis(10);

/// A connection that is kept.
struct Kept(TcpStream);

impl Kept {
    async fn to(address: &str) -> Self {
        let stream = TcpStream::connect(address).await.expect("it listens");
        stream.set_nodelay(true).expect("a socket");
        Self(stream)
    }

    /// Sends a request and reads its answer, whose length is given; its status.
    async fn call(&mut self, tenant: &str, path: &str, body: &str) -> u16 {
        let length = body.len();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\nx-tenant-id: {tenant}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        self.0.write_all(head.as_bytes()).await.expect("it reads");
        let mut read = Vec::new();
        loop {
            assert!(self.0.read_buf(&mut read).await.expect("it answers") > 0, "closed");
            let text = String::from_utf8_lossy(&read);
            let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            let length: usize = length.and_then(|length| length.parse().ok()).expect("a length");
            if body.len() >= length {
                return head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
            }
        }
    }
}

/// The hostile set, each for the tenant of its name.
fn hostile() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("spin", guests::spins()),
        ("sleep", guests::sleeps()),
        ("grow", guests::grows()),
        ("recurse", guests::recurses()),
        ("trap", guests::traps()),
        ("huge", guests::claims(u32::MAX)),
        ("crlf", guests::adds_header("x-a", b"1\r\nset-cookie: a=b")),
        ("utf8", guests::adds_header("x-a", b"\xff\xfe")),
    ]
}

/// Good requests at a fixed pace for so long; the time of each, in microseconds from when it was due.
async fn good(address: &str, time: Duration) -> Vec<u64> {
    let (mut took, began) = (Vec::new(), Instant::now());
    let mut ticks = tokio::time::interval(PACE);
    let mut client = Kept::to(address).await;
    while began.elapsed() < time {
        let due = ticks.tick().await;
        assert_eq!(client.call("good", PATH, CHAT).await, 200);
        took.push(due.elapsed().as_micros() as u64);
    }
    took
}

/// Attackers until told to stop, each waiting for its answer before the next.
fn attack(address: &str, stop: &Arc<AtomicBool>, refused: &Arc<AtomicU64>) -> JoinSet<()> {
    let names: Vec<_> = hostile().into_iter().map(|(name, _)| name).collect();
    let attacker = |number: usize| {
        let (address, name) = (address.to_owned(), names[number % names.len()]);
        let (stop, refused) = (Arc::clone(stop), Arc::clone(refused));
        async move {
            let mut client = Kept::to(&address).await;
            while !stop.load(Ordering::Acquire) {
                assert_eq!(client.call(name, PATH, CHAT).await, 503, "{name} fails closed");
                refused.fetch_add(1, Ordering::Relaxed);
            }
        }
    };
    (0..ATTACKERS).map(attacker).collect()
}

fn quantile(sorted: &[u64], share: f64) -> u64 {
    sorted[((sorted.len() - 1) as f64 * share) as usize]
}

#[tokio::test(flavor = "multi_thread")]
async fn good_requests_are_answered_beside_a_hundred_hostile_calls() {
    let kind = [("content-type", "application/json")];
    let worker = ScriptedWorker::start(move |_| vec![Step::Send(response(200, &kind, b"{}"))]).await;
    let worker = worker.expect("a free port");
    let router = Process::start(&["--worker-urls", &worker.url()]).await;
    let mut client = Kept::to(&router.address).await;
    for (name, bytes) in hostile() {
        let limits = json!({"time_ms": 300, "memory_mib": 16});
        let module = json!({"name": name, "module": STANDARD.encode(bytes), "routes": {"tenants": [name]},
            "limits": limits, "quarantine_after": 0});
        assert_eq!(client.call("operator", "/wasm", &module.to_string()).await, 201, "{name}");
    }
    let soak = std::env::var("BRANCHLINE_SOAK").is_ok();
    let (rounds, time) = if soak { (6, Duration::from_secs(8)) } else { (1, Duration::from_millis(700)) };
    let (mut quiet, mut attacked) = (Vec::new(), Vec::new());
    let refused = Arc::new(AtomicU64::new(0));
    for _ in 0..rounds {
        quiet.extend(good(&router.address, time).await);
        let stop = Arc::new(AtomicBool::new(false));
        let mut attackers = attack(&router.address, &stop, &refused);
        attacked.extend(good(&router.address, time).await);
        stop.store(true, Ordering::Release);
        within("the attackers' end", async {
            while let Some(done) = attackers.join_next().await {
                done.expect("503s");
            }
        })
        .await;
    }
    assert!(refused.load(Ordering::Relaxed) >= ATTACKERS as u64, "each attacker had its answer");
    let seen = worker.record().requests(PATH).len();
    assert_eq!(seen, quiet.len() + attacked.len(), "no hostile request reached the worker");
    for figures in [&mut quiet, &mut attacked] {
        figures.sort_unstable();
    }
    let shown = [&quiet, &attacked].map(|all| (quantile(all, 0.5), quantile(all, 0.99)));
    let ratio = shown[1].1 as f64 / shown[0].1 as f64;
    println!(
        "good requests, p50 and p99 in us: quiet {:?}, under attack {:?}; p99 x {ratio:.2}",
        shown[0], shown[1]
    );
}
