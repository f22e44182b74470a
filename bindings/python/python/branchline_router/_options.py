"""Options of the router as types, generated from its option table.

Made by `branchline-router --print-reference python`; do not edit.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TypedDict


class PolicyType(str, Enum):
    """How a worker is chosen."""

    CACHE_AWARE = "cache_aware"
    LEAST_LOAD = "least_load"
    ROUND_ROBIN = "round_robin"
    POWER_OF_TWO = "power_of_two"
    RANDOM = "random"
    CONSISTENT_HASHING = "consistent_hashing"
    PREFIX_HASH = "prefix_hash"
    STICKY = "sticky"


class RouterOptions(TypedDict, total=False):
    """Keyword arguments of `Router`; each is optional."""

    host: str
    """Address to listen on. Any other than a loopback address needs `--api-key`, `--api-key-file` or `--insecure`. Default: 127.0.0.1."""
    port: int
    """Port to listen on; 0 takes any free port. Default: 30000."""
    admin_port: int
    """Port of a listener of its own for operators' routes, which then are on no other; off without it. 0 takes any free port."""
    admin_host: str
    """Address of that listener. Any other than a loopback address needs an admin's key or `--insecure`. Default: 127.0.0.1."""
    tls_cert_path: str
    """PEM file with the certificate chain to serve over TLS with; off without it. Read again when it changes."""
    tls_key_path: str
    """PEM file with that certificate's key."""
    tls_client_ca_path: str
    """PEM file of authorities, one of which must have signed the certificate that every client then has to show."""
    worker_urls: Sequence[str]
    """Workers: `grpc://host:port` for Branchline engines, `http://host:port` for any OpenAI-compatible server; `grpcs://` and `https://` over TLS."""
    policy: PolicyType | str
    """How a worker is chosen. Default: cache_aware."""
    model_policy: Sequence[str]
    """How a worker is chosen for one model, as `MODEL=POLICY`; may be given several times."""
    model_alias: Sequence[str]
    """A further name of a model, as `ALIAS=MODEL`; may be given several times."""
    session_headers: str
    """Headers, with commas between them, that name a request's session for `sticky` and `consistent_hashing`, the first that is there counts; without any, `session_params.session_id`, `session_id`, `user` or `user_id` of the body does. Default: x-branchline-session,x-smg-routing-key,x-session-id,x-user-id,x-tenant-id."""
    worker_file: str
    """File of workers: one URL a line, or JSON objects as for `POST /workers`; read again when it changes."""
    worker_dns: Sequence[str]
    """Names whose addresses are workers, as `dns://name:port` or `grpc+dns://name:port`, or whose SRV records list them, as `srv://name` or `grpc+srv://name`; asked again every `worker-refresh`."""
    worker_dns_server: str
    """Name server that is asked for them, as `address` or `address:port`, instead of the system's."""
    worker_refresh: float | str
    """How often `worker-file` and `worker-dns` are looked at again. Default: 5s."""
    service_discovery: bool
    """Whether workers are looked for in Kubernetes: pods by `selector`, `prefill-selector`, `decode-selector`, or endpoints of `service-discovery-service`. The API server is found by `KUBECONFIG`, `~/.kube/config` or the pod's service account. Default: false."""
    selector: Sequence[str]
    """Labels of pods that are workers, as `key=value` pairs that all must hold."""
    prefill_selector: Sequence[str]
    """Labels of pods that are prefill workers; a pod that this and `decode-selector` match is both."""
    decode_selector: Sequence[str]
    """Labels of pods that are decode workers."""
    service_discovery_service: Sequence[str]
    """Services whose endpoints are workers, by their EndpointSlices."""
    service_discovery_port: int
    """Port of discovered workers; the annotation `branchline.dev/worker-ports` (or `smg.ai/worker-ports`) of a pod gives one or more others. Default: 80."""
    service_discovery_namespace: str
    """Namespaces to look in, with commas between them; without any the whole cluster, which needs a ClusterRole."""
    service_discovery_protocol: str
    """What discovered workers speak; `auto` asks each. The annotation `branchline.dev/protocol` of a pod wins. Default: auto."""
    service_discovery_stale_after: float | str
    """How long nothing may be heard of the API server before all is listed anew. Default: 45s."""
    model_id_from: str
    """Where the model id of a discovered worker comes from: `namespace`, `label:KEY` or `annotation:KEY`; without it, or where it is not there, the worker says itself what it serves."""
    bootstrap_port_annotation: str
    """Annotation with the port of a prefill pod's bootstrap server; `branchline.dev/bootstrap-port` wins over it. Default: sglang.ai/bootstrap-port."""
    state_file: str
    """File in which workers that were added or removed over HTTP survive a restart."""
    max_retries: int
    """Further workers that a request may be tried on before the first byte of its answer. Default: 3."""
    retry_budget: int
    """Retries that each request earns: 0.2 allows one retry for five requests. Default: 0.2."""
    breaker_failures: int
    """Failures in a row that open a worker's breaker; 0 switches breakers off. Default: 5."""
    breaker_share: int
    """Share of failures among the last 20 requests that opens it. Default: 0.5."""
    breaker_open: float | str
    """How long it stays open before one probe is let in. Default: 10s."""
    breaker_successes: int
    """Probes in a row that must succeed to close it. Default: 2."""
    suspect_after: float | str
    """Silence, on top of twice the predicted wait for a first byte, after which a worker is suspected while others go on; `off` for never. Default: 500ms."""
    slow_start: float | str
    """How long a worker that has become ready gets less than its share. Default: 10s."""
    outlier_share: int
    """Share of failures that ejects a worker for 30s while its peers fail a quarter of that at most; 0 for never. Default: 0.25."""
    outlier_ceiling: int
    """Largest share of a model's workers that may be ejected at once. Default: 0.34."""
    worker_usage_limit: int
    """Share of its KV pool in use from which on an engine gets no new request; 1 for never. Default: 1."""
    connect_timeout: float | str
    """Longest wait for a connection to a worker. Default: 5s."""
    continue_streams: bool
    """Whether a stream of an engine that died goes on at another one that promises the same bits. Default: true."""
    api_key: Sequence[str]
    """Key that clients must send, as `Authorization: Bearer` or `x-api-key`; may be given several times. Its holder may call every route. `sha256:HEX` gives its hash instead."""
    user_api_key: Sequence[str]
    """Key whose holder may send requests, but reach none of the operators' routes; may be given several times, as a hash too."""
    api_key_file: str
    """File with one key a line, as `KEY` or `sha256:HEX`, after `user` or `admin` and a blank if it is not an admin's; empty lines and lines that begin with # are skipped. Read again when it changes."""
    admin_api_key: str
    """Key of an administrator: the only one that may ask for the text of cached prompts (`GET /cache/tree`). Where clients need a key, it serves as one too."""
    insecure: bool
    """Serve on an address other than loopback without keys. Default: false."""
    ca_cert_path: Sequence[str]
    """PEM files of authorities that `https://` and `grpcs://` workers are trusted by, instead of the system's; read again when they change."""
    client_cert_path: str
    """PEM file with the certificate chain that is shown to workers over TLS."""
    client_key_path: str
    """PEM file with that certificate's key."""
    worker_token: str
    """Token sent to workers, as `Authorization: Bearer`."""
    lease_key: str
    """Key that signs lease ids; gateways with the same one accept each other's. Without it one is drawn at each start, and ids are good at that gateway until it stops."""
    max_payload_size: int | str
    """Largest request body. Default: 64MiB."""
    max_concurrent_requests: int
    """Requests for models that run at once, each until the last byte of its answer; 0 for no limit. Default: 0."""
    queue_size: int
    """Requests over that limit that wait for a place; further ones are answered 429 at once. Default: 100."""
    queue_timeout: float | str
    """Longest wait for a place; then 429. Default: 60s."""
    tenant_file: str
    """File of tenants (TOML or JSON): weights, requests and tokens a minute, also by model, most urgent class, and the default of all others; see docs/security.md."""
    tenant_header: str
    """Header that names a request's tenant instead of its key; only where a proxy before the router sets it."""
    max_bytes_in_flight: int | str
    """Bytes of request bodies held at once; further requests are answered 429. `off` for no limit. Default: 1GiB."""
    max_connections: int
    """Connections served at once; more wait in the listen queue. Default: 16384."""
    prometheus_host: str
    """Address of the listener that serves nothing but /metrics, without keys. Default: 127.0.0.1."""
    prometheus_port: int
    """Port of that listener; off without it. /metrics is with the operators' routes in any case."""
    otlp_endpoint: str
    """OTLP collector that gets a span a request over HTTP, such as http://127.0.0.1:4318; off without it."""
    page: bool
    """Whether a page for chat and for operators is served at `/`; see docs/page.md. Default: true."""
    log_level: str
    """Least level logged. Default: info."""
    log_json: bool
    """Log one JSON object a line. Default: false."""
    keep_alive_interval: float | str
    """Silence after which a stream of our engines gets a comment line, so that proxies keep it; `off` for none. Default: 15s."""
    request_timeout: float | str
    """Longest life of a request, from its head to the last byte of the answer. Default: 30m."""
    first_token_timeout: float | str
    """Longest wait for the first byte of a worker's answer. Default: off."""
    idle_timeout: float | str
    """Longest silence of a worker within an answer that has begun. Default: 10m."""
    header_timeout: float | str
    """Longest wait for a request's head, and for the body to go on; after it a body must bring 1 KiB a second. Default: 30s."""
    drain_timeout: float | str
    """How long running requests may go on after a stop signal. Default: 30s."""
    cache_index_size: int | str
    """Memory for the index of cached prefixes that `cache_aware` keeps of HTTP workers. Default: 64MiB."""
    cache_index_ttl: float | str
    """How long that index believes a prompt to be cached after its last use. Default: 30m."""
    pd_bypass_tokens: int
    """Prompts of which a decode worker would have to compute no more tokens than this are not split between a prefill and a decode worker. Default: 256."""
    block_index_size: int | str
    """Memory for the exact index of the blocks that engines report. Default: 512MiB."""
    tool_call_parser: str
    """How tool calls are found in text: `auto` by the model's chat template, `none`, or deepseek_r1, deepseek_v3, deepseek_v31, hermes, json, llama3_json, mistral, pythonic, qwen, or one that a plugin registered. Default: auto."""
    reasoning_parser: str
    """How reasoning is told apart from the answer: `auto` by the model's chat template, `none`, or deepseek_r1, qwen3, or one that a plugin registered. Default: auto."""
    response_store_size: int | str
    """Memory for stored responses of the Responses API; the oldest are forgotten first. Default: 64MiB."""
    wasm_dir: str
    """Folder that WASM modules are kept in, so that they survive a restart; without it they are gone then."""
    wasm_upload_dirs: Sequence[str]
    """Folders whose files `POST /wasm` may name by path; none without it."""
    wasm_grant_dirs: Sequence[str]
    """Folders of which WASM modules may be granted some by `grants.folders`; none without it."""
    wasm_grant_network: Sequence[str]
    """Addresses that WASM modules may be granted by `grants.network`, as `10.0.0.0/8:6379` or `[fd00::/8]:*`; none without it."""
    wasm_trusted_keys: Sequence[str]
    """Ed25519 public keys in base64: with some, only WASM modules that one of them has signed are loaded."""
    wasm_body_limit: int | str
    """Largest body that WASM modules read; larger ones are refused if a module asks for the body. Default: 10MiB."""
    wasm_compile_timeout: float | str
    """Longest compilation of a WASM module. Default: 2m."""
    runtime_threads: int
    """Threads that serve; 0 takes one a CPU. Default: 0."""
