"""The router inside a Python program, before a real engine: requests without a socket, workers, metrics, parsers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import branchline_router
import pytest
from branchline_router import BadRequestError, NotFoundError, OverloadedError, Router, RouterError, StateError, registry

from .stack import Stack, wait_until

pytestmark = pytest.mark.model
CAPITAL: list[dict[str, Any]] = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture
async def router(stack: Stack) -> AsyncIterator[Router]:
    """A router of this process before the stack's engine."""
    url = f"grpc://{stack.engines[0].address}"
    async with Router(port=0, worker_urls=[url], log_level="error") as running:
        await ready(running)
        yield running


async def ready(router: Router) -> None:
    async with asyncio.timeout(60):
        while not any(worker["ready"] for worker in await router.workers()):
            await asyncio.sleep(0.01)


async def test_a_chat_in_process_says_what_the_api_says(router: Router, stack: Stack) -> None:
    answer = await router.chat(CAPITAL, temperature=0, max_tokens=24)
    over_http = stack.post("/v1/chat/completions", {"messages": CAPITAL, "temperature": 0, "max_tokens": 24}).json()
    assert answer["choices"] == over_http["choices"]
    chunks = [chunk async for chunk in router.chat_stream(CAPITAL, temperature=0, max_tokens=24)]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == answer["choices"][0]["message"]["content"]
    generated = await router.generate(
        "The capital of France is", sampling_params={"temperature": 0, "max_new_tokens": 4}
    )
    assert "Paris" in generated["text"]


async def test_many_requests_run_at_once(router: Router) -> None:
    answers = await asyncio.gather(*(router.chat(CAPITAL, temperature=0, max_tokens=8) for _ in range(16)))
    assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1


async def test_leaving_a_stream_or_cancelling_a_task_ends_the_request_at_the_engine(
    router: Router, stack: Stack
) -> None:
    long = {"max_tokens": 1500, "ignore_eos": True}
    async for _ in router.chat_stream(CAPITAL, **long):
        break
    task = asyncio.create_task(router.chat(CAPITAL, **long))
    await asyncio.to_thread(wait_until, lambda: stack.load()["running"] > 0, 10, "the request runs")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(stack.assert_idle, 10)


async def test_failures_have_types_and_fields(router: Router) -> None:
    with pytest.raises(BadRequestError) as wrong:
        await router.chat(CAPITAL, temperature="hot")
    assert (wrong.value.status, wrong.value.param, wrong.value.code) == (400, "temperature", "invalid_argument")
    with pytest.raises(NotFoundError):
        await router.chat(CAPITAL, model="other")
    with pytest.raises(BadRequestError):
        async for _ in router.chat_stream([]):
            pass
    assert issubclass(BadRequestError, RouterError) and issubclass(OverloadedError, RouterError)


async def test_workers_are_added_and_removed_and_metrics_read(stack: Stack) -> None:
    url = f"grpc://{stack.engines[0].address}"
    async with Router(port=0, log_level="off") as router:
        with pytest.raises(OverloadedError) as nobody:
            await router.chat(CAPITAL)
        assert nobody.value.retry_after is not None
        added = await router.add_worker(url)
        await ready(router)
        await router.chat(CAPITAL, max_tokens=2)
        samples = await router.metrics()
        served = [
            one for one in samples if one.labels.get("route") == "/v1/chat/completions" and "200" in one.labels.values()
        ]
        assert any(one.value >= 1 for one in served), samples
        await router.remove_worker(added["id"])
        assert await router.workers() == []


async def test_a_router_that_does_not_run_or_stops_meanwhile_says_so(stack: Stack) -> None:
    router = Router(port=0, worker_urls=[f"grpc://{stack.engines[0].address}"], drain_timeout="100ms", log_level="off")
    with pytest.raises(StateError):
        await router.chat(CAPITAL)
    await router.start_async()
    await ready(router)
    running = asyncio.create_task(router.chat(CAPITAL, max_tokens=1500, ignore_eos=True))
    await asyncio.to_thread(wait_until, lambda: stack.load()["running"] > 0, 10, "the request runs")
    await router.stop_async()
    with pytest.raises(RouterError):
        await running
    with pytest.raises(StateError):
        await router.chat(CAPITAL)


async def test_a_forked_child_is_refused(router: Router) -> None:
    child = os.fork()
    if child == 0:
        try:
            router._native.send("GET", "/health", b"", lambda *_: None)
        except branchline_router.ForkError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class Shouting:
    """Calls a tool for each exclamation mark; all else is text."""

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        self.name = tools[0]["function"]["name"]

    def push(self, text: str) -> list[registry.ToolEvent]:
        out: list[registry.ToolEvent] = []
        for character in text:
            out += [("call", self.name), ("arguments", "{}")] if character == " " else [("text", character)]
        return out

    def finish(self) -> list[registry.ToolEvent]:
        return []


class Failing(Shouting):
    def push(self, text: str) -> list[registry.ToolEvent]:
        raise ValueError("no idea")


async def test_a_registered_parser_is_chosen_by_its_name_and_its_failure_ends_one_request(stack: Stack) -> None:
    registry.tool_parsers.register("shouting")(Shouting)
    registry.tool_parsers.register("failing")(Failing)
    url = f"grpc://{stack.engines[0].address}"
    tools = [{"type": "function", "function": {"name": "cheer"}}]
    asked: dict[str, Any] = {"tools": tools, "temperature": 0, "max_tokens": 6}
    async with Router(port=0, worker_urls=[url], tool_call_parser="shouting", log_level="off") as router:
        await ready(router)
        message = (await router.chat(CAPITAL, **asked))["choices"][0]["message"]
        assert {call["function"]["name"] for call in message["tool_calls"]} == {"cheer"}
    async with Router(port=0, worker_urls=[url], tool_call_parser="failing", log_level="off") as router:
        await ready(router)
        with pytest.raises(RouterError, match="tool parser 'failing' failed: ValueError: no idea"):
            await router.chat(CAPITAL, **asked)
        assert (await router.chat(CAPITAL, max_tokens=2))["choices"]
    with pytest.raises(branchline_router.ConfigError, match=r"unknown tool parser 'nope'.*'shouting'"):
        Router(port=0, tool_call_parser="nope")
