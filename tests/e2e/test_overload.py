"""Too much, too large, too long, and the end of the process: what clients are told through the gateway."""

from __future__ import annotations

import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import Starter
from .stack import Engine, Gateway, Stack, events, wait_until
from .test_cases_logprobs_cache import ids_of
from .tiny import TinyModels

PLUGIN = '''
from branchline import registry
from branchline.engine.cache.native import NativeCache

POISON = 777


@registry.radix_cache_backends.register("poisoned")
class PoisonedCache(NativeCache):
    """Fails for prompts that hold POISON."""

    def match(self, namespace, token_ids, limit):
        if POISON in token_ids:
            raise KeyError("the plugin lost its index")
        return super().match(namespace, token_ids, limit)
'''


def body_of(path: str, ids: list[int], new: int, **more: Any) -> dict[str, Any]:
    """A request of a family for a prompt of ids; chat takes words instead."""
    if path == "/generate":
        return {"input_ids": ids, "sampling_params": {"max_new_tokens": new, "ignore_eos": True}, **more}
    if path == "/v1/completions":
        return {"prompt": ids, "max_tokens": new, "ignore_eos": True, **more}
    text = " ".join("tide" for _ in ids)
    return {"messages": [{"role": "user", "content": text}], "max_tokens": new, "ignore_eos": True, **more}


PATHS = {"/generate": "input_ids", "/v1/completions": "prompt", "/v1/chat/completions": "messages"}


@pytest.fixture
def narrow(stacks: Starter, tiny: TinyModels) -> Stack:
    """One place, two in the queue, a pool of 640 tokens in a context of 2,048."""
    return stacks(
        "--max-running-requests", "1", "--max-queued-requests", "2", "--max-total-tokens", "640",
        model=str(tiny.llama("plain")),
    )  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_a_prompt_larger_than_the_pool_is_refused_by_the_clients_own_field(narrow: Stack, path: str) -> None:
    answer = narrow.post(path, body_of(path, ids_of(1, 700), 1))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == PATHS[path], error
    assert "640" in error["message"] and "KV pool" in error["message"]
    assert narrow.post(path, body_of(path, ids_of(1, 500), 1)).status_code == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_told_with_429_and_when_to_come_back(narrow: Stack, path: str, stream: bool) -> None:
    leave = threading.Event()

    def hold(number: int) -> None:
        with narrow.client.stream(
            "POST", "/generate", json=body_of("/generate", ids_of(number, 8), 500, stream=True)
        ) as kept:
            for _ in events(kept.iter_text()):
                if leave.is_set():
                    return

    with ThreadPoolExecutor(3) as pool:
        held = [pool.submit(hold, number) for number in range(3)]
        wait_until(lambda: narrow.load()["waiting"] == 2, 20, "the queue is full")
        refused = narrow.post(path, body_of(path, ids_of(9, 8), 4, stream=stream))
        leave.set()
        for future in held:
            future.result(60)
    assert refused.status_code == 429, refused.text
    assert int(refused.headers["retry-after"]) >= 1
    assert "max_queued_requests" in refused.json()["error"]["message"]
    narrow.assert_idle(20)


def test_a_batch_that_is_refused_in_part_leaves_the_queue_to_others(narrow: Stack) -> None:
    for turn in range(10):
        # Long enough that the engine can't have answered most of them before the last has come.
        params = {"max_new_tokens": 400, "ignore_eos": True}
        batch = {"input_ids": [ids_of(number, 8) for number in range(12)], "sampling_params": params}
        assert narrow.post("/generate", batch).status_code == 429
        wait_until(lambda: narrow.load()["waiting"] == 0, 5, "its siblings are gone")
        answer = narrow.post("/generate", body_of("/generate", ids_of(50 + turn, 8), 2))
        assert answer.status_code == 200, answer.text
    narrow.assert_idle(20)


