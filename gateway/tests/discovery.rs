//! Workers behind names, before a real name server whose records change.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::kit::{Gateway, PATIENCE, options};
use branchline_gateway::lifecycle::Server;
use branchline_testkit::{ScriptedWorker, Step, response, within};
use hickory_resolver::proto::op::{Message, MessageType, ResponseCode};
use hickory_resolver::proto::rr::rdata::{A, SRV};
use hickory_resolver::proto::rr::{Name, RData, Record};
use parking_lot::Mutex;
use tokio::net::UdpSocket;

/// A name and what a name server knows of it.
type Known = (String, RData);

/// What a name server knows, and how often it was asked.
#[derive(Default)]
struct Zone {
    records: Mutex<Vec<Known>>,
    asked: AtomicUsize,
}

impl Zone {
    fn of(records: Vec<Known>) -> Arc<Self> {
        Arc::new(Self { records: Mutex::new(records), asked: AtomicUsize::new(0) })
    }

    fn set(&self, records: Vec<Known>) {
        *self.records.lock() = records;
    }

    /// Waits until it has been asked some more times, each time after what it knew was last read.
    async fn asked_again(&self) {
        let before = self.asked.load(Ordering::SeqCst);
        within("questions", async {
            while self.asked.load(Ordering::SeqCst) < before + 4 {
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
        })
        .await;
    }
}

/// Answers over UDP from what the zone holds at that moment; nothing may be kept for later.
async fn serve(zone: Arc<Zone>) -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").await.expect("a free port");
    let address = socket.local_addr().expect("bound");
    tokio::spawn(async move {
        let mut bytes = [0; 4096];
        while let Ok((count, client)) = socket.recv_from(&mut bytes).await {
            let Ok(mut message) = Message::from_vec(&bytes[..count]) else { continue };
            let Some(query) = message.queries.first().cloned() else { continue };
            zone.asked.fetch_add(1, Ordering::SeqCst);
            let asked = query.name().to_string();
            let known: Vec<RData> = zone
                .records
                .lock()
                .iter()
                .filter(|(name, _)| *name == asked)
                .map(|(_, data)| data.clone())
                .collect();
            let fits = |data: &&RData| data.record_type() == query.query_type();
            let answers = known
                .iter()
                .filter(fits)
                .map(|data| Record::from_rdata(query.name().clone(), 0, data.clone()));
            message.answers = answers.collect();
            message.metadata.message_type = MessageType::Response;
            if known.is_empty() {
                message.metadata.response_code = ResponseCode::NXDomain;
            }
            let Ok(answer) = message.to_vec() else { continue };
            drop(socket.send_to(&answer, client).await);
        }
    });
    address
}

fn address(name: &str, ip: Ipv4Addr) -> Known {
    (name.to_owned(), RData::A(A(ip)))
}

fn srv(priority: u16, weight: u16, port: u16, target: &str) -> Known {
    let target = Name::from_ascii(target).expect("a name");
    ("_http._tcp.workers.test.".to_owned(), RData::SRV(SRV::new(priority, weight, port, target)))
}

async fn worker() -> ScriptedWorker {
    ScriptedWorker::start(|_| vec![Step::Send(response(200, &[], b"{}"))]).await.expect("a free port")
}

fn port(worker: &ScriptedWorker) -> u16 {
    worker.url().rsplit_once(':').expect("a port").1.parse().expect("a number")
}

