//! The real API server, through `kube`: address, certificates and tokens come from KUBECONFIG, ~/.kube/config or the
//! pod's service account, whose token is read again when it changes. Retries and deadlines are the caller's.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use branchline_core::{Error, Result};
use bytes::{Buf as _, Bytes, BytesMut};
use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use http::{Request, Response};
use http_body_util::{BodyExt as _, Limited};
use kube::client::Body;
use kube::{Client, Config};

use crate::api::{Api, Failure, Lines};

/// Largest page of a list; 500 big pods are a tenth of it.
const PAGE_CAP: usize = 256 << 20;
/// Longest line of a watch: etcd holds no object above 1.5 MiB, and JSON may be a few times as long.
const LINE_CAP: usize = 16 << 20;
/// Longest wait for a connection.
const CONNECT: Duration = Duration::from_secs(3);

/// Finds the API server. Nothing is asked of it yet.
///
/// # Errors
/// `InvalidArgument` naming `service_discovery` if there is no configuration or it can't be used.
pub async fn connect() -> Result<Arc<dyn Api>> {
    let fail = |cause: &dyn std::fmt::Display| {
        let text = format!(
            "no Kubernetes API server can be used: {cause}; run in a pod with a service account, or set KUBECONFIG"
        );
        Error::invalid("service_discovery", text)
    };
    let mut config = Config::infer().await.map_err(|cause| fail(&cause))?;
    config.connect_timeout = Some(CONNECT);
    // A refused watch must be seen here: its status decides whether to list again.
    config.default_retry = false;
    tracing::info!(server = %config.cluster_url, "workers are discovered in Kubernetes");
    let client = Client::try_from(config).map_err(|cause| fail(&cause))?;
    Ok(Arc::new(Server(client)))
}

struct Server(Client);

impl Server {
    async fn ask(&self, uri: &str) -> std::result::Result<Response<Body>, Failure> {
        let request = Request::get(uri).header(http::header::ACCEPT, "application/json").body(Body::empty());
        let request = request.map_err(Failure::broken)?;
        let response = self.0.send(request).await.map_err(|cause| Failure::broken(chain(&cause)))?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status().as_u16();
        let body = Limited::new(response.into_body(), 1 << 20).collect().await;
        let body = body.map(|body| body.to_bytes()).unwrap_or_default();
        Err(Failure::answered(status, &body))
    }
}

#[async_trait]
impl Api for Server {
    async fn get(&self, uri: &str) -> std::result::Result<Bytes, Failure> {
        let body = Limited::new(self.ask(uri).await?.into_body(), PAGE_CAP).collect().await;
        body.map(|body| body.to_bytes()).map_err(Failure::broken)
    }

    async fn watch(&self, uri: &str) -> std::result::Result<Lines, Failure> {
        let body = self.ask(uri).await?.into_body();
        Ok(lines(body.into_data_stream().map_err(Failure::broken).boxed()))
    }
}

type Chunks = stream::BoxStream<'static, std::result::Result<Bytes, Failure>>;

/// Cuts a body into lines; an unfinished last one is no event.
fn lines(chunks: Chunks) -> Lines {
    let cut =
        stream::try_unfold((chunks, BytesMut::new(), 0), |(mut chunks, mut held, mut seen)| async move {
            loop {
                if let Some(end) = held[seen..].iter().position(|byte| *byte == b'\n') {
                    let line = held.split_to(seen + end);
                    held.advance(1);
                    let text = String::from_utf8_lossy(&line).into_owned();
                    return Ok(Some((text, (chunks, held, 0))));
                }
                seen = held.len();
                if seen > LINE_CAP {
                    return Err(Failure::broken("an event without an end"));
                }
                match chunks.try_next().await? {
                    Some(chunk) => held.extend_from_slice(&chunk),
                    None => return Ok(None),
                }
            }
        });
    Box::pin(cut.try_filter(|line| std::future::ready(!line.trim().is_empty())))
}

/// An error with its causes: the outermost one alone says "service error".
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let inner_text = inner.to_string();
        if !text.contains(&inner_text) {
            text.push_str(": ");
            text.push_str(&inner_text);
        }
        cause = inner.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lines_are_whole_however_the_body_is_cut() {
        let text = "{\"a\":1}\n\n{\"b\":\"é\"}\nunfinished";
        for size in 1..text.len() {
            let pieces: Vec<_> =
                text.as_bytes().chunks(size).map(|piece| Ok(Bytes::copy_from_slice(piece))).collect();
            let found: Vec<String> = lines(stream::iter(pieces).boxed()).try_collect().await.unwrap();
            assert_eq!(found, ["{\"a\":1}", "{\"b\":\"é\"}"], "pieces of {size}");
        }
    }

    #[tokio::test]
    async fn a_line_without_an_end_is_given_up() {
        let piece = Bytes::from(vec![b'x'; 1 << 20]);
        let endless = stream::repeat_with(move || Ok(piece.clone())).boxed();
        assert!(lines(endless).try_next().await.is_err());
    }
}
