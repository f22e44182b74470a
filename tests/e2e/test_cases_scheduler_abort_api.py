"""The e2e cases of areas scheduler, abort and api, on the real model through the gateway."""

from __future__ import annotations

import json
import statistics
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.cases.loader import case

from .conftest import Starter
from .stack import Stack, collect, wait_until
from .test_cases_logprobs_cache import ids_of

pytestmark = pytest.mark.model


def test_sched_last_request_does_not_fit(stacks: Starter) -> None:
    given = case("sched-last-request-does-not-fit")
    flags = given["given"]["flags"]
    stack = stacks("--max-total-tokens", str(flags["max_total_tokens"]), "--page-size", str(flags["page_size"]))
    params = given["given"]["request"]["sampling_params"]
    start = time.monotonic()
    info = stack.generate(ids_of(5, 32), sampling_params=params)["meta_info"]
    assert time.monotonic() - start < given["right"]["first_within_s"]
    assert info["finish_reason"]["type"] == "length"
    assert info["completion_tokens"] <= 33
    then = given["given"]["then"]
    assert stack.post("/generate", then).json()["meta_info"]["completion_tokens"] == 2
    stack.assert_idle()
    assert stack.cache()["pages_total"] == 64


def test_sched_prompt_longer_than_context(stack: Stack) -> None:
    given = case("sched-prompt-longer-than-context")
    limit = given["given"]["context_length"]

    def send(length: int, endpoint: str) -> Any:
        ids = [81] * length
        if endpoint == "/generate":
            return stack.post(
                endpoint, {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}, timeout=300
            )
        return stack.post(endpoint, {"model": "default", "prompt": ids, "max_tokens": 1})

    for length, endpoint in ((limit + 1, "/generate"), (limit + 1, "/v1/completions"), (limit, "/generate")):
        start = time.monotonic()
        answer = send(length, endpoint)
        assert time.monotonic() - start < given["right"]["refused_within_s"]
        assert answer.status_code == 400, answer.text
        message = answer.json()["error"]["message"]
        assert str(length) in message and str(limit) in message, message
    assert send(limit - 1, "/generate").status_code == 200
    assert stack.client.get("/health").status_code == given["right"]["health_after"]


def test_sched_batch_keeps_own_params(stack: Stack) -> None:
    given = case("sched-batch-keeps-own-params")
    body = given["given"]["body"]
    answers = stack.post("/generate", body).json()
    assert [answer["meta_info"]["completion_tokens"] for answer in answers] == given["right"]["completion_tokens"]
    short = {**body, "sampling_params": body["sampling_params"][:2]}
    assert stack.post("/generate", short).status_code == given["right"]["length_mismatch_status"]


def test_sched_reaches_the_running_limit(stacks: Starter) -> None:
    given = case("sched-reaches-the-running-limit")
    flags = given["given"]["flags"]
    stack = stacks(
        "--max-running-requests",
        str(flags["max_running_requests"]),
        "--prefill-chunk",
        str(flags["chunked_prefill_size"]),
    )
    params = {"max_new_tokens": 60, "ignore_eos": True}
    done: list[Future[dict[str, Any]]] = []
    seen: list[int] = []
    with ThreadPoolExecutor(12) as pool:
        done = [
            pool.submit(stack.generate, ids_of(300 + i, 40), sampling_params=params)
            for i in range(given["given"]["requests"])
        ]
        wait_until(lambda: stack.load()["running"] == flags["max_running_requests"], 30, "the running limit is reached")
        while sum(not future.done() for future in done) >= 8:
            seen.append(stack.load()["running"])
            time.sleep(0.05)
    assert all(future.result()["meta_info"]["completion_tokens"] == 60 for future in done)
    assert max(seen) == given["right"]["max_running_seen"]
    assert statistics.median(seen) == given["right"]["median_running"]


@pytest.mark.parametrize("streamed", [False, True])
def test_sched_max_new_tokens_one(stack: Stack, streamed: bool) -> None:
    given = case("sched-max-new-tokens-one")
    mix = given["given"]["mix"] * given["given"]["copies"]

    def run(params: dict[str, Any]) -> dict[str, Any]:
        body = {"text": "Once", "sampling_params": {"temperature": 0, **params}}
        if not streamed:
            plain: dict[str, Any] = stack.post("/generate", body).json()
            return plain
        with stack.stream("/generate", body) as data:
            return collect(data)[-1]

    with ThreadPoolExecutor(len(mix)) as pool:
        answers = [future.result(60) for future in [pool.submit(run, params) for params in mix]]
    right = given["right"]
    for index, answer in enumerate(answers):
        info = answer["meta_info"]
        assert info["completion_tokens"] == right["completion_tokens"][index % 3]
        assert info["finish_reason"]["type"] == right["finish_reason_type"][index % 3]


@pytest.mark.parametrize("endpoint", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_abort_on_stream_disconnect(stack: Stack, endpoint: str) -> None:
    given = case("abort-on-stream-disconnect")
    bodies: dict[str, dict[str, Any]] = {
        "/generate": given["given"]["body"],
        "/v1/completions": {"model": "default", "prompt": "Count", "max_tokens": 4000, "ignore_eos": True},
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": "Count"}],
            "max_tokens": 4000,
            "ignore_eos": True,
        },
    }
    with stack.stream(endpoint, bodies[endpoint]) as data:
        for _ in range(given["given"]["disconnect_after_events"]):
            next(data)
        steps = stack.client.get("/server_info").json()["workers"][0]["steps"]
    stack.assert_idle(given["right"]["running_requests_zero_within_ms"] / 1000)
    spent = stack.client.get("/server_info").json()["workers"][0]["steps"] - steps  # one token a step
    assert spent <= given["right"]["tokens_generated_after_close_at_most"]
    assert stack.generate("Hi", sampling_params={"max_new_tokens": 1})["meta_info"]["completion_tokens"] == 1


