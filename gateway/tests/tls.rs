//! TLS of clients and towards workers, with and without clients' certificates, and certificates that change under way.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::kit::{Answer, Gateway, PATIENCE, spell};
use branchline_testkit::{EngineSetup, FakeEngine, ScriptedWorker, Step, response};
use branchline_worker::ServerTls;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// An authority of a test.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
    der: CertificateDer<'static>,
}

/// A certificate and its key.
struct Pair {
    cert: String,
    der: CertificateDer<'static>,
    key: KeyPair,
}

impl Authority {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("a key");
        let cert = params.self_signed(&key).expect("a certificate");
        let (pem, der) = (cert.pem(), cert.der().clone());
        Self { issuer: Issuer::new(params, key), pem, der }
    }

    fn signs(&self, name: &str) -> Pair {
        let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
        let mut params = CertificateParams::new(names).expect("names");
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("a key");
        let cert = params.signed_by(&key, &self.issuer).expect("a certificate");
        Pair { cert: cert.pem(), der: cert.der().clone(), key }
    }
}

fn write(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, text).expect("written");
    path
}

fn write_pair(folder: &Path, name: &str, pair: &Pair) -> (PathBuf, PathBuf) {
    let cert = write(folder, &format!("{name}.crt"), &pair.cert);
    (cert, write(folder, &format!("{name}.key"), &pair.key.serialize_pem()))
}

fn client(trusts: &[&Authority], shows: Option<&Pair>) -> TlsConnector {
    let mut roots = RootCertStore::empty();
    for authority in trusts {
        roots.add(authority.der.clone()).expect("an authority");
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots);
    let config = match shows {
        None => builder.with_no_client_auth(),
        Some(pair) => {
            let key = PrivateKeyDer::try_from(pair.key.serialize_der()).expect("a key");
            builder.with_client_auth_cert(vec![pair.der.clone()], key).expect("a pair")
        }
    };
    TlsConnector::from(Arc::new(config))
}

/// One request over TLS; an error if there is no answer.
async fn ask(gateway: &Gateway, client: &TlsConnector, path: &str) -> std::io::Result<Answer> {
    let exchange = async {
        let stream = TcpStream::connect(gateway.address).await?;
        let name = ServerName::try_from("localhost").expect("a name");
        let mut stream = client.connect(name, stream).await?;
        stream.write_all(spell("localhost", "POST", path, &[], r#"{"prompt":"x"}"#).as_bytes()).await?;
        let mut bytes = Vec::new();
        let end = stream.read_to_end(&mut bytes).await;
        match bytes.is_empty() {
            true => Err(end.err().unwrap_or_else(|| std::io::Error::other("closed without an answer"))),
            false => Ok(Answer::parse(&bytes)),
        }
    };
    tokio::time::timeout(PATIENCE, exchange).await.expect("an end in time")
}

async fn worker() -> ScriptedWorker {
    ScriptedWorker::start(|_| vec![Step::Send(response(200, &[], b"{}"))]).await.expect("a free port")
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// A TLS end before `target`, as a worker has it that serves over TLS.
async fn tls_before(target: std::net::SocketAddr, tls: Arc<ServerTls>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = TlsAcceptor::from(tls.config());
            tokio::spawn(async move {
                let Ok(mut outer) = acceptor.accept(stream).await else { return };
                let Ok(mut inner) = TcpStream::connect(target).await else { return };
                drop(copy_bidirectional(&mut outer, &mut inner).await);
            });
        }
    });
    port
}

fn address_of(url: &str) -> std::net::SocketAddr {
    url.rsplit_once("//").expect("a scheme").1.parse().expect("an address")
}

