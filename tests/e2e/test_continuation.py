"""A real engine dies in the middle of a stream and another one goes on: the joined text is the uninterrupted one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from .stack import Engine, Stack, wait_until
from .test_cases_logprobs_cache import ids_of
from .tiny import TinyModels

PROMPT = ids_of(77, 40)
COUNT = 400
HOWS: dict[str, dict[str, Any]] = {
    "with a seed": {"temperature": 1.0, "seed": 11},
    "with penalties": {"temperature": 1.0, "seed": 5, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    "greedy": {"temperature": 0.0},
}


@pytest.fixture
def pair(tiny: TinyModels) -> Iterator[Stack]:
    """Its own stack: the tests kill engines."""
    stack = Stack(model=str(tiny.llama("plain")), engines=2)
    yield stack
    stack.close()


def body(sampling: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A completion of so many tokens."""
    return {"model": "", "prompt": PROMPT, "max_tokens": COUNT, "ignore_eos": True, **sampling, **more}


def running(stack: Stack) -> int:
    """The position of the engine that has the stream."""
    loads = [worker["in_flight"] for worker in stack.client.get("/workers").json()["workers"]]
    assert sorted(loads) == [0, 1], loads
    return loads.index(1)


def cut(stack: Stack, sampling: dict[str, Any], after: int) -> tuple[str, dict[str, Any], int]:
    """Text and usage of a stream whose engine is killed after so many events, and which engine that was."""
    text, dead, events = "", -1, 0
    usage: dict[str, Any] = {}
    request = body(sampling, stream=True, stream_options={"include_usage": True})
    with stack.client.stream("POST", "/v1/completions", json=request, timeout=120) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            text += "".join(choice["text"] for choice in event["choices"])
            usage = event.get("usage") or usage
            events += 1
            if events == after:
                dead = running(stack)
                os.killpg(stack.engines[dead].process.child.pid, signal.SIGKILL)
                stack.engines[dead].process.stop()
        assert line == "" or line == "data: [DONE]", line
    return text, usage, dead


def revive(stack: Stack, dead: int, model: str) -> None:
    """Start the killed engine again and wait until it is used."""
    port = int(stack.engines[dead].address.rsplit(":", 1)[1])
    stack.engines[dead] = Engine(model=model, port=port)

    def ready() -> list[bool]:
        return [worker["ready"] for worker in stack.client.get("/workers").json()["workers"]]

    wait_until(lambda: ready() == [True, True], 20, "the new engine is used")


def test_killed_engine_leaves_no_seam_in_its_stream(pair: Stack, tiny: TinyModels) -> None:
    for number, (how, sampling) in enumerate(HOWS.items()):
        whole = pair.client.post("/v1/completions", json=body(sampling), timeout=120).json()
        assert "continuations" not in whole["usage"]
        text, usage, dead = cut(pair, sampling, after=1 + 3 * number)
        assert text == whole["choices"][0]["text"], how
        assert (usage["continuations"], usage["completion_tokens"]) == (1, COUNT), how
        revive(pair, dead, str(tiny.llama("plain")))


def test_stop_string_across_the_death_is_found(pair: Stack) -> None:
    sampling = {"temperature": 1.0, "seed": 3}
    free = pair.client.post("/v1/completions", json=body(sampling), timeout=120).json()["choices"][0]["text"]
    stop = free[-12:]
    right = free[: free.index(stop)]
    text, usage, _ = cut(pair, {**sampling, "stop": [stop]}, after=2)
    assert text == right
    assert usage["continuations"] == 1
