"""The engine's Prometheus metrics: names, help and meaning stand here; `--metrics-port` serves them.

Histograms are fed by the loop's news, everything else is read from the loop's picture when asked for. The names
follow the field's usual meanings; no label takes a value from a client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from branchline.engine.errors import LoadError
from branchline.engine.hooks import Placed
from branchline.engine.scheduler.load import LoopStats
from branchline.engine.types import Delta, Request

PREFIX = "branchline_engine_"
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass(frozen=True, slots=True)
class Row:
    """One series: name without prefix and without `_total`, kind, help, and how it is read if it is."""

    name: str
    kind: str
    help: str
    read: Callable[[LoopStats], float] | None = None


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


TABLE: tuple[Row, ...] = (
    Row("time_to_first_token_seconds", "histogram", "From a request's arrival to its first token, queueing included."),
    Row("inter_token_latency_seconds", "histogram", "Between successive tokens of one sequence."),
    Row("queue_time_seconds", "histogram", "From a request's arrival to its first scheduling."),
    Row("prefill_time_seconds", "histogram", "From the first scheduling to the first token."),
    Row("decode_time_seconds", "histogram", "From the first token to the end of the sequence."),
    Row("e2e_request_latency_seconds", "histogram", "From a request's arrival to the end of a sequence of it."),
    Row("sequences_finished", "counter", "Sequences that ended, by reason: stop, length, abort, error."),
    Row("generation_tokens", "counter", "Tokens generated."),
    Row("prompt_tokens", "counter", "Prompt tokens of scheduled requests.", lambda s: s.prompt_tokens),
    Row("cached_tokens", "counter", "Those of them that the prefix cache had.", lambda s: s.cached_tokens),
    Row("num_requests_running", "gauge", "Sequences in the running batch.", lambda s: s.running),
    Row("num_requests_waiting", "gauge", "Sequences that wait.", lambda s: s.waiting),
    Row("queue_age_seconds", "gauge", "Wait of the oldest waiting sequence.", lambda s: s.queue_age_ms / 1e3),
    Row(
        "kv_cache_usage_ratio", "gauge", "Share of KV pages that requests hold.",
        lambda s: _ratio(s.pages_protected + s.pages_private, s.pages_total),
    ),
    Row(
        "kv_cache_resident_ratio", "gauge", "Share of KV pages with content, those only cached included.",
        lambda s: _ratio(s.pages_total - s.pages_free, s.pages_total),
    ),
    Row("kv_cache_pages", "gauge", "KV pages of the pool.", lambda s: s.pages_total),
    Row(
        "prefix_cache_hit_ratio", "gauge", "Share of all prompt tokens so far that the prefix cache had.",
        lambda s: _ratio(s.cached_tokens, s.prompt_tokens),
    ),
    Row("prefix_cache_queries", "counter", "Requests looked up in the prefix cache.", lambda s: s.lookups),
    Row("prefix_cache_hits", "counter", "Those that found at least one page.", lambda s: s.hits),
    Row("evicted_pages", "counter", "KV pages evicted.", lambda s: s.evicted_pages),
    Row("host_cache_pages", "gauge", "KV pages that the host tier has room for.", lambda s: s.host_pages_total),
    Row("host_cache_pages_used", "gauge", "KV pages that lie there.", lambda s: s.host_pages_used),
    Row("host_stored_pages", "counter", "KV pages copied to the host.", lambda s: s.host_stored_pages),
    Row("host_fetched_pages", "counter", "KV pages brought back from it.", lambda s: s.host_fetched_pages),
    Row("retractions", "counter", "Running sequences put back for lack of pages.", lambda s: s.retractions),
    Row("steps", "counter", "Steps of the model.", lambda s: s.steps),
    Row(
        "scheduler_seconds", "gauge", "The loop's own time a step, mean of the latest.",
        lambda s: s.scheduler_ms_per_step / 1e3,
    ),
    Row("step_age_seconds", "gauge", "Since the last step, while work exists.", lambda s: s.step_age_ms / 1e3),
    Row("spec_decode_draft_tokens", "counter", "Guessed tokens that were checked.", lambda s: s.drafted_tokens),
    Row("spec_decode_accepted_tokens", "counter", "Guessed tokens that were right.", lambda s: s.accepted_tokens),
    Row(
        "spec_decode_acceptance_ratio", "gauge", "Share of checked guesses that were right.",
        lambda s: _ratio(s.accepted_tokens, s.drafted_tokens),
    ),
    Row(
        "spec_decode_mean_accepted_length", "gauge", "Tokens a sequence gained in a step that checked guesses, its own "
        "included.",
        lambda s: 1 + _ratio(s.accepted_tokens, s.draft_steps) if s.draft_steps else 0.0,
    ),
    Row("hook_calls", "counter", "Calls of a plugin's hook, by hook and point."),
    Row("hook_seconds", "counter", "Time in it, without what it called, by hook and point."),
    Row("hook_failures", "counter", "Calls of it that raised, by hook and point."),
)  # fmt: skip
_HELP = {row.name: row.help for row in TABLE}


class Metrics:
    """The registry of one engine and what feeds it. `news` is the loop's watcher; `stats` gives its picture."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.stats: Callable[[], LoopStats] = LoopStats
        self.hooks: Sequence[Placed] = ()
        self._first = self._histogram("time_to_first_token_seconds", LONG)
        self._gap = self._histogram("inter_token_latency_seconds", SHORT)
        self._queue = self._histogram("queue_time_seconds", LONG)
        self._prefill = self._histogram("prefill_time_seconds", LONG)
        self._decode = self._histogram("decode_time_seconds", LONG)
        self._whole = self._histogram("e2e_request_latency_seconds", LONG)
        self._tokens = Counter(PREFIX + "generation_tokens", _HELP["generation_tokens"], registry=self.registry)
        self._ended = Counter(
            PREFIX + "sequences_finished", _HELP["sequences_finished"], ["reason"], registry=self.registry
        )
        self._latest: dict[tuple[str, int], float] = {}
        self.registry.register(_Picture(self))

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, _HELP[name], registry=self.registry, buckets=buckets)

    def news(self, request: Request, delta: Delta, now: float) -> None:
        """Count one piece of news. Several tokens of one step came after one gap and then at once."""
        key = (request.request_id, delta.index)
        if delta.error is not None:
            self._ended.labels("error").inc()
            for index in range(request.sampling.n):
                self._latest.pop((request.request_id, index), None)
            return
        count = len(delta.token_ids)
        if count:
            self._tokens.inc(count)
            before = self._latest.get(key)
            if before is not None:
                self._gap.observe(now - before)
            for _ in range(count - 1):
                self._gap.observe(0.0)
            self._latest[key] = now
        if delta.finish is not None:
            self._end(request, delta, now)

    def _end(self, request: Request, delta: Delta, now: float) -> None:
        finish = delta.finish
        assert finish is not None, "called for an end"
        self._latest.pop((request.request_id, delta.index), None)
        self._ended.labels(str(finish.reason)).inc()
        self._queue.observe(finish.queue_ms / 1e3)
        self._whole.observe(max(now - request.arrival_s, 0.0))
        if finish.completion_tokens:
            self._first.observe((finish.queue_ms + finish.prefill_ms) / 1e3)
            self._prefill.observe(finish.prefill_ms / 1e3)
            self._decode.observe(finish.decode_ms / 1e3)

    def request_seconds(self, seconds: float) -> None:
        """Count a request that has no tokens of its own: one of a worker that embeds or ranks."""
        self._whole.observe(seconds)
        self._ended.labels("stop").inc()

    def serve(self, host: str, port: int) -> MetricsServer:
        """Answer `GET /metrics`. Raises LoadError if the port is taken."""
        try:
            server, thread = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise LoadError(
                f"can't listen on metrics-port {port} of {host}: {error.strerror}: free it or choose another",
                field="metrics_port",
            ) from None
        return MetricsServer(server, thread)


