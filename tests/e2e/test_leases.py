"""Leases through the whole stack: a held prefix is hit under pressure, and nobody holds more or longer than agreed."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import pytest

from .conftest import Starter
from .stack import Stack, wait_until
from .test_cases_logprobs_cache import ids_of

pytestmark = pytest.mark.model
PAGE, PREFIX = 16, 160
FLAGS = ("--max-total-tokens", "1024")  # 64 pages, of which leases may hold 19


@pytest.fixture
def small(stacks: Starter) -> Stack:
    stack = stacks(*FLAGS)
    stack.flush()
    return stack


def acquire(stack: Stack, prompt: list[int], ttl_ms: int = 60_000, expect: int = 200) -> dict[str, Any]:
    answer = stack.post("/v1/leases", {"model": "default", "prompt": prompt, "ttl_ms": ttl_ms})
    assert answer.status_code == expect, answer.text
    body: dict[str, Any] = answer.json()
    return body


def release(stack: Stack, lease_id: str) -> bool:
    answer = stack.client.delete(f"/v1/leases/{lease_id}")
    assert answer.status_code == 200, answer.text
    return bool(answer.json()["released"])


def press(stack: Stack) -> None:
    """Runs enough of other prompts at once to turn the whole pool over twice."""
    prompts = [ids_of(900 + index, 200) for index in range(10)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda ids: stack.generate(ids, sampling_params={"max_new_tokens": 4}), prompts))


def branch(stack: Stack, prompt: list[int], suffix: int, **body: Any) -> dict[str, Any]:
    ids = prompt + ids_of(suffix, 8)
    params = {"max_new_tokens": 4, "ignore_eos": True}
    meta: dict[str, Any] = stack.generate(ids, sampling_params=params, **body)["meta_info"]
    return meta


def test_a_leased_prefix_is_hit_under_pressure_and_an_unleased_one_is_not(small: Stack) -> None:
    held, loose = ids_of(70, PREFIX), ids_of(71, PREFIX)
    lease = acquire(small, held)
    assert (lease["tokens"], lease["pages"], lease["prompt_tokens"]) == (PREFIX, PREFIX // PAGE, PREFIX)
    small.generate(loose, sampling_params={"max_new_tokens": 0})
    evicted = small.cache()["evicted_pages"]
    press(small)
    assert small.cache()["evicted_pages"] - evicted >= PREFIX // PAGE
    assert small.cache()["pages_leased"] == PREFIX // PAGE
    for suffix in (80, 81):
        meta = branch(small, held, suffix, lease={"id": lease["id"]})
        assert (meta["cached_tokens"], meta["lease"]) == (PREFIX, "held")
    assert branch(small, loose, 82)["cached_tokens"] == 0
    assert release(small, lease["id"])
    assert not release(small, lease["id"])
    assert small.cache()["pages_leased"] == 0
    small.assert_idle(10)


def test_a_planted_prefix_may_take_the_lease(small: Stack) -> None:
    prompt = ids_of(72, PREFIX)
    planted = small.generate(prompt, sampling_params={"max_new_tokens": 0}, lease={"ttl_ms": 60_000})
    meta = planted["meta_info"]
    assert (meta["lease"], meta["lease_tokens"]) == ("held", PREFIX)
    assert branch(small, prompt, 83, lease={"id": meta["lease_id"]})["lease"] == "held"
    answer = small.post(
        "/v1/completions",
        {"model": "default", "prompt": prompt, "max_tokens": 2, "lease": {"id": meta["lease_id"]}},
    ).json()
    assert answer["lease"] == "held"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == PREFIX - PAGE  # its last page is computed
    release(small, meta["lease_id"])


def test_a_lease_that_ran_out_is_lost_and_the_request_is_served(small: Stack) -> None:
    prompt = ids_of(73, PREFIX)
    lease = acquire(small, prompt, ttl_ms=50)
    wait_until(lambda: small.cache()["leases"] == 0, 10, "the lease to run out")
    meta = branch(small, prompt, 84, lease={"id": lease["id"]})
    assert (meta["lease"], meta["completion_tokens"]) == ("lost", 4)
    answer = small.post(f"/v1/leases/{lease['id']}/renew", {"ttl_ms": 1000})
    assert answer.status_code == 404


def test_renewing_keeps_it(small: Stack) -> None:
    lease = acquire(small, ids_of(74, PREFIX), ttl_ms=5_000)
    answer = small.post(f"/v1/leases/{lease['id']}/renew", {"ttl_ms": 60_000})
    assert answer.status_code == 200, answer.text
    assert (answer.json()["ttl_ms"], answer.json()["id"]) == (60_000, lease["id"])
    assert release(small, lease["id"])


def test_beyond_the_budget_it_is_refused_with_the_figures(small: Stack) -> None:
    lease = acquire(small, ids_of(75, PREFIX))
    refused = acquire(small, ids_of(76, PREFIX), expect=429)["error"]["message"]
    assert "lease budget is 19 pages, 10 are held and 10 more are asked for" in refused
    release(small, lease["id"])
    release(small, acquire(small, ids_of(76, PREFIX))["id"])


@pytest.mark.parametrize("where", ["generate", "renew", "delete"])
def test_a_forged_id_is_refused(small: Stack, where: str) -> None:
    lease = acquire(small, ids_of(77, PREFIX))
    forged = lease["id"][:-1] + ("0" if lease["id"][-1] != "0" else "1")
    if where == "generate":
        answer = small.post("/generate", {"input_ids": [1, 2], "lease": {"id": forged}})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lease.id")
    elif where == "renew":
        assert small.post(f"/v1/leases/{forged}/renew", {"ttl_ms": 1000}).status_code == 404
    else:
        assert small.client.delete(f"/v1/leases/{forged}").status_code == 404
    assert release(small, lease["id"])


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": [1, 2]}, "ttl_ms"),
        ({"prompt": [1, 2], "ttl_ms": 0}, "ttl_ms"),
        ({"prompt": [1, 2], "ttl_ms": "1"}, "ttl_ms"),
        ({"ttl_ms": 5}, "prompt"),
        ({"prompt": [10**9], "ttl_ms": 5}, "prompt[0]"),
        ({"prompt": [1, 2], "ttl_ms": 5, "lease": {"id": "x"}}, "lease"),
    ],
)
def test_a_lease_that_means_nothing_is_refused_by_field(small: Stack, body: dict[str, Any], field: str) -> None:
    answer = small.post("/v1/leases", {"model": "default", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


def test_messages_can_be_leased(small: Stack) -> None:
    messages = [{"role": "user", "content": "Tell me about the sea. " * 20}]
    answer = small.post("/v1/leases", {"model": "default", "messages": messages, "ttl_ms": 60_000})
    assert answer.status_code == 200, answer.text
    lease = answer.json()
    chat = small.post(
        "/v1/chat/completions",
        {"model": "default", "messages": messages, "max_tokens": 2, "lease": {"id": lease["id"]}},
    ).json()
    assert chat["lease"] == "held"
    assert chat["usage"]["prompt_tokens_details"]["cached_tokens"] >= lease["tokens"] - PAGE
    assert release(small, lease["id"])


def test_a_restarted_engine_has_lost_its_leases(stacks: Starter) -> None:
    stack = Stack(*FLAGS)
    try:
        prompt = ids_of(78, PREFIX)
        lease = acquire(stack, prompt)
        port = int(stack.engines[0].address.rsplit(":", 1)[1])
        stack.engines[0].stop()
        stack.engines[0] = type(stack.engines[0])(*FLAGS, port=port)
        wait_until(lambda: stack.client.get("/health").status_code == 200, 60, "the engine's return")
        meta = branch(stack, prompt, 85, lease={"id": lease["id"]})
        assert (meta["lease"], meta["completion_tokens"]) == ("lost", 4)
    finally:
        stack.close()


def test_leases_belong_to_their_key_and_gateways_with_one_key_share_them(stacks: Starter) -> None:
    stack = stacks(*FLAGS, gateway_flags=("--api-key", "alice", "--api-key", "bob", "--lease-key", "shared"))
    alice, bob = ({"authorization": f"Bearer {key}"} for key in ("alice", "bob"))
    body = {"model": "default", "prompt": ids_of(79, PREFIX), "ttl_ms": 60_000}
    lease = stack.client.post("/v1/leases", json=body, headers=alice).json()
    stolen = stack.client.post("/generate", json={"input_ids": [1], "lease": {"id": lease["id"]}}, headers=bob)
    assert (stolen.status_code, stolen.json()["error"]["param"]) == (400, "lease.id")
    assert stack.client.delete(f"/v1/leases/{lease['id']}", headers=bob).status_code == 404
    assert stack.client.delete(f"/v1/leases/{lease['id']}", headers=alice).json()["released"] is True