/// Waits until the fleet has exactly these URLs; the workers' descriptions then.
async fn listed(gateway: &Gateway, urls: &[String]) -> serde_json::Value {
    let wait = async {
        loop {
            let shown = gateway.get("/workers").await.json();
            let mut found: Vec<&str> = shown["workers"]
                .as_array()
                .expect("a list")
                .iter()
                .filter_map(|one| one["url"].as_str())
                .collect();
            found.sort_unstable();
            let mut wanted: Vec<&str> = urls.iter().map(String::as_str).collect();
            wanted.sort_unstable();
            if found == wanted {
                return shown;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.expect("the fleet follows the records")
}

#[tokio::test]
async fn servers_of_srv_records_are_workers_and_followed_as_they_change() {
    let (one, two) = (worker().await, worker().await);
    let records = |srvs: Vec<Known>| [vec![address("host.test.", Ipv4Addr::LOCALHOST)], srvs].concat();
    let zone = Zone::of(records(vec![srv(0, 10, port(&one), "host.test.")]));
    let server = serve(Arc::clone(&zone)).await.to_string();
    let given = [
        ("worker_dns", "srv://_http._tcp.workers.test"),
        ("worker_dns_server", server.as_str()),
        ("worker_refresh", "50ms"),
    ];
    let gateway = Gateway::start_cold(&given, &[]).await;
    let url = |worker: &ScriptedWorker| worker.url();
    let before = listed(&gateway, &[url(&one)]).await["workers"][0]["id"].clone();
    zone.set(records(vec![
        srv(0, 10, port(&one), "host.test."),
        srv(5, 40, port(&two), "host.test."),
        srv(0, 0, 1, "."),
    ]));
    let shown = listed(&gateway, &[url(&one), url(&two)]).await;
    let of = |url: &str, name: &str| {
        let rows = shown["workers"].as_array().expect("a list");
        rows.iter().find(|row| row["url"] == url).map(|row| row[name].clone()).expect("it is listed")
    };
    assert_eq!((of(&url(&one), "priority"), of(&url(&two), "priority")), (50.into(), 45.into()));
    assert_eq!((of(&url(&one), "cost"), of(&url(&two), "cost")), (4.0.into(), 1.0.into()));
    assert_eq!(of(&url(&one), "id"), before, "another weight is no reason to take a worker out");
    zone.set(records(vec![srv(0, 0, port(&two), "host.test.")]));
    listed(&gateway, &[url(&two)]).await;
    // A name server that has lost its records empties no fleet.
    zone.set(Vec::new());
    zone.asked_again().await;
    listed(&gateway, &[url(&two)]).await;
    let ready = gateway.app.fleet.wait_until(|fleet| fleet.workers().iter().all(|worker| worker.is_ready()));
    tokio::time::timeout(PATIENCE, ready).await.expect("it becomes ready");
    assert_eq!(gateway.post("/v1/completions", r#"{"prompt":"x"}"#).await.status, 200);
    assert_eq!((one.record().seen.len(), two.record().seen.len()), (0, 1));
}

#[tokio::test]
async fn addresses_of_a_name_come_from_the_name_server_that_was_given() {
    let worker = worker().await;
    let zone = Zone::of(vec![address("workers.test.", Ipv4Addr::LOCALHOST)]);
    let server = serve(Arc::clone(&zone)).await.to_string();
    let name = format!("dns://workers.test:{}", port(&worker));
    let given =
        [("worker_dns", name.as_str()), ("worker_dns_server", server.as_str()), ("worker_refresh", "50ms")];
    let gateway = Gateway::start_cold(&given, &[]).await;
    listed(&gateway, &[worker.url()]).await;
}

#[tokio::test]
async fn a_record_cannot_lead_to_a_metadata_address() {
    let zone = Zone::of(vec![
        address("workers.test.", Ipv4Addr::new(169, 254, 169, 254)),
        address("workers.test.", Ipv4Addr::LOCALHOST),
    ]);
    let server = serve(Arc::clone(&zone)).await.to_string();
    let given = [
        ("worker_dns", "dns://workers.test:80"),
        ("worker_dns_server", server.as_str()),
        ("worker_refresh", "50ms"),
    ];
    let gateway = Gateway::start_cold(&given, &[]).await;
    listed(&gateway, &["http://127.0.0.1:80".to_owned()]).await;
}

#[tokio::test]
async fn a_name_server_that_is_none_or_a_name_that_is_none_is_a_fault_of_the_start() {
    for (name, server, field) in [
        ("srv://_http._tcp.workers.test", "ns.example", "worker_dns_server"),
        ("srv://_http._tcp.workers.test:80", "127.0.0.1", "worker_dns"),
        ("dns://workers.test", "127.0.0.1", "worker_dns"),
    ] {
        let given = [("worker_dns", name), ("worker_dns_server", server)];
        let fault = Server::bind(options(&given, &[])).await.err().expect(name).to_string();
        assert!(fault.contains(server) || fault.contains(name), "{field}: {fault}");
    }
}