#[tokio::test]
async fn clients_are_served_over_tls_and_not_without() {
    let (folder, authority, worker) =
        (tempfile::tempdir().expect("a folder"), Authority::new("a"), worker().await);
    let (cert, key) = write_pair(folder.path(), "server", &authority.signs("gateway"));
    let given = [("tls_cert_path", text(&cert)), ("tls_key_path", text(&key))];
    let gateway = Gateway::start(&given, &[worker.url()]).await;
    let answer = ask(&gateway, &client(&[&authority], None), "/v1/completions").await.expect("an answer");
    assert_eq!((answer.status, answer.complete), (200, true));
    let other = Authority::new("other");
    assert!(ask(&gateway, &client(&[&other], None), "/v1/completions").await.is_err(), "it is no one else");
    let mut plain = gateway.connect().await;
    plain.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    let mut bytes = Vec::new();
    drop(tokio::time::timeout(PATIENCE, plain.stream.read_to_end(&mut bytes)).await.expect("it is closed"));
    assert!(!bytes.starts_with(b"HTTP/"), "nothing is served in the clear");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_command_line_reaches_a_gateway_over_tls_that_it_can_believe() {
    let (folder, authority) = (tempfile::tempdir().expect("a folder"), Authority::new("a"));
    let (cert, key) = write_pair(folder.path(), "server", &authority.signs("gateway"));
    let (ca, other) = (
        write(folder.path(), "ca.crt", &authority.pem),
        write(folder.path(), "other.crt", &Authority::new("other").pem),
    );
    let given = [("tls_cert_path", text(&cert)), ("tls_key_path", text(&key))];
    let gateway = Gateway::start_cold(&given, &[]).await;
    for (ca, believed) in [(&ca, true), (&other, false)] {
        let url = format!("https://localhost:{}", gateway.address.port());
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_branchline-router"));
        command.args(["wasm", "ls", "--url", &url, "--ca-cert", text(ca)]);
        let done = tokio::task::spawn_blocking(move || command.output().expect("it runs"));
        let done = tokio::time::timeout(PATIENCE, done).await.expect("in time").expect("no panic");
        let said = String::from_utf8_lossy(&done.stderr);
        assert_eq!(
            (done.status.success(), said.contains("no gateway answers")),
            (believed, !believed),
            "{said}"
        );
    }
}

#[tokio::test]
async fn a_silent_handshake_is_given_up_and_holds_up_nobody() {
    let (folder, authority) = (tempfile::tempdir().expect("a folder"), Authority::new("a"));
    let (cert, key) = write_pair(folder.path(), "server", &authority.signs("gateway"));
    let given = [("tls_cert_path", text(&cert)), ("tls_key_path", text(&key)), ("header_timeout", "100ms")];
    let gateway = Gateway::start_cold(&given, &[]).await;
    let mut silent = gateway.connect().await;
    let answer = ask(&gateway, &client(&[&authority], None), "/v1/completions").await.expect("an answer");
    assert_eq!(answer.status, 503);
    let mut bytes = Vec::new();
    let end = silent.stream.read_to_end(&mut bytes);
    drop(tokio::time::timeout(PATIENCE, end).await.expect("it is closed"));
}

#[tokio::test]
async fn with_an_authority_for_clients_only_its_certificates_are_served() {
    let (folder, ours, theirs) =
        (tempfile::tempdir().expect("a folder"), Authority::new("a"), Authority::new("b"));
    let worker = worker().await;
    let (cert, key) = write_pair(folder.path(), "server", &ours.signs("gateway"));
    let ca = write(folder.path(), "ca.crt", &theirs.pem);
    let given =
        [("tls_cert_path", text(&cert)), ("tls_key_path", text(&key)), ("tls_client_ca_path", text(&ca))];
    let gateway = Gateway::start(&given, &[worker.url()]).await;
    let known = client(&[&ours], Some(&theirs.signs("client")));
    assert_eq!(ask(&gateway, &known, "/v1/completions").await.expect("an answer").status, 200);
    let stranger = client(&[&ours], Some(&ours.signs("client")));
    assert!(ask(&gateway, &stranger, "/v1/completions").await.is_err());
    assert!(ask(&gateway, &client(&[&ours], None), "/v1/completions").await.is_err());
    assert_eq!(worker.record().seen.len(), 1);
}

#[tokio::test]
async fn changed_certificates_are_served_without_a_restart_and_broken_ones_are_not() {
    let (folder, old, new) =
        (tempfile::tempdir().expect("a folder"), Authority::new("old"), Authority::new("new"));
    let worker = worker().await;
    let (cert, key) = write_pair(folder.path(), "server", &old.signs("gateway"));
    let given = [("tls_cert_path", text(&cert)), ("tls_key_path", text(&key))];
    let gateway = Gateway::start(&given, &[worker.url()]).await;
    let (of_old, of_new) = (client(&[&old], None), client(&[&new], None));
    assert!(ask(&gateway, &of_old, "/v1/completions").await.is_ok());
    write_pair(folder.path(), "server", &new.signs("gateway"));
    let taken = async {
        while ask(&gateway, &of_new, "/v1/completions").await.is_err() {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, taken).await.expect("the new one is served");
    assert!(ask(&gateway, &of_old, "/v1/completions").await.is_err());
    // A pair that does not match leaves the last one; a later good one is taken.
    write(folder.path(), "server.crt", &old.signs("gateway").cert);
    tokio::time::sleep(std::time::Duration::from_millis(1200)).await;
    assert!(ask(&gateway, &of_new, "/v1/completions").await.is_ok());
}

#[tokio::test]
async fn http_workers_are_reached_over_tls_and_only_trusted_ones() {
    let (folder, ours, theirs) =
        (tempfile::tempdir().expect("a folder"), Authority::new("a"), Authority::new("b"));
    let (server, shown) = (ours.signs("worker"), theirs.signs("gateway"));
    let (cert, key) = write_pair(folder.path(), "worker", &server);
    let (own, own_key) = write_pair(folder.path(), "gateway", &shown);
    let (ca, client_ca) =
        (write(folder.path(), "ca.crt", &ours.pem), write(folder.path(), "b.crt", &theirs.pem));
    let worker = worker().await;
    let tls = ServerTls::load(cert, key, Some(client_ca.clone())).expect("good files");
    let url = format!("https://localhost:{}", tls_before(address_of(&worker.url()), tls).await);
    let given =
        [("ca_cert_path", text(&ca)), ("client_cert_path", text(&own)), ("client_key_path", text(&own_key))];
    let gateway = Gateway::start(&given, std::slice::from_ref(&url)).await;
    assert_eq!(gateway.post("/v1/completions", r#"{"prompt":"x"}"#).await.status, 200);
    for given in [vec![("ca_cert_path", text(&client_ca))], vec![("ca_cert_path", text(&ca))]] {
        let gateway = Gateway::start_cold(&given, std::slice::from_ref(&url)).await;
        let refused = gateway.post("/v1/completions", r#"{"prompt":"x"}"#).await;
        assert!(matches!(refused.status, 502 | 503), "an untrusted worker, or no certificate to show it");
    }
    assert_eq!(worker.record().seen.len(), 1);
}

#[tokio::test]
async fn engines_are_reached_over_tls() {
    let (folder, ours) = (tempfile::tempdir().expect("a folder"), Authority::new("a"));
    let (cert, key) = write_pair(folder.path(), "engine", &ours.signs("engine"));
    let ca = write(folder.path(), "ca.crt", &ours.pem);
    let engine = FakeEngine::start(EngineSetup::default()).await.expect("a free port");
    let tls = ServerTls::load(cert, key, Some(ca.clone())).expect("good files");
    let url = format!("grpcs://localhost:{}", tls_before(address_of(&engine.url()), tls).await);
    let (own, own_key) = write_pair(folder.path(), "gateway", &ours.signs("gateway"));
    let given =
        [("ca_cert_path", text(&ca)), ("client_cert_path", text(&own)), ("client_key_path", text(&own_key))];
    let gateway = Gateway::start(&given, &[url]).await;
    let answer = gateway.get("/workers").await.json();
    assert_eq!(
        (&answer["workers"][0]["ready"], &answer["workers"][0]["kind"]),
        (&true.into(), &"grpc".into())
    );
    assert_eq!(gateway.post("/flush_cache", "").await.status, 200);
}

#[tokio::test]
async fn files_that_cannot_be_used_are_named_with_their_option() {
    let folder = tempfile::tempdir().expect("a folder");
    let empty = write(folder.path(), "empty.pem", "");
    let pair = Authority::new("a").signs("x");
    let (cert, key) = write_pair(folder.path(), "x", &pair);
    let load = |cert: &Path, key: &Path, ca: Option<&Path>| {
        ServerTls::load(cert.to_owned(), key.to_owned(), ca.map(Path::to_owned)).expect_err("no good").message
    };
    let absent = folder.path().join("absent.pem");
    for (message, option, file) in [
        (load(&absent, &key, None), "tls_cert_path", "absent.pem"),
        (load(&empty, &key, None), "tls_cert_path", "empty.pem"),
        (load(&cert, &empty, None), "tls_key_path", "empty.pem"),
        (load(&cert, &key, Some(&empty)), "tls_client_ca_path", "empty.pem"),
    ] {
        assert!(message.contains(option) && message.contains(file), "{message}");
    }
    let other = write_pair(folder.path(), "y", &Authority::new("a").signs("y")).1;
    assert!(load(&cert, &other, None).contains("tls_cert_path"), "a key of another certificate");
}
