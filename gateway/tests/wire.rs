//! Clients' bytes that two parsers could read differently, come too slowly, or grow: refused before anything serves them.

use std::time::{Duration, Instant};

use crate::kit::{Answer, Gateway};
use branchline_testkit::{ScriptedWorker, Step, response};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

async fn plain_worker() -> ScriptedWorker {
    ScriptedWorker::start(|_| vec![Step::Send(response(200, &[], b"{}"))]).await.expect("a free port")
}

/// Sends raw bytes and reads to the connection's end.
async fn raw(gateway: &Gateway, bytes: &str) -> Answer {
    let mut client = gateway.connect().await;
    client.write(bytes.as_bytes()).await;
    client.answer().await
}

/// Waits until the gateway ends the connection; what it sent.
async fn closed(client: &mut crate::kit::Client) -> Vec<u8> {
    let mut rest = Vec::new();
    let end = client.stream.read_to_end(&mut rest);
    // A reset is an end too.
    drop(tokio::time::timeout(crate::kit::PATIENCE, end).await.expect("the connection is closed"));
    rest
}

#[tokio::test]
async fn requests_with_two_readings_are_refused_and_their_connection_ends() {
    let worker = plain_worker().await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    let smuggled = "0\r\n\r\nGET /workers HTTP/1.1\r\nhost: a\r\n\r\n";
    for (head, word) in [
        (
            "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n",
            "both",
        ),
        (
            "POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n",
            "both",
        ),
        (
            "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\ncontent-length: 5\r\n\r\n",
            "content-length",
        ),
        (
            "POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: identity, chunked\r\n\r\n",
            "transfer-encoding",
        ),
        ("POST /v1/completions HTTP/1.1\nhost: a\ncontent-length: 2\n\n{}", "CR LF"),
        ("POST /v1/completions HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}", "host"),
        ("POST /v1/completions HTTP/1.1\r\nhost: a\r\nhost: b\r\ncontent-length: 2\r\n\r\n{}", "host"),
        ("POST /v1/completions HTTP/1.1\r\nhost: a\r\nx : y\r\ncontent-length: 2\r\n\r\n{}", "header"),
        ("POST /v1/completions HTTP/1.1\r\nhost: a\r\nx: y\r\n z\r\ncontent-length: 2\r\n\r\n{}", "header"),
    ] {
        let answer = raw(&gateway, &format!("{head}{smuggled}")).await;
        let error = &answer.json()["error"];
        assert_eq!((answer.status, error["code"].as_str()), (400, Some("invalid_argument")), "{head:?}");
        assert!(error["message"].as_str().is_some_and(|text| text.contains(word)), "{head:?}: {error}");
        assert_eq!(answer.header("connection"), Some("close"));
    }
    assert!(worker.record().seen.is_empty());
    assert!(
        gateway
            .get("/metrics")
            .await
            .text()
            .contains("branchline_router_errors_total{code=\"invalid_argument\"} 9")
    );
}

#[tokio::test]
async fn a_good_request_before_a_bad_one_is_answered_first() {
    let worker = plain_worker().await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    let good =
        "POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n";
    let mut client = gateway.connect().await;
    client.write(format!("{good}{good}GET /health HTTP/1.1\n\n").as_bytes()).await;
    let text = String::from_utf8(closed(&mut client).await).expect("text");
    let statuses: Vec<&str> = text.split("HTTP/1.1 ").skip(1).map(|answer| &answer[..3]).collect();
    assert_eq!(statuses, ["200", "200", "400"], "{text}");
    assert_eq!(worker.record().seen.len(), 2);
    assert!(worker.record().seen.iter().all(|seen| seen.body == b"{}"));
}

