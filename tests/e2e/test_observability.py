"""What operators see through the gateway: timings in answers, spans of gateway and engine, the workers' metrics."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from collector import Collector, collecting

from .conftest import Starter
from .stack import BIN, Stack, collect, metric, wait_until
from .test_cases_logprobs_cache import ids_of

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
GUESSING = ("--speculative-algorithm", "ngram")
LIMITS = {"max_new_tokens": 12, "ignore_eos": True}


def model_of(stack: Stack) -> str:
    return str(stack.client.get("/v1/models").json()["data"][0]["id"])


def times_of(usage: dict[str, Any]) -> list[float]:
    return [usage[name] for name in ("queue_time", "prompt_time", "completion_time", "detokenize_time")]


def test_every_answer_says_where_its_time_went(stack: Stack) -> None:
    meta = stack.generate(ids_of(71, 60), sampling_params=LIMITS)["meta_info"]
    parts = [meta[name] for name in ("queue_time", "prefill_time", "decode_time")]
    assert all(part >= 0 for part in parts) and meta["prefill_time"] > 0 and meta["decode_time"] > 0
    assert sum(parts) <= meta["e2e_latency"]
    assert 0 < meta["detokenize_time"] <= sum(parts)
    assert "spec_draft_token_num" not in meta, "nothing was guessed"
    body = {"model": model_of(stack), "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "n": 2}
    usage = stack.post("/v1/chat/completions", body).json()["usage"]
    assert usage["prompt_time"] > 0 and usage["total_time"] == pytest.approx(sum(times_of(usage)[:3]))


def test_a_stream_tells_its_times_with_its_end_and_not_before(stack: Stack) -> None:
    body = {"model": model_of(stack), "prompt": ids_of(72, 40), "max_tokens": 5}
    options = {"include_usage": True, "continuous_usage_stats": True}
    with stack.stream("/v1/completions", {**body, "stream_options": options}) as data:
        pieces = collect(data)
    assert "queue_time" not in pieces[0]["usage"]
    assert pieces[-1]["choices"] == [] and all(part >= 0 for part in times_of(pieces[-1]["usage"]))
    with stack.stream("/generate", {"input_ids": ids_of(72, 40), "sampling_params": LIMITS}) as data:
        pieces = collect(data)
    assert "queue_time" not in pieces[0]["meta_info"] and pieces[-1]["meta_info"]["decode_time"] > 0


def test_guesses_are_told_in_both_forms(stacks: Starter) -> None:
    stack = stacks(*GUESSING)
    prompt = ids_of(73, 30) * 4
    params = {"max_new_tokens": 48, "ignore_eos": True}
    for _ in range(2):
        meta = stack.generate(prompt, sampling_params=params)["meta_info"]
    assert meta["spec_accept_token_num"] <= meta["spec_draft_token_num"]
    assert meta["spec_accept_rate"] == meta["spec_accept_token_num"] / meta["spec_draft_token_num"] > 0
    body = {"model": model_of(stack), "prompt": prompt, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    details = stack.post("/v1/completions", body).json()["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0 <= details["rejected_prediction_tokens"]


def worker_label(stack: Stack) -> str:
    return f"grpc://{stack.engines[0].address}"


def test_the_gateways_metrics_show_each_worker(stacks: Starter) -> None:
    stack = stacks(*GUESSING)
    label = worker_label(stack)

    def value(name: str, **labels: str) -> float:
        found = metric(stack.client, f"branchline_worker_{name}", **{"worker": label, **labels})
        assert found is not None
        return found

    before = value("prompt_tokens_total")
    with stack.stream("/generate", {"input_ids": ids_of(74, 64), "sampling_params": {"max_new_tokens": 400}}) as data:
        next(data)
        assert value("requests_running") == 1 and value("requests_waiting") == 0
        assert 0 < value("kv_usage_ratio") <= 1
    wait_until(lambda: value("requests_running") == 0, 10, "the abandoned request has left")
    for _ in range(2):
        stack.generate(ids_of(75, 30) * 4, sampling_params={"max_new_tokens": 48, "ignore_eos": True})
    assert value("prompt_tokens_total") - before == 64 + 2 * 120
    assert value("cached_tokens_total") > 0 and 0 < value("cache_hit_ratio") < 1
    assert value("evicted_pages_total") >= 0 and value("retractions_total") == 0
    assert 0 < value("accepted_draft_tokens_total") <= value("draft_tokens_total")
    assert 0 < value("draft_acceptance_ratio") <= 1
    for part in ("queue", "prefill", "decode", "detokenize"):
        count = metric(stack.client, "branchline_router_worker_part_seconds_count", part=part)
        assert count is not None and count >= 2, part


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


def test_a_request_is_one_trace_from_client_to_engine(collector: Collector) -> None:
    stack = Stack("--otlp-endpoint", collector.url, gateway_flags=("--otlp-endpoint", collector.url))
    try:
        body = {"input_ids": ids_of(76, 40), "sampling_params": LIMITS}
        answer = stack.client.post("/generate", json=body, headers={"traceparent": PARENT})
        assert answer.status_code == 200
        refused = stack.client.post("/generate", json={"text": 7}, headers={"traceparent": PARENT})
        assert refused.status_code == 400
    finally:
        stack.close()  # both send what they have
    trace = bytes.fromhex(PARENT.split("-")[1])
    assert {span.trace_id for span in collector.spans} == {trace}
    gateway = [span for span in collector.spans if span.name == "POST /generate"]
    assert [span.parent_span_id.hex() for span in gateway] == [PARENT.split("-")[2]] * 2
    statuses = {item.value.int_value: span for span in gateway for item in span.attributes if "status" in item.key}
    assert set(statuses) == {200, 400}
    good = statuses[200]
    assert collector.services[good.span_id] == "branchline-router"
    assert [event.name for event in good.events] == ["first_token"]
    (root,) = [span for span in collector.spans if span.name == "generate"]
    assert root.parent_span_id == good.span_id and collector.services[root.span_id] != "branchline-router"
    under = {span.name for span in collector.spans if span.parent_span_id == root.span_id}
    assert under == {"queue", "prefill", "decode", "detokenise"}
    assert good.start_time_unix_nano <= root.start_time_unix_nano <= good.end_time_unix_nano


def test_a_collector_that_is_away_or_misspelt_costs_no_request() -> None:
    stack = Stack(gateway_flags=("--otlp-endpoint", "http://127.0.0.1:9"))
    try:
        assert stack.generate(ids_of(77, 10), sampling_params=LIMITS)["meta_info"]["completion_tokens"] == 12
    finally:
        stack.close()
    command = [str(BIN / "branchline-router"), "--otlp-endpoint", "collector:4318"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and "'collector:4318' is no http:// URL" in done.stderr