class MetricsServer:
    """The open port; `port` is the real one."""

    def __init__(self, server: Any, thread: Thread) -> None:
        self._server = server
        self._thread = thread
        self.port = int(server.server_port)

    def close(self) -> None:
        """Close the port. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Picture:
    """Collector of what the loop's picture says."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """One family a row."""
        stats = self._metrics.stats()
        for row in TABLE:
            if row.read is None:
                continue
            family = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
            yield family(PREFIX + row.name, row.help, value=row.read(stats))
        yield from _hooks(self._metrics.hooks)


def _hooks(placed: Sequence[Placed]) -> Iterator[Metric]:
    """What hooks have cost; nothing without any."""
    for name in ("calls", "seconds", "failures") if placed else ():
        series = f"hook_{name}"
        family = CounterMetricFamily(PREFIX + series, _HELP[series], labels=["hook", "point"])
        for one in placed:
            family.add_metric([one.name, one.point.name], getattr(one.cost, name))
        yield family


def markdown() -> str:
    """The reference page of the table."""
    lines = ["# Engine metrics", "", "Generated from the table in `engine/service/metrics.py`; do not edit.", ""]
    lines += ["`--metrics-port` serves them at `GET /metrics` on the engine's host, in Prometheus text form.", ""]
    lines += ["| name | kind | meaning |", "|---|---|---|"]
    for row in TABLE:
        suffix = "_total" if row.kind == "counter" else ""
        lines.append(f"| `{PREFIX}{row.name}{suffix}` | {row.kind} | {row.help} |")
    return "\n".join(lines) + "\n"
