"""Many streams at once, and streams that are silent for long."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from .conftest import Starter
from .stack import Stack
from .test_cases_logprobs_cache import ids_of
from .tiny import TinyModels

CLIENTS = 64


def chat(number: int) -> dict[str, Any]:
    """One of sixteen different chats."""
    words = ["rivers", "bread", "planets", "chess"][number % 4]
    question = f"Tell me {number % 16} facts about {words}."
    return {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 16}


async def read_stream(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, list[str | None]]:
    """Joined text and finish reasons of a chat stream that must end in [DONE]."""
    text, reasons, ended = "", [], False
    async with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            assert not ended or not line, "nothing follows the end mark"
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                (choice,) = json.loads(line[6:])["choices"]
                text += choice["delta"].get("content") or ""
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert ended
    return text, reasons


@pytest.mark.model
async def test_sixty_four_streams_at_once_are_each_their_own(stack: Stack) -> None:
    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=stack.url, timeout=120, limits=limits) as client:
        answers = await asyncio.gather(*(read_stream(client, chat(number)) for number in range(CLIENTS)))
        alone = [(await client.post("/v1/chat/completions", json=chat(number))).json() for number in range(16)]
    for number, (text, reasons) in enumerate(answers):
        choice = alone[number % 16]["choices"][0]
        assert text == choice["message"]["content"]
        assert reasons == [choice["finish_reason"]]
    assert len({text for text, _ in answers}) >= 8


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_comments_keep_a_stream_alive_during_a_long_prefill(stacks: Starter, tiny: TinyModels, path: str) -> None:
    model = tiny.llama("long", config={"max_position_embeddings": 16384})
    # Small chunks make the prefill take some hundred steps, so that it outlasts the interval on any machine.
    flags = ("--prefill-chunk", "16", "--disable-radix-cache")
    stack = stacks(*flags, model=str(model), gateway_flags=("--keep-alive-interval", "10ms"))
    ids = ids_of(1, 8000)
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": ids, "max_tokens": 2, "ignore_eos": True, "stream": True},
        "/generate": {
            "input_ids": ids,
            "stream": True,
            "sampling_params": {"max_new_tokens": 2, "ignore_eos": True},
        },
    }
    with stack.client.stream("POST", path, json=bodies[path]) as answer:
        assert answer.status_code == 200
        kinds = [line.split(":")[0] for line in answer.iter_lines() if line]
    first = kinds.index("data")
    assert first >= 3, "comments came before the first token"
    assert set(kinds[:first]) == {""}, "they are comments and nothing else"
    assert kinds.count("data") >= 3, "tokens and the end mark"
