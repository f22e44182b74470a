//! The option table of the router: each option stands here once, with type, default and words.
//!
//! Flags, environment names, file keys, `--help`, docs/reference/router-options.md and the Python
//! stub derive from it. An option is added by adding a row; nothing else re-parses.

use std::path::PathBuf;
use std::time::Duration;

use branchline_plugins::{Peers, TrustedKey};
use branchline_telemetry::LogLevel;
use branchline_worker::PolicyKind;

use super::cluster::{Labels, ModelIdFrom, WorkerProtocol};
use super::layers::{Fault, Layers};
use super::parser::{ReasoningParserChoice, ToolParserChoice};
use super::policy::{ModelAlias, ModelPolicy};
use super::value::{Fraction, Names, Secret, Shape, Size, Value};

/// What the table says of one option.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// Name of the struct field, the Python argument and, with hyphens, of flag and file key.
    pub field: &'static str,
    /// What its value looks like.
    pub shape: Shape,
    /// Default as text; empty for none.
    pub default: &'static str,
    /// Whether pages and logs must not show a value.
    pub secret: bool,
    /// The version that added it.
    pub since: &'static str,
    /// What it does.
    pub doc: &'static str,
}

impl Row {
    /// Flag without its dashes, and key of the file.
    pub fn name(&self) -> String {
        self.field.replace('_', "-")
    }

    /// Environment variable.
    pub fn env(&self) -> String {
        format!("BRANCHLINE_ROUTER_{}", self.field.to_ascii_uppercase())
    }
}