#[tokio::test]
async fn connections_that_bring_no_whole_head_in_time_are_closed_and_harm_nobody() {
    let worker = plain_worker().await;
    let gateway = Gateway::start(&[("header_timeout", "300ms")], &[worker.url()]).await;
    let mut clients = Vec::new();
    for start in ["", "G", "PRI * HTTP/2.0\r\n", "POST /v1/completions HTTP/1.1\r\nhost: a\r\nx: "] {
        for _ in 0..50 {
            let mut client = gateway.connect().await;
            client.write(start.as_bytes()).await;
            clients.push(client);
        }
    }
    assert_eq!(
        gateway.post("/v1/completions", "{}").await.status,
        200,
        "beside two hundred that hold theirs"
    );
    for client in &mut clients {
        closed(client).await;
    }
}

#[tokio::test]
async fn heads_and_bodies_that_dribble_are_given_up() {
    let worker = plain_worker().await;
    let gateway = Gateway::start(&[("header_timeout", "300ms")], &[worker.url()]).await;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n";
    for start in ["GET /health HTTP/1.1\r\nhost: a\r\nx: ", head] {
        let stream = tokio::net::TcpStream::connect(gateway.address).await.expect("it listens");
        let (mut read, mut write) = stream.into_split();
        write.write_all(start.as_bytes()).await.expect("it reads");
        let started = Instant::now();
        let dribble = tokio::spawn(async move {
            while write.write_all(b"x").await.is_ok() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        let mut rest = Vec::new();
        drop(
            tokio::time::timeout(crate::kit::PATIENCE, read.read_to_end(&mut rest))
                .await
                .expect("it is closed"),
        );
        assert!(started.elapsed() >= Duration::from_millis(300));
        dribble.abort();
    }
    assert!(worker.record().seen.is_empty());
}

#[tokio::test]
async fn a_head_within_its_time_is_served_however_it_is_cut() {
    let worker = plain_worker().await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    let mut client = gateway.connect().await;
    for piece in [
        "\r\n",
        "POST /v1/completions HT",
        "TP/1.1\r",
        "\nhost: a\r\nconte",
        "nt-length: 2\r\n",
        "\r",
        "\n{",
        "}",
    ] {
        client.write(piece.as_bytes()).await;
        client.stream.flush().await.expect("sent");
    }
    client.read_until("200 OK").await;
    assert_eq!(worker.record().seen[0].body, b"{}");
}

#[tokio::test]
async fn heads_and_paths_over_their_bounds_are_refused() {
    let gateway = Gateway::start_cold(&[], &[]).await;
    let long = format!("GET /health HTTP/1.1\r\nhost: a\r\nx: {}\r\n\r\n", "y".repeat(80 << 10));
    assert_eq!(raw(&gateway, &long).await.status, 431);
    let many: String = (0..200).map(|at| format!("x{at}: 1\r\n")).collect();
    assert_eq!(raw(&gateway, &format!("GET /health HTTP/1.1\r\nhost: a\r\n{many}\r\n")).await.status, 431);
}

#[tokio::test]
async fn packed_bodies_are_refused_unread_and_json_bombs_cost_nothing() {
    let worker = plain_worker().await;
    let gateway = Gateway::start(&[], &[worker.url()]).await;
    for coding in ["gzip", "zstd", "br", "deflate", "gzip, gzip"] {
        let answer = gateway.call("POST", "/v1/completions", &[("content-encoding", coding)], "\x1f").await;
        assert_eq!(
            (answer.status, answer.json()["error"]["param"].as_str()),
            (415, Some("content-encoding"))
        );
    }
    let plain = gateway.call("POST", "/v1/completions", &[("content-encoding", "identity")], "{}").await;
    assert_eq!(plain.status, 200);
    for bomb in ["[".repeat(100_000), "{\"a\":".repeat(100_000)] {
        let answer = gateway.post("/v1/completions", &format!("{{\"model\":\"m\",\"x\":{bomb}")).await;
        assert_eq!(answer.status, 400, "{}", answer.text());
        assert!(answer.text().contains("nested deeper"), "{}", answer.text());
    }
    assert_eq!(worker.record().seen.len(), 1);
}
