"""Metrics and spans of real requests: over the port that is served, and to a collector that listens."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

import pytest
from branchline.engine.errors import LoadError
from branchline.engine.loop_parts import Watcher
from branchline.engine.service import tracing
from branchline.engine.service.metrics import TABLE, Metrics
from branchline.engine.types import Request, SamplingParams
from collector import Collector, collecting
from harness import Engine

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def served(engine: Engine, metrics: Metrics) -> dict[str, float]:
    metrics.stats = engine.loop.stats
    server = metrics.serve("127.0.0.1", 0)
    try:
        return scrape(server.port)
    finally:
        server.close()


def test_every_series_is_served_and_counts_what_ran() -> None:
    metrics, engine = Metrics(), Engine()
    engine.loop._watcher = Watcher(metrics.news)
    for number in range(3):
        engine.run(f"r{number}", list(range(20)), max_tokens=6, ignore_eos=True)
    found = served(engine, metrics)
    for row in TABLE:
        if row.name.startswith("hook_"):  # told once a hook is registered
            continue
        name = f"branchline_engine_{row.name}"
        assert any(key.startswith(name) for key in found), row.name
    value = {key.removeprefix("branchline_engine_"): number for key, number in found.items()}
    assert value["generation_tokens_total"] == 18
    assert value["prompt_tokens_total"] == 60 and value["cached_tokens_total"] > 0
    assert value["time_to_first_token_seconds_count"] == 3
    assert value["inter_token_latency_seconds_count"] == 15
    assert value['sequences_finished_total{reason="length"}'] == 3
    assert value["num_requests_running"] == 0 and value["steps_total"] > 0


def test_a_taken_port_is_told() -> None:
    first = Metrics().serve("127.0.0.1", 0)
    try:
        with pytest.raises(LoadError, match=f"metrics-port {first.port}"):
            Metrics().serve("127.0.0.1", first.port)
    finally:
        first.close()


def test_a_watcher_that_raises_costs_no_request(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()

    def watch(*_: object) -> None:
        raise ZeroDivisionError

    engine.loop._watcher = Watcher(watch)
    assert engine.run("r", [1, 2, 3], max_tokens=4, ignore_eos=True).finish is not None
    assert "they are off from here on" in caplog.text


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


def test_a_request_becomes_spans_under_the_callers_own(collector: Collector) -> None:
    engine = Engine()
    spans = tracing.start(collector.url, "tiny")
    engine.loop._watcher = Watcher(spans.news)
    sampling = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    engine.loop.submit(Request("r", (1, 2, 3), sampling, traceparent=PARENT), engine.take)
    engine.finish()
    spans.close()
    found = {span.name: span for span in collector.spans}
    assert set(found) == {"generate", "queue", "prefill", "decode", "detokenise"}
    root = found["generate"]
    assert root.trace_id.hex() == PARENT.split("-")[1] and root.parent_span_id.hex() == PARENT.split("-")[2]
    for name in ("queue", "prefill", "decode", "detokenise"):
        span = found[name]
        assert span.parent_span_id == root.span_id
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
    attributes = {one.key: one.value for one in root.attributes}
    assert attributes["gen_ai.usage.output_tokens"].int_value == 5


def test_without_the_packages_the_option_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(LoadError, match=r"pip install 'branchline\[otel\]'"):
        tracing.start("http://127.0.0.1:1", "m")