macro_rules! table {
    ($( #[doc = $doc:literal] $field:ident: $type:ty = $default:literal, since $since:literal $($secret:ident)?; )*) => {
        /// Everything an operator can set, resolved. Frozen: parts get the smallest piece they need.
        #[derive(Debug, Clone)]
        pub struct Options {
            $( #[doc = $doc] pub $field: $type, )*
        }

        /// The table, in the order of the pages.
        pub const TABLE: &[Row] = &[
            $( Row {
                field: stringify!($field),
                shape: <$type as Value>::SHAPE,
                default: $default,
                secret: false $(|| stringify!($secret).len() == "secret".len())?,
                since: $since,
                doc: $doc.trim_ascii(),
            }, )*
        ];

        impl Options {
            /// Reads every option from the layers; one fault an option that can't be read.
            pub(super) fn read(layers: &Layers) -> Result<Self, Vec<Fault>> {
                let mut faults = Vec::new();
                $( let $field = layers.read::<$type>(stringify!($field), $default, &mut faults); )*
                match ($($field,)*) {
                    ($(Some($field),)*) => Ok(Self { $($field),* }),
                    _ => Err(faults),
                }
            }
        }
    };
}

table! {
    #[doc = " Address to listen on. Any other than a loopback address needs `--api-key`, `--api-key-file` or `--insecure`."]
    host: String = "127.0.0.1", since "0.1.0";
    #[doc = " Port to listen on; 0 takes any free port."]
    port: u16 = "30000", since "0.1.0";
    #[doc = " Port of a listener of its own for operators' routes, which then are on no other; off without it. 0 takes any free port."]
    admin_port: Option<u16> = "", since "0.1.0";
    #[doc = " Address of that listener. Any other than a loopback address needs an admin's key or `--insecure`."]
    admin_host: String = "127.0.0.1", since "0.1.0";
    #[doc = " PEM file with the certificate chain to serve over TLS with; off without it. Read again when it changes."]
    tls_cert_path: Option<PathBuf> = "", since "0.1.0";
    #[doc = " PEM file with that certificate's key."]
    tls_key_path: Option<PathBuf> = "", since "0.1.0";
    #[doc = " PEM file of authorities, one of which must have signed the certificate that every client then has to show."]
    tls_client_ca_path: Option<PathBuf> = "", since "0.1.0";
    #[doc = " Workers: `grpc://host:port` for Branchline engines, `http://host:port` for any OpenAI-compatible server; `grpcs://` and `https://` over TLS."]
    worker_urls: Vec<String> = "", since "0.1.0";
    #[doc = " How a worker is chosen."]
    policy: PolicyKind = "cache_aware", since "0.1.0";
    #[doc = " How a worker is chosen for one model, as `MODEL=POLICY`; may be given several times."]
    model_policy: Vec<ModelPolicy> = "", since "0.1.0";
    #[doc = " A further name of a model, as `ALIAS=MODEL`; may be given several times."]
    model_alias: Vec<ModelAlias> = "", since "0.1.0";
    #[doc = " Headers, with commas between them, that name a request's session for `sticky` and `consistent_hashing`, the first that is there counts; without any, `session_params.session_id`, `session_id`, `user` or `user_id` of the body does."]
    session_headers: Names = "x-branchline-session,x-smg-routing-key,x-session-id,x-user-id,x-tenant-id", since "0.1.0";
    #[doc = " File of workers: one URL a line, or JSON objects as for `POST /workers`; read again when it changes."]
    worker_file: Option<PathBuf> = "", since "0.1.0";
    #[doc = " Names whose addresses are workers, as `dns://name:port` or `grpc+dns://name:port`, or whose SRV records list them, as `srv://name` or `grpc+srv://name`; asked again every `worker-refresh`."]
    worker_dns: Vec<String> = "", since "0.1.0";
    #[doc = " Name server that is asked for them, as `address` or `address:port`, instead of the system's."]
    worker_dns_server: Option<String> = "", since "0.1.0";
    #[doc = " How often `worker-file` and `worker-dns` are looked at again."]
    worker_refresh: Duration = "5s", since "0.1.0";
    #[doc = " Whether workers are looked for in Kubernetes: pods by `selector`, `prefill-selector`, `decode-selector`, or endpoints of `service-discovery-service`. The API server is found by `KUBECONFIG`, `~/.kube/config` or the pod's service account."]
    service_discovery: bool = "false", since "0.1.0";
    #[doc = " Labels of pods that are workers, as `key=value` pairs that all must hold."]
    selector: Labels = "", since "0.1.0";
    #[doc = " Labels of pods that are prefill workers; a pod that this and `decode-selector` match is both."]
    prefill_selector: Labels = "", since "0.1.0";
    #[doc = " Labels of pods that are decode workers."]
    decode_selector: Labels = "", since "0.1.0";
    #[doc = " Services whose endpoints are workers, by their EndpointSlices."]
    service_discovery_service: Vec<String> = "", since "0.1.0";
    #[doc = " Port of discovered workers; the annotation `branchline.dev/worker-ports` (or `smg.ai/worker-ports`) of a pod gives one or more others."]
    service_discovery_port: u16 = "80", since "0.1.0";
    #[doc = " Namespaces to look in, with commas between them; without any the whole cluster, which needs a ClusterRole."]
    service_discovery_namespace: Option<Names> = "", since "0.1.0";
    #[doc = " What discovered workers speak; `auto` asks each. The annotation `branchline.dev/protocol` of a pod wins."]
    service_discovery_protocol: WorkerProtocol = "auto", since "0.1.0";
    #[doc = " How long nothing may be heard of the API server before all is listed anew."]
    service_discovery_stale_after: Duration = "45s", since "0.1.0";
    #[doc = " Where the model id of a discovered worker comes from: `namespace`, `label:KEY` or `annotation:KEY`; without it, or where it is not there, the worker says itself what it serves."]
    model_id_from: Option<ModelIdFrom> = "", since "0.1.0";
    #[doc = " Annotation with the port of a prefill pod's bootstrap server; `branchline.dev/bootstrap-port` wins over it."]
    bootstrap_port_annotation: String = "sglang.ai/bootstrap-port", since "0.1.0";
    #[doc = " File in which workers that were added or removed over HTTP survive a restart."]
    state_file: Option<PathBuf> = "", since "0.1.0";
    #[doc = " Further workers that a request may be tried on before the first byte of its answer."]
    max_retries: usize = "3", since "0.1.0";
    #[doc = " Retries that each request earns: 0.2 allows one retry for five requests."]
    retry_budget: Fraction = "0.2", since "0.1.0";
    #[doc = " Failures in a row that open a worker's breaker; 0 switches breakers off."]
    breaker_failures: usize = "5", since "0.1.0";
    #[doc = " Share of failures among the last 20 requests that opens it."]
    breaker_share: Fraction = "0.5", since "0.1.0";
    #[doc = " How long it stays open before one probe is let in."]
    breaker_open: Duration = "10s", since "0.1.0";
    #[doc = " Probes in a row that must succeed to close it."]
    breaker_successes: usize = "2", since "0.1.0";
    #[doc = " Silence, on top of twice the predicted wait for a first byte, after which a worker is suspected while others go on; `off` for never."]
    suspect_after: Option<Duration> = "500ms", since "0.1.0";
    #[doc = " How long a worker that has become ready gets less than its share."]
    slow_start: Duration = "10s", since "0.1.0";
    #[doc = " Share of failures that ejects a worker for 30s while its peers fail a quarter of that at most; 0 for never."]
    outlier_share: Fraction = "0.25", since "0.1.0";
    #[doc = " Largest share of a model's workers that may be ejected at once."]
    outlier_ceiling: Fraction = "0.34", since "0.1.0";
    #[doc = " Share of its KV pool in use from which on an engine gets no new request; 1 for never."]
    worker_usage_limit: Fraction = "1", since "0.1.0";
    #[doc = " Longest wait for a connection to a worker."]
    connect_timeout: Duration = "5s", since "0.1.0";
    #[doc = " Whether a stream of an engine that died goes on at another one that promises the same bits."]
    continue_streams: bool = "true", since "0.1.0";
    #[doc = " Key that clients must send, as `Authorization: Bearer` or `x-api-key`; may be given several times. Its holder may call every route. `sha256:HEX` gives its hash instead."]
    api_key: Vec<Secret> = "", since "0.1.0" secret;
    #[doc = " Key whose holder may send requests, but reach none of the operators' routes; may be given several times, as a hash too."]
    user_api_key: Vec<Secret> = "", since "0.1.0" secret;
    #[doc = " File with one key a line, as `KEY` or `sha256:HEX`, after `user` or `admin` and a blank if it is not an admin's; empty lines and lines that begin with # are skipped. Read again when it changes."]
    api_key_file: Option<PathBuf> = "", since "0.1.0";
    #[doc = " Key of an administrator: the only one that may ask for the text of cached prompts (`GET /cache/tree`). Where clients need a key, it serves as one too."]
    admin_api_key: Option<Secret> = "", since "0.1.0" secret;
    #[doc = " Serve on an address other than loopback without keys."]
    insecure: bool = "false", since "0.1.0";
    #[doc = " PEM files of authorities that `https://` and `grpcs://` workers are trusted by, instead of the system's; read again when they change."]
    ca_cert_path: Vec<PathBuf> = "", since "0.1.0";
    #[doc = " PEM file with the certificate chain that is shown to workers over TLS."]
    client_cert_path: Option<PathBuf> = "", since "0.1.0";
    #[doc = " PEM file with that certificate's key."]
    client_key_path: Option<PathBuf> = "", since "0.1.0";
    #[doc = " Token sent to workers, as `Authorization: Bearer`."]
    worker_token: Option<Secret> = "", since "0.1.0" secret;
    #[doc = " Key that signs lease ids; gateways with the same one accept each other's. Without it one is drawn at each start, and ids are good at that gateway until it stops."]
    lease_key: Option<Secret> = "", since "0.1.0" secret;
    #[doc = " Largest request body."]
    max_payload_size: Size = "64MiB", since "0.1.0";
    #[doc = " Requests for models that run at once, each until the last byte of its answer; 0 for no limit."]
    max_concurrent_requests: usize = "0", since "0.1.0";
    #[doc = " Requests over that limit that wait for a place; further ones are answered 429 at once."]
    queue_size: usize = "100", since "0.1.0";
    #[doc = " Longest wait for a place; then 429."]
    queue_timeout: Duration = "60s", since "0.1.0";
    #[doc = " File of tenants (TOML or JSON): weights, requests and tokens a minute, also by model, most urgent class, and the default of all others; see docs/security.md."]
    tenant_file: Option<PathBuf> = "", since "0.1.0";
    #[doc = " Header that names a request's tenant instead of its key; only where a proxy before the router sets it."]
    tenant_header: Option<String> = "", since "0.1.0";
    #[doc = " Bytes of request bodies held at once; further requests are answered 429. `off` for no limit."]
    max_bytes_in_flight: Option<Size> = "1GiB", since "0.1.0";
    #[doc = " Connections served at once; more wait in the listen queue."]
    max_connections: usize = "16384", since "0.1.0";
    #[doc = " Address of the listener that serves nothing but /metrics, without keys."]
    prometheus_host: String = "127.0.0.1", since "0.1.0";
    #[doc = " Port of that listener; off without it. /metrics is with the operators' routes in any case."]
    prometheus_port: Option<u16> = "", since "0.1.0";
    #[doc = " OTLP collector that gets a span a request over HTTP, such as http://127.0.0.1:4318; off without it."]
    otlp_endpoint: Option<String> = "", since "0.1.0";
    #[doc = " Whether a page for chat and for operators is served at `/`; see docs/page.md."]
    page: bool = "true", since "0.1.0";
    #[doc = " Least level logged."]
    log_level: LogLevel = "info", since "0.1.0";
    #[doc = " Log one JSON object a line."]
    log_json: bool = "false", since "0.1.0";
    #[doc = " Silence after which a stream of our engines gets a comment line, so that proxies keep it; `off` for none."]
    keep_alive_interval: Option<Duration> = "15s", since "0.1.0";
    #[doc = " Longest life of a request, from its head to the last byte of the answer."]
    request_timeout: Option<Duration> = "30m", since "0.1.0";
    #[doc = " Longest wait for the first byte of a worker's answer."]
    first_token_timeout: Option<Duration> = "off", since "0.1.0";
    #[doc = " Longest silence of a worker within an answer that has begun."]
    idle_timeout: Option<Duration> = "10m", since "0.1.0";
    #[doc = " Longest wait for a request's head, and for the body to go on; after it a body must bring 1 KiB a second."]
    header_timeout: Duration = "30s", since "0.1.0";
    #[doc = " How long running requests may go on after a stop signal."]
    drain_timeout: Duration = "30s", since "0.1.0";
    #[doc = " Memory for the index of cached prefixes that `cache_aware` keeps of HTTP workers."]
    cache_index_size: Size = "64MiB", since "0.1.0";
    #[doc = " How long that index believes a prompt to be cached after its last use."]
    cache_index_ttl: Duration = "30m", since "0.1.0";
    #[doc = " Prompts of which a decode worker would have to compute no more tokens than this are not split between a prefill and a decode worker."]
    pd_bypass_tokens: usize = "256", since "0.1.0";
    #[doc = " Memory for the exact index of the blocks that engines report."]
    block_index_size: Size = "512MiB", since "0.1.0";
    #[doc = " How tool calls are found in text: `auto` by the model's chat template, `none`, or deepseek_r1, deepseek_v3, deepseek_v31, hermes, json, llama3_json, mistral, pythonic, qwen, or one that a plugin registered."]
    tool_call_parser: ToolParserChoice = "auto", since "0.1.0";
    #[doc = " How reasoning is told apart from the answer: `auto` by the model's chat template, `none`, or deepseek_r1, qwen3, or one that a plugin registered."]
    reasoning_parser: ReasoningParserChoice = "auto", since "0.1.0";
    #[doc = " Memory for stored responses of the Responses API; the oldest are forgotten first."]
    response_store_size: Size = "64MiB", since "0.1.0";
    #[doc = " Folder that WASM modules are kept in, so that they survive a restart; without it they are gone then."]
    wasm_dir: Option<PathBuf> = "", since "0.1.0";
    #[doc = " Folders whose files `POST /wasm` may name by path; none without it."]
    wasm_upload_dirs: Vec<String> = "", since "0.1.0";
    #[doc = " Folders of which WASM modules may be granted some by `grants.folders`; none without it."]
    wasm_grant_dirs: Vec<String> = "", since "0.1.0";
    #[doc = " Addresses that WASM modules may be granted by `grants.network`, as `10.0.0.0/8:6379` or `[fd00::/8]:*`; none without it."]
    wasm_grant_network: Vec<Peers> = "", since "0.1.0";
    #[doc = " Ed25519 public keys in base64: with some, only WASM modules that one of them has signed are loaded."]
    wasm_trusted_keys: Vec<TrustedKey> = "", since "0.1.0";
    #[doc = " Largest body that WASM modules read; larger ones are refused if a module asks for the body."]
    wasm_body_limit: Size = "10MiB", since "0.1.0";
    #[doc = " Longest compilation of a WASM module."]
    wasm_compile_timeout: Duration = "2m", since "0.1.0";
    #[doc = " Threads that serve; 0 takes one a CPU."]
    runtime_threads: usize = "0", since "0.1.0";
}