def test_a_higher_priority_is_served_before_those_who_wait(stacks: Starter, tiny: TinyModels) -> None:
    stack = stacks("--max-running-requests", "1", model=str(tiny.llama("plain")))
    order: list[str] = []

    def run(name: str, priority: int, new: int, n: int = 1) -> None:
        params = {"max_new_tokens": new, "ignore_eos": True, "n": n}
        stack.generate(ids_of(len(name), 8), sampling_params=params, priority=priority)
        order.append(name)

    with ThreadPoolExecutor(4) as pool:
        # Four sequences one after the other, so that it still runs when the others come, however slow they are.
        first = pool.submit(run, "first", 0, 1500, 4)
        wait_until(lambda: stack.load()["running"] == 1, 10, "the first runs")
        # Long enough that answers are read in the order of their ends.
        rest = [pool.submit(run, "low", -1, 1000)]
        rest.append(pool.submit(run, "high", 7, 20))
        for future in (first, *rest):
            future.result(60)
    assert order == ["high", "first", "low"], "the high one took the running one's place"
    assert stack.cache()["preemptions"] >= 1
    for wrong in (101, -101, "high", 1.5):
        answer = stack.post("/generate", {"text": "Hi", "priority": wrong})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "priority", answer.text


def test_the_output_promise_is_told(narrow: Stack) -> None:
    info = narrow.client.get("/server_info").json()["workers"][0]["output"]
    assert info["promise"] == "bitwise" and "last bit" in info["means"]
    model = narrow.client.get("/get_model_info").json()
    assert (model["numerics_id"], model["output_promise"]) == (info["numerics_id"], "bitwise")


def test_a_plugin_that_raises_costs_its_request_only(tiny: TinyModels, tmp_path: Path) -> None:
    (tmp_path / "poisoned_plugin.py").write_text(PLUGIN)
    flags = ("--plugin", "poisoned_plugin", "--radix-cache-backend", "poisoned")
    engine = Engine(*flags, model=str(tiny.llama("plain")), env={"PYTHONPATH": str(tmp_path)})
    gateway = Gateway(workers=[f"grpc://{engine.address}"])
    try:
        gateway.wait_ready()

        def run(ids: list[int], new: int) -> httpx.Response:
            return gateway.client.post("/generate", json=body_of("/generate", ids, new))

        with ThreadPoolExecutor(9) as pool:
            good = [pool.submit(run, ids_of(number, 12), 100) for number in range(6)]
            bad = [pool.submit(run, [5, 777, number], 4) for number in range(3)]
            for future in bad:
                assert future.result(60).status_code == 500
                assert "the plugin lost its index" in future.result().json()["error"]["message"]
            for future in good:
                assert len(future.result(60).json()["output_ids"]) == 100
        assert run(ids_of(7, 12), 2).status_code == 200
    finally:
        gateway.stop()
        engine.stop()


def test_sigterm_under_load_gives_every_stream_its_end(tiny: TinyModels) -> None:
    stack = Stack("--drain-timeout", "0.5", "--max-running-requests", "8", model=str(tiny.llama("plain")))
    begun = threading.Semaphore(0)

    def follow(number: int) -> list[str]:
        body = body_of("/v1/completions", ids_of(number, 8), 1900, stream=True)
        with (
            httpx.Client(timeout=60) as client,
            client.stream("POST", f"{stack.url}/v1/completions", json=body) as answer,
        ):
            if answer.status_code != 200:
                begun.release()
                answer.read()
                return [answer.text]
            seen = []
            for item in events(answer.iter_text()):
                if not seen:
                    begun.release()
                seen.append(item)
            return seen

    try:
        with ThreadPoolExecutor(16) as pool:
            streams = [pool.submit(follow, number) for number in range(16)]
            for _ in range(8):
                assert begun.acquire(timeout=60)
            engine = stack.engines[0].process
            engine.child.send_signal(signal.SIGTERM)
            assert engine.child.wait(30) == 0, engine.output
            for future in streams:
                seen = future.result(30)
                last = [item for item in seen if item != "[DONE]"][-1]
                told = json.loads(last)
                ends = [choice.get("finish_reason") for choice in told.get("choices", [])]
                assert "error" in told or ends[0] is not None, seen[-2:]
        assert "draining" in engine.output and "stopped" in engine.output
    finally:
        stack.close()
