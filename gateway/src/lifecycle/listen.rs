//! Opens listening ports; failures say what to do.

use std::io::ErrorKind;

use tokio::net::TcpListener;

use super::StartError;

/// Listens on `host:port`; `flag` is the option that sets the port.
pub(super) async fn open(host: &str, port: u16, flag: &str) -> Result<TcpListener, StartError> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    TcpListener::bind((bare, port)).await.map_err(|error| {
        let reason = match error.kind() {
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
    }
}
