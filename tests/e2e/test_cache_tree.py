"""The cache seen from outside, through gateway and engine: its tree, its host tier and its eviction policies."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import pytest

from .conftest import Starter
from .stack import Stack
from .test_cases_logprobs_cache import ids_of

pytestmark = pytest.mark.model
PAGE = 16
SMALL = ("--max-total-tokens", "1024")  # 64 pages
PARAMS = {"max_new_tokens": 6, "ignore_eos": True, "temperature": 0}


def tree(stack: Stack, query: str = "", expect: int = 200, **headers: str) -> dict[str, Any]:
    """The first worker's part."""
    answer = stack.client.get(f"/cache/tree{query}", headers=headers)
    assert answer.status_code == expect, answer.text
    body: dict[str, Any] = answer.json()
    return body["workers"][0] if expect == 200 else body["error"]  # type: ignore[no-any-return]


def press(stack: Stack) -> None:
    """Turns the whole pool over."""
    prompts = [ids_of(700 + index, 200) for index in range(8)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda ids: stack.generate(ids, sampling_params={"max_new_tokens": 2}), prompts))


def test_the_tree_tells_sizes_holders_and_use_and_no_text_unasked(stacks: Starter) -> None:
    stack = stacks(*SMALL)
    stack.flush()
    prompt = ids_of(3, 5 * PAGE)
    for suffix in (4, 5):
        stack.generate(prompt + ids_of(suffix, PAGE + 1), sampling_params=PARAMS)
    held = {"model": "default", "prompt": [*prompt, 5], "ttl_ms": 60_000}
    lease = stack.post("/v1/leases", held).json()
    shown = tree(stack)
    assert (shown["nodes_total"], shown["namespaces_total"], shown["truncated"], shown["next"]) == (3, 1, False, None)
    stem = next(node for node in shown["nodes"] if node["depth_tokens"] == 0)
    leaves = [node for node in shown["nodes"] if node["depth_tokens"] == 5 * PAGE]
    assert (stem["pages"], stem["tokens"], stem["children"], stem["parent"]) == (5, 5 * PAGE, 2, None)
    assert stem["hits"] >= 1 and (stem["locks"], stem["leases"], stem["tier"]) == (1, 1, "device")
    for leaf in leaves:
        assert (leaf["parent"], leaf["locks"], leaf["leases"]) == (stem["node"], 0, 0)
        assert 0 <= leaf["age_ms"] < 600_000 and leaf["namespace"] == stem["namespace"]
    assert len(leaves) == 2 and shown["cache"]["pages_leased"] == 5
    assert not {"text", "token_ids"} & {key for node in shown["nodes"] for key in node}
    asked = tree(stack, "?token_ids=true&text=true")
    first = next(node for node in asked["nodes"] if node["depth_tokens"] == 0)
    assert first["token_ids"] == prompt and len(first["text"]) > PAGE
    stack.client.delete(f"/v1/leases/{lease['id']}")
    stack.assert_idle(10)


def test_the_tree_comes_in_bounded_pieces(stacks: Starter) -> None:
    stack = stacks(*SMALL)
    stack.flush()
    for seed in range(5):
        stack.generate(ids_of(seed, PAGE + 1), sampling_params={"max_new_tokens": 1})
    seen: list[int] = []
    piece = tree(stack, "?limit=2")
    while True:
        assert len(piece["nodes"]) <= 2 and piece["truncated"] is (piece["next"] is not None)
        seen += [node["node"] for node in piece["nodes"]]
        if not piece["truncated"]:
            break
        piece = tree(stack, f"?limit=2&worker={piece['id']}&cursor={piece['next']}")
    assert len(set(seen)) == len(seen) == 5
    for query, words in [
        ("?limit=0", "limit is 0; give 1 to 10000"),
        ("?cursor=3", "a cursor is of one worker"),
        ("?depth=1", "unknown field `depth`"),
    ]:
        assert words in tree(stack, query, expect=400)["message"]
    assert "is not in the fleet" in tree(stack, "?worker=w99", expect=404)["message"]


def test_text_is_for_the_administrator_where_clients_have_keys(stacks: Starter) -> None:
    stack = stacks(*SMALL, gateway_flags=("--api-key", "client", "--admin-api-key", "admin"))
    client, admin = {"authorization": "Bearer client"}, {"authorization": "Bearer admin"}
    assert stack.client.get("/cache/tree").status_code == 401
    assert tree(stack, **client)["nodes"] == []
    for query in ("?text=true", "?token_ids=true"):
        assert "--admin-api-key" in tree(stack, query, expect=403, **client)["message"]
        assert tree(stack, query, **admin)["nodes"] == []


@pytest.mark.parametrize("executor", ["native", "torch"])
def test_a_prompt_comes_back_from_the_host_with_the_same_answer(executor: str, stacks: Starter) -> None:
    flags = (*SMALL, "--host-cache-gib", "0.25", "--executor", executor)
    stack = stacks(*flags, *(("--dtype", "float32") if executor == "torch" else ()))
    stack.flush()
    prompt = ids_of(90, 6 * PAGE + 3)
    asked = {"sampling_params": PARAMS, "return_logprob": True}
    first, hit = (stack.generate(prompt, **asked) for _ in range(2))
    press(stack)
    cache = stack.cache()
    assert cache["host_stored_pages"] > 0 and cache["evicted_pages"] == 0
    assert any(node["tier"] == "host" for node in tree(stack)["nodes"])
    back = stack.generate(prompt, **asked)
    assert back["meta_info"]["cached_tokens"] == hit["meta_info"]["cached_tokens"] == 6 * PAGE
    assert stack.cache()["host_fetched_pages"] >= 6
    assert back["output_ids"] == hit["output_ids"] == first["output_ids"]
    assert back["meta_info"]["output_token_logprobs"] == hit["meta_info"]["output_token_logprobs"]
    stack.flush()
    assert stack.cache()["host_pages_used"] == 0
    stack.assert_idle(10)


def test_a_policy_keeps_what_it_is_for(stacks: Starter) -> None:
    stack = stacks(*SMALL, "--eviction-policy", "slru")
    stack.flush()
    prompt = ids_of(91, 4 * PAGE + 1)
    for _ in range(2):
        stack.generate(prompt, sampling_params={"max_new_tokens": 1})
    press(stack)
    assert stack.cache()["evicted_pages"] > 0
    assert stack.generate(prompt, sampling_params={"max_new_tokens": 1})["meta_info"]["cached_tokens"] == 4 * PAGE
    components = stack.client.get("/server_info").json()["workers"][0]["components"]
    assert any(part.startswith("eviction_policies=slru (branchline") for part in components)
