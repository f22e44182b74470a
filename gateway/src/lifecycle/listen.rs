//! Opens listening ports; failures say what to do.

use std::io::ErrorKind;
use std::net::SocketAddr;

use tokio::net::{TcpListener, TcpSocket};

use super::StartError;

/// Connections that wait to be taken before the kernel drops more, which costs each client a second.
const BACKLOG: u32 = 4096;

/// Listens on `host:port`; `flag` is the option that sets the port.
pub(super) async fn open(host: &str, port: u16, flag: &str) -> Result<TcpListener, StartError> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    bind(bare, port).await.map_err(|error| {
        let reason = match error.kind() {
            ErrorKind::NotFound => {
                format!("the name can't be resolved ({error}); give another with {}", flag.replace("port", "host"))
            }
            ErrorKind::AddrInUse => {
                format!("the port is in use; stop the process that has it, or give another with {flag} (0 takes any free port)")
            }
            ErrorKind::PermissionDenied => format!("not allowed ({error}); give a port above 1023 with {flag}"),
            ErrorKind::AddrNotAvailable => {
                format!("the address is not one of this machine ({error}); give another with {}", flag.replace("port", "host"))
            }
            _ => format!("{error}; check {} and {flag}", flag.replace("port", "host")),
        };
        StartError::Bind { host: host.to_owned(), port, reason }
    })
}

/// Binds the first address of the name that can be bound; `NotFound` if it has none.
async fn bind(host: &str, port: u16) -> std::io::Result<TcpListener> {
    let unknown = |text: String| std::io::Error::new(ErrorKind::NotFound, text);
    let addresses =
        tokio::net::lookup_host((host, port)).await.map_err(|error| unknown(error.to_string()))?;
    let mut failure = unknown("it has no address".to_owned());
    for address in addresses {
        match listen(address) {
            Ok(listener) => return Ok(listener),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // A port that has just been left may be taken again at once.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_port_in_use_is_named_with_what_to_do() {
        let first = open("127.0.0.1", 0, "--port").await.expect("any free port");
        let port = first.local_addr().expect("bound").port();
        let message = open("127.0.0.1", port, "--port").await.expect_err("taken").to_string();
        assert!(message.contains(&format!("127.0.0.1:{port}")), "{message}");
        assert!(message.contains("in use") && message.contains("--port"), "{message}");
    }

    #[tokio::test]
    async fn an_unknown_host_is_named() {
        let error = open("host.invalid", 0, "--port").await.expect_err("no such name").to_string();
        assert!(error.contains("host.invalid") && error.contains("--host"), "{error}");
        assert!(error.contains("can't be resolved"), "{error}");
    }

    #[tokio::test]
    async fn a_burst_of_connections_waits_without_being_dropped() {
        // The kernel caps every backlog, so a burst is judged by what this machine allows.
        let cap = std::fs::read_to_string("/proc/sys/net/core/somaxconn").ok();
        let cap: usize = cap.and_then(|text| text.trim().parse().ok()).unwrap_or(128);
        let listener = open("127.0.0.1", 0, "--port").await.expect("any free port");
        let address = listener.local_addr().expect("bound");
        let mut held = Vec::new();
        for _ in 0..cap.min(300) {
            let connect = tokio::net::TcpStream::connect(address);
            // A dropped one is only tried again after a second.
            let connected = tokio::time::timeout(std::time::Duration::from_millis(900), connect).await;
            held.push(connected.expect("none is dropped").expect("it waits in the backlog"));
        }
    }
}
