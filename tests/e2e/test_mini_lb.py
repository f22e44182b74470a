"""The debugging balancer: pairs only, random only, and it says so; before two workers that speak SGLang's wire."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from branchline_router.mini_lb import MiniLb, Options, Prefill, batch_size, paired, parse

PAIR = ["--prefill", "http://127.0.0.1:1", "8998", "--decode", "http://127.0.0.1:2"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "at least one --prefill and one --decode"),
        (PAIR[:3], "at least one --prefill and one --decode"),
        ([*PAIR, "--policy", "cache_aware"], "policy is 'cache_aware'"),
        ([*PAIR, "--api-key", "x"], "--api-key"),
        (["--prefill", "grpc://a:1", "--decode", "http://b:2"], "grpc://a:1"),
        (["--prefill", "http://a:1", "many", "--decode", "http://b:2"], "'many'"),
        (["--prefill", "http://a:1", "1", "2", "--decode", "http://b:2"], "3 values"),
    ],
)
def test_what_it_does_not_do_is_refused_with_a_value_error(words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(words)


def test_a_pair_is_read_with_its_bootstrap_port_or_none() -> None:
    assert parse(PAIR).prefill == (Prefill("http://127.0.0.1:1", 8998),)
    assert parse(["--prefill", "http://a:1", "none", "--decode", "http://b:2"]).prefill[0].bootstrap_port is None


def test_each_prompt_of_a_list_gets_a_room_of_its_own() -> None:
    prefill = Prefill("http://p:1", 7)
    one = paired({"text": "x"}, prefill)
    assert (one["bootstrap_host"], one["bootstrap_port"]) == ("p", 7) and 0 <= one["bootstrap_room"] < 2**63
    many = paired({"text": ["x", "y", "z"]}, prefill)
    assert many["bootstrap_host"] == ["p"] * 3 and len(set(many["bootstrap_room"])) == 3
    assert (batch_size({"input_ids": [1, 2]}), batch_size({"input_ids": [[1], [2]]})) == (None, 2)


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app)
    await runner.setup()
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    await web.SockSite(runner, sock).start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        await runner.cleanup()


def worker(answer: bytes, seen: list[dict[str, Any]], met: asyncio.Event | None = None) -> web.Application:
    """Records what it is sent; with `met` it waits for the other half, as SGLang's workers do."""

    async def generate(request: web.Request) -> web.Response:
        seen.append(await request.json())
        if met is not None:
            await asyncio.wait_for(met.wait(), 10)
        return web.Response(body=answer, content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/generate", generate)
    return app


async def test_both_halves_meet_in_one_room_and_the_decode_halfs_bytes_are_the_answer() -> None:
    first: list[dict[str, Any]] = []
    second: list[dict[str, Any]] = []
    bytes_ = b"data: {}\n\ndata: [DONE]\n\n"
    async with served(worker(b"{}", first)) as prefill, served(worker(bytes_, second)) as decode:
        options = Options((Prefill(prefill, 8998),), (decode,))
        async with aiohttp.ClientSession() as session:
            app = web.Application()
            app.router.add_post("/generate", MiniLb(options, session).answer)
            async with served(app) as url, session.post(f"{url}/generate", json={"text": "x"}) as answer:
                assert await answer.read() == bytes_
    assert first == second and first[0]["text"] == "x" and first[0]["bootstrap_port"] == 8998


def test_it_says_what_it_is_for() -> None:
    words = [sys.executable, "-m", "branchline_router.cli", "mini-lb", "--help"]
    told = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "debugging only" in " ".join(told.split())
    wrong = subprocess.run(words[:-1], capture_output=True, text=True)
    assert wrong.returncode != 0 and "ValueError" in wrong.stderr
    assert "pairs" in wrong.stderr