def test_abort_rid_is_exact(stack: Stack) -> None:
    given = case("abort-rid-is-exact")
    params = {"temperature": 0, **given["given"]["sampling_params"]}
    progress: dict[str, int] = {}
    last: dict[str, dict[str, Any]] = {}

    def run(rid: str) -> None:
        with stack.stream("/generate", {"text": "Tell me", "rid": rid, "sampling_params": params}) as data:
            for item in data:
                if item == "[DONE]":
                    return
                last[rid] = json.loads(item)
                progress[rid] = last[rid]["meta_info"]["completion_tokens"]

    threads = [threading.Thread(target=run, args=(rid,)) for rid in given["given"]["rids"]]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(progress.get(rid, 0) >= 5 for rid in given["given"]["rids"]), 60, "all three produce")
    for _ in range(2):
        assert stack.post("/abort_request", {"rid": "job-1"}).status_code == 200
    assert stack.post("/abort_request", {"rid": "no-such-request"}).status_code == 200
    for thread in threads:
        thread.join(60)
    assert last["job-1"]["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["job-1"]["meta_info"]["completion_tokens"] < 200
    for rid in ("job-12", "xjob-1"):
        assert last[rid]["meta_info"]["completion_tokens"] == 200
        assert last[rid]["meta_info"]["finish_reason"]["type"] == "length"


def test_abort_while_waiting(stacks: Starter) -> None:
    given = case("abort-while-waiting")
    stack = stacks("--max-running-requests", "1")
    stack.flush()
    prompt_tokens = stack.cache()["prompt_tokens"]
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(
            stack.generate, "First", rid="a", sampling_params={"max_new_tokens": 400, "ignore_eos": True}
        )
        wait_until(lambda: stack.load()["running"] == 1, 30, "a runs")
        only_a = stack.cache()["prompt_tokens"] - prompt_tokens
        waiting = pool.submit(stack.generate, "Second", rid="b", sampling_params={"max_new_tokens": 50})
        wait_until(lambda: stack.load()["waiting"] == 1, 30, "b waits")
        assert stack.post("/abort_request", {"rid": "b"}).status_code == 200
        answer = waiting.result(given["right"]["b"]["answered_within_ms"] / 1000)
        assert not running.done()
        assert running.result(120)["meta_info"]["completion_tokens"] == given["right"]["a"]["completion_tokens"]
    right = given["right"]["b"]
    assert answer["meta_info"]["finish_reason"]["type"] == right["finish_reason_type"]
    assert (answer["text"], answer["output_ids"]) == (right["text"], right["output_ids"])
    assert answer["meta_info"]["completion_tokens"] == right["completion_tokens"]
    assert stack.cache()["prompt_tokens"] - prompt_tokens == only_a


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions"])
def test_api_usage_chunk_is_opt_in(stack: Stack, endpoint: str) -> None:
    given = case("api-usage-chunk-is-opt-in")
    prompt: dict[str, Any] = (
        {"prompt": "Hi"}
        if endpoint.endswith("/completions") and "chat" not in endpoint
        else {"messages": [{"role": "user", "content": "Hi"}]}
    )
    for variant in given["given"]["variants"]:
        with stack.stream(endpoint, {"model": "default", "max_tokens": 3, **prompt, **variant}) as data:
            chunks = collect(data)
        if not variant.get("stream_options", {}).get("include_usage"):
            assert all(chunk["choices"] and chunk.get("usage") is None for chunk in chunks)
            continue
        assert [index for index, chunk in enumerate(chunks) if not chunk["choices"]] == [len(chunks) - 1]
        usage = chunks[-1]["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_api_stop_string_or_list(stack: Stack) -> None:
    """On the greedy text, through the gateway; with its regex in engine/tests/grammar/test_real_model.py."""
    given = case("api-stop-string-or-list")
    body = {"model": "default", "prompt": "One sentence. Another sentence.", "max_tokens": 64, "temperature": 0}
    free = stack.post("/v1/completions", body).json()["choices"][0]["text"]
    stop = next(ch for ch in (".", ",", " ") if ch in free)
    assert given["right"]["finish_reason"] == "stop"
    for form in (stop, [stop], [stop, " zzz"]):
        answer = stack.post("/v1/completions", {**body, "stop": form}).json()
        choice = answer["choices"][0]
        assert choice["text"] == free[: free.index(stop)]
        assert choice["finish_reason"] == "stop"
        assert choice["matched_stop"] == stop


def test_api_prompt_token_count(stack: Stack) -> None:
    given = case("api-prompt-token-count")
    for messages, count in zip(given["given"]["chats"], given["right"]["usage_prompt_tokens"], strict=True):
        usage = stack.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}).json()["usage"]
        assert usage["prompt_tokens"] == count
        ids = stack.post("/v1/tokenize", {"messages": messages}).json()["tokens"]
        assert len(ids) == count
        text = stack.post("/v1/detokenize", {"tokens": ids, "skip_special_tokens": False}).json()["text"]
        answer = stack.generate(text, sampling_params={"max_new_tokens": 1})
        assert answer["meta_info"]["prompt_tokens"] == count
        if messages[0]["role"] == "user":
            assert ids[:3] == given["right"]["first_ids"]
            assert ids.count(1) == given["right"]["count_of_id_1"]
