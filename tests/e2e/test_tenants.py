"""Tenants, places and deadlines before a real engine: who is let in, what he is charged, when an answer is too late."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from .conftest import Starter
from .stack import Stack, events, metric, wait_until
from .test_cases_logprobs_cache import ids_of
from .test_overload import PATHS, body_of
from .tiny import TinyModels

WAITING, BYTES = "branchline_router_admission_waiting", "branchline_router_admission_bytes"
TENANTS = """
[tenants."header:metered"]
tokens_per_minute = 60
[tenants."header:rare"]
requests_per_minute = 0.01
"""


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    path.write_text(TENANTS)
    return path


@pytest.fixture
def shared(stacks: Starter, tiny: TinyModels, policies: Path) -> Iterator[Stack]:
    """One place for all tenants, who say who they are by `x-team`."""
    flags = (
        "--max-concurrent-requests", "1", "--tenant-file", str(policies), "--tenant-header", "x-team",
        "--queue-timeout", "600s", "--header-timeout", "600s",
    )  # fmt: skip
    running = stacks(model=str(tiny.llama("plain")), gateway_flags=flags)
    yield running
    running.assert_idle(20)


def ask(stack: Stack, path: str, new: int, prompt: int = 8, stream: bool = False, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return stack.client.post(path, json=body_of(path, ids_of(1, prompt), new, stream=stream), headers=named)


def test_tokens_are_charged_as_the_engine_counts_them(shared: Stack) -> None:
    spent = ask(shared, "/v1/completions", 400, x_team="metered")
    assert spent.status_code == 200, spent.text
    refused = ask(shared, "/v1/completions", 1, x_team="metered")
    assert refused.status_code == 429, refused.text
    assert "tokens a minute" in refused.json()["error"]["message"]
    # 348 of 60 a minute are owed, and one request's worth must be there.
    assert 240 <= int(refused.headers["retry-after"]) <= 420
    assert ask(shared, "/v1/completions", 1, x_team="others").status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_an_allowance_of_requests_holds_for_every_family(shared: Stack, path: str) -> None:
    ask(shared, path, 1, x_team="rare")
    for stream in (False, True):
        refused = ask(shared, path, 1, stream=stream, x_team="rare")
        assert refused.status_code == 429, refused.text
        assert int(refused.headers["retry-after"]) >= 60


def test_a_tenant_of_long_answers_leaves_turns_to_one_of_short_ones(shared: Stack) -> None:
    order: list[str] = []

    def run(team: str, new: int) -> None:
        assert ask(shared, "/generate", new, x_team=team).status_code == 200
        order.append(team)

    address = httpx.URL(shared.url)
    with ThreadPoolExecutor(16) as pool, socket.create_connection((address.host, address.port)) as first:
        # It has its place before its body has come, and keeps it for as long as the connection is open.
        first.sendall(b"POST /generate HTTP/1.1\r\nhost: localhost\r\nx-team: first\r\ncontent-length: 9\r\n\r\n")
        wait_until(lambda: metric(shared.client, BYTES) == 9, 20, "it has its place")
        runs = []
        for team, new in [("long", 300)] * 6 + [("short", 3)] * 6:
            runs.append(pool.submit(run, team, new))
            wait_until(lambda: metric(shared.client, WAITING) == len(runs), 20, "it waits for its turn")
        first.close()
        for future in runs:
            future.result(120)
    # Each long answer costs a hundred short ones, so that after the first all short ones go.
    assert order.index("short") <= 2, order
    assert order[-4:] == ["long"] * 4, order


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_that_is_too_late_ends_and_leaves_the_engine(shared: Stack, path: str) -> None:
    late = ask(shared, path, 1900, x_branchline_deadline_ms="60")
    assert late.status_code == 504, late.text
    assert late.json()["error"]["code"] == "deadline_exceeded"
    wait_until(lambda: shared.load()["running"] == 0, 20, "the engine has nothing to do")
    for ms in ("300", "1200", "5000", "20000"):
        stream = ask(shared, path, 1900, stream=True, x_branchline_deadline_ms=ms)
        if stream.status_code == 200:
            break
        assert stream.status_code == 504, stream.text
    assert stream.status_code == 200
    told = [json.loads(event) for event in events(iter([stream.text])) if event != "[DONE]"]
    if "error" in told[-1]:
        assert told[-1]["error"]["code"] == "deadline_exceeded"
        assert "[DONE]" not in stream.text
    else:
        # A machine so fast, or so slow to begin, that all tokens came in time.
        assert "[DONE]" in stream.text
