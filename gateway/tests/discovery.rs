//! Workers behind names, before a real name server whose records change.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use crate::kit::{Gateway, PATIENCE};
use branchline_testkit::{ScriptedWorker, Step, response};
use hickory_resolver::proto::op::{Message, MessageType, ResponseCode};
use hickory_resolver::proto::rr::rdata::{A, SRV};
use hickory_resolver::proto::rr::{Name, RData, Record};
use parking_lot::Mutex;
use tokio::net::UdpSocket;

/// Records of one name server: name, its data.
type Zone = Arc<Mutex<Vec<(String, RData)>>>;

/// Answers over UDP from what the zone holds at that moment; nothing may be kept for later.
async fn serve(zone: Zone) -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").await.expect("a free port");
    let address = socket.local_addr().expect("bound");
    tokio::spawn(async move {
        let mut bytes = [0; 4096];
        while let Ok((count, client)) = socket.recv_from(&mut bytes).await {
            let Ok(mut message) = Message::from_vec(&bytes[..count]) else { continue };
            let Some(query) = message.queries.first().cloned() else { continue };
            let asked = query.name().to_string();
            let known: Vec<RData> = zone.lock().iter().filter(|(name, _)| *name == asked).map(|(_, data)| data.clone()).collect();
            let fits = |data: &&RData| data.record_type() == query.query_type();
            let answers = known.iter().filter(fits).map(|data| Record::from_rdata(query.name().clone(), 0, data.clone()));
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

fn srv(priority: u16, weight: u16, port: u16, target: &str) -> (String, RData) {
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
            let mut found: Vec<&str> =
                shown["workers"].as_array().expect("a list").iter().filter_map(|one| one["url"].as_str()).collect();
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
    let zone: Zone = Arc::default();
    zone.lock().push(srv(0, 10, port(&one), "localhost."));
    let server = serve(Arc::clone(&zone)).await.to_string();
    let given = [
        ("worker_dns", "srv://_http._tcp.workers.test"),
        ("worker_dns_server", server.as_str()),
        ("worker_refresh", "50ms"),
    ];
    let gateway = Gateway::start_cold(&given, &[]).await;
    let url = |worker: &ScriptedWorker| format!("http://localhost:{}", port(worker));
    listed(&gateway, &[url(&one)]).await;
    *zone.lock() = vec![srv(0, 10, port(&one), "localhost."), srv(5, 40, port(&two), "localhost.")];
    let shown = listed(&gateway, &[url(&one), url(&two)]).await;
    let of = |url: &str, name: &str| {
        let rows = shown["workers"].as_array().expect("a list");
        rows.iter().find(|row| row["url"] == url).map(|row| row[name].clone()).expect("it is listed")
    };
    assert_eq!((of(&url(&one), "priority"), of(&url(&two), "priority")), (50.into(), 45.into()));
    assert_eq!((of(&url(&one), "cost"), of(&url(&two), "cost")), (4.0.into(), 1.0.into()));
    *zone.lock() = vec![srv(0, 0, port(&two), "localhost.")];
    listed(&gateway, &[url(&two)]).await;
    // A name server that has lost its records empties no fleet.
    zone.lock().clear();
    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    listed(&gateway, &[url(&two)]).await;
    let ready = gateway.app.fleet.wait_until(|fleet| fleet.workers().iter().all(|worker| worker.is_ready()));
    tokio::time::timeout(PATIENCE, ready).await.expect("it becomes ready");
    assert_eq!(gateway.post("/v1/completions", r#"{"prompt":"x"}"#).await.status, 200);
    assert_eq!((one.record().seen.len(), two.record().seen.len()), (0, 1));
}

#[tokio::test]
async fn addresses_of_a_name_come_from_the_name_server_that_was_given() {
    let worker = worker().await;
    let zone: Zone = Arc::default();
    zone.lock().push(("workers.test.".to_owned(), RData::A(A(Ipv4Addr::LOCALHOST))));
    let server = serve(Arc::clone(&zone)).await.to_string();
    let name = format!("dns://workers.test:{}", port(&worker));
    let given = [
        ("worker_dns", name.as_str()),
        ("worker_dns_server", server.as_str()),
        ("worker_refresh", "50ms"),
    ];
    let gateway = Gateway::start_cold(&given, &[]).await;
    listed(&gateway, &[worker.url()]).await;
}

#[tokio::test]
async fn a_record_cannot_lead_to_a_metadata_address() {
    let zone: Zone = Arc::default();
    zone.lock().push(("workers.test.".to_owned(), RData::A(A(Ipv4Addr::new(169, 254, 169, 254)))));
    zone.lock().push(("workers.test.".to_owned(), RData::A(A(Ipv4Addr::LOCALHOST))));
    let server = serve(Arc::clone(&zone)).await.to_string();
    let given = [
        ("worker_dns", "dns://workers.test:80"),
        ("worker_dns_server", server.as_str()),
        ("worker_refresh", "50ms"),
    ];
    let gateway = Gateway::start_cold(&given, &[]).await;
    listed(&gateway, &["http://127.0.0.1:80".to_owned()]).await;
}
