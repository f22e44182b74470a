//! One span a request, sent in batches to an OTLP collector over HTTP.
//!
//! Follows the client's W3C trace context, and gives the one that workers are to follow. Spans are dropped rather
//! than kept if the collector does not keep up: nothing here ever delays a request.

use std::collections::HashMap;
use std::time::Duration;

use async_trait::async_trait;
use branchline_core::{Error, Result};
use bytes::Bytes;
use http::{Request, Response, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use opentelemetry::propagation::TextMapPropagator as _;
use opentelemetry::trace::{
    Span as _, SpanKind, Status, TraceContextExt as _, Tracer as _, TracerProvider as _,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider, Span};
use tokio::runtime::Handle;

const TRACEPARENT: &str = "traceparent";
/// Most that is read of a collector's answer.
const ANSWER_BYTES: usize = 64 * 1024;
/// What a collector may take for one batch.
const PATIENCE: Duration = Duration::from_secs(10);
/// What the last spans get at the end.
const FAREWELL: Duration = Duration::from_secs(2);

/// Where spans go. Made once; dropping it does not wait for spans that were not sent, `close` does.
#[derive(Debug)]
pub struct Traces {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
}

/// The address that spans are posted to: `endpoint` itself if it has a path, else its `/v1/traces`.
///
/// # Errors
/// `InvalidArgument` if it is no `http://` URL.
pub fn traces_url(endpoint: &str) -> Result<Uri> {
    let refuse = || {
        let message = format!("'{endpoint}' is no http:// URL of a collector, such as http://127.0.0.1:4318");
        Error::invalid("otlp_endpoint", message)
    };
    let given: Uri = endpoint.parse().map_err(|_| refuse())?;
    if given.scheme_str() != Some("http") || given.host().is_none() {
        return Err(refuse());
    }
    if matches!(given.path(), "" | "/") {
        return format!("{}/v1/traces", endpoint.trim_end_matches('/')).parse().map_err(|_| refuse());
    }
    Ok(given)
}

impl Traces {
    /// Must be called inside the tokio runtime whose threads shall post the spans.
    ///
    /// # Errors
    /// As [`traces_url`]; `Internal` if the exporter can't be built.
    pub fn new(endpoint: &str) -> Result<Self> {
        let url = traces_url(endpoint)?;
        let client = Client::builder(TokioExecutor::new()).build(HttpConnector::new());
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(Poster { client, runtime: Handle::current() })
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(url.to_string())
            .with_timeout(PATIENCE)
            .build()
            .map_err(|error| Error::internal(format!("spans can't be exported: {error}")))?;
        let resource = Resource::builder().with_service_name("branchline-router").build();
        let provider =
            SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build();
        let tracer = provider.tracer("branchline");
        Ok(Self { provider, tracer })
    }

    /// The span of a request that has just come, under the client's context if it has one.
    pub fn begin(&self, method: &str, route: &'static str, traceparent: Option<&str>) -> RequestSpan {
        let parent = match traceparent {
            Some(value) => TraceContextPropagator::new()
                .extract(&HashMap::from([(TRACEPARENT.to_owned(), value.to_owned())])),
            None => Context::new(),
        };
        let attributes =
            [KeyValue::new("http.request.method", method.to_owned()), KeyValue::new("http.route", route)];
        let span = self
            .tracer
            .span_builder(format!("{method} {route}"))
            .with_kind(SpanKind::Server)
            .with_attributes(attributes)
            .start_with_context(&self.tracer, &parent);
        RequestSpan { span }
    }

    /// Sends what is left, within two seconds. Blocks: not for a thread that serves.
    pub fn close(&self) {
        if let Err(error) = self.provider.shutdown_with_timeout(FAREWELL) {
            tracing::warn!(%error, "the last spans were not sent");
        }
    }
}

/// One request's span; ends when it is dropped.
#[derive(Debug)]
pub struct RequestSpan {
    span: Span,
}

impl RequestSpan {
    /// The context that workers are to follow, as W3C's `traceparent` has it.
    pub fn traceparent(&self) -> Option<String> {
        let mut carrier = HashMap::new();
        let context = Context::new().with_remote_span_context(self.span.span_context().clone());
        TraceContextPropagator::new().inject_context(&context, &mut carrier);
        carrier.remove(TRACEPARENT)
    }

    /// The first token, or the first byte, goes out.
    pub fn first_byte(&mut self) {
        self.span.add_event("first_token", Vec::new());
    }

    /// The answer's status; errors of ours and of workers mark the span.
    pub fn status(&mut self, status: u16, error: Option<&'static str>) {
        self.span.set_attribute(KeyValue::new("http.response.status_code", i64::from(status)));
        if let Some(code) = error {
            self.span.set_attribute(KeyValue::new("error.type", code));
        }
        if status >= 500 {
            self.span.set_status(Status::error(error.unwrap_or_default()));
        }
    }
}

/// Posts batches on the gateway's own threads; the exporter's thread only waits.
#[derive(Debug)]
struct Poster {
    client: Client<HttpConnector, Full<Bytes>>,
    runtime: Handle,
}

#[async_trait]
impl HttpClient for Poster {
    async fn send_bytes(&self, request: Request<Bytes>) -> std::result::Result<Response<Bytes>, HttpError> {
        let client = self.client.clone();
        let sent = self.runtime.spawn(async move {
            tokio::time::timeout(PATIENCE, async move {
                let answer = client.request(request.map(Full::new)).await?;
                let (head, body) = answer.into_parts();
                let body = Limited::new(body, ANSWER_BYTES).collect().await?.to_bytes();
                Ok::<_, HttpError>(Response::from_parts(head, body))
            })
            .await
        });
        sent.await??
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_without_a_path_gets_the_usual_one() {
        for (given, wanted) in [
            ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
            ("http://c:4318/", "http://c:4318/v1/traces"),
            ("http://c/own/path", "http://c/own/path"),
        ] {
            assert_eq!(traces_url(given).expect("a URL").to_string(), wanted);
        }
    }

    #[test]
    fn what_is_no_plain_http_url_is_refused_by_name() {
        for given in ["127.0.0.1:4318", "https://c:4318", "grpc://c", "http://", "not a url"] {
            let error = traces_url(given).expect_err(given);
            assert_eq!(error.field.as_deref(), Some("otlp_endpoint"));
            assert!(error.message.contains(given) && error.message.contains("http://127.0.0.1:4318"));
        }
    }

    #[tokio::test]
    async fn a_span_keeps_the_clients_trace_and_has_an_id_of_its_own() {
        let traces = Traces::new("http://127.0.0.1:1").expect("builds without a collector");
        let given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let own = traces.begin("POST", "/generate", Some(given)).traceparent().expect("a context");
        assert_eq!(own[..36], given[..36]);
        assert_ne!(own[36..52], given[36..52]);
        assert!(own.ends_with("-01"));
        let fresh = traces.begin("POST", "/generate", None).traceparent().expect("a context");
        assert_ne!(fresh[3..35], given[3..35]);
        let unsampled = traces.begin("POST", "/generate", Some(&given.replace("-01", "-00"))).traceparent();
        assert!(unsampled.expect("a context").ends_with("-00"), "the client's choice not to record is kept");
    }
}
