//! Finds out whether an address speaks HTTP/1.1 or gRPC: asks for `/health` in HTTP/1.1 and reads how it answers.

use std::time::Duration;

use branchline_core::{Error, ErrorCode, Result};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::worker::Transport;

/// What `authority` (`host:port`) speaks.
///
/// # Errors
/// `Unavailable` if it takes no connection or says nothing within `limit`.
pub async fn speaks(authority: &str, limit: Duration) -> Result<Transport> {
    let fail = |cause: &dyn std::fmt::Display| {
        Error::new(ErrorCode::Unavailable, format!("{authority} does not tell what it speaks: {cause}"))
    };
    let ask = async {
        let mut stream = crate::dial::tcp(authority).await?;
        let head = format!("GET /health HTTP/1.1\r\nhost: {authority}\r\nconnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).await?;
        let mut answer = Vec::with_capacity(16);
        while answer.len() < 7 {
            if stream.read_buf(&mut answer).await? == 0 {
                break;
            }
        }
        // A gRPC server opens with its settings, or hangs up on what is no preface.
        Ok::<_, std::io::Error>(match answer.starts_with(b"HTTP/1.") {
            true => Transport::Http,
            false => Transport::Grpc,
        })
    };
    match tokio::time::timeout(limit, ask).await {
        Ok(Ok(transport)) => Ok(transport),
        // A reset is how some gRPC servers refuse what is no preface.
        Ok(Err(cause)) if cause.kind() == std::io::ErrorKind::ConnectionReset => Ok(Transport::Grpc),
        Ok(Err(cause)) => Err(fail(&cause)),
        Err(_) => Err(fail(&format!("no answer within {} ms", limit.as_millis()))),
    }
}
