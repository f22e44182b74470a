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
    ROUND_ROBIN = "round_robin"
    POWER_OF_TWO = "power_of_two"
    RANDOM = "random"


class RouterOptions(TypedDict, total=False):
    """Keyword arguments of `Router`; each is optional."""

    host: str
    """Address to listen on. Any other than a loopback address needs `--api-key`, `--api-key-file` or `--insecure`. Default: 127.0.0.1."""
    port: int
    """Port to listen on; 0 takes any free port. Default: 30000."""
    worker_urls: Sequence[str]
    """Workers: `grpc://host:port` for Branchline engines, `http://host:port` for any OpenAI-compatible server."""
    policy: PolicyType | str
    """How a worker is chosen. Default: cache_aware."""
    api_key: Sequence[str]
    """Key that clients must send, as `Authorization: Bearer` or `x-api-key`; may be given several times."""
    api_key_file: str
    """File with one key a line; empty lines and lines that begin with # are skipped."""
    insecure: bool
    """Serve on an address other than loopback without keys. Default: false."""
    worker_token: str
    """Token sent to workers, as `Authorization: Bearer`."""
    lease_key: str
    """Key that signs lease ids; gateways with the same one accept each other's. Without it one is drawn at each start, and ids are good at that gateway until it stops."""
    max_payload_size: int | str
    """Largest request body. Default: 64MiB."""
    max_connections: int
    """Connections served at once; more wait in the listen queue. Default: 16384."""
    prometheus_host: str
    """Address of the listener that serves nothing but /metrics, without keys. Default: 127.0.0.1."""
    prometheus_port: int
    """Port of that listener; off without it. /metrics is on the main port in any case."""
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
    """Longest wait for a request's head, and for the body to go on. Default: 30s."""
    drain_timeout: float | str
    """How long running requests may go on after a stop signal. Default: 30s."""
    cache_index_size: int | str
    """Memory for the index of cached prefixes that `cache_aware` keeps of HTTP workers. Default: 64MiB."""
    runtime_threads: int
    """Threads that serve; 0 takes one a CPU. Default: 0."""
