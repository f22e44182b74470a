"""Real schemas with valid and invalid instances (JSON Schema Bench): verdicts, time to the first mask, forced tokens.

`python -m benchmarks.grammar.maskbench FILE [--every N] [--backends ours,llguidance,…]` prints JSON. Verdicts are
taken over bytes; times are CPU time over the real model's vocabulary, where a backend is asked for masks.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.grammar.boxed import each
from benchmarks.grammar.feed import accepts
from benchmarks.grammar.peers import PEERS, Guidance, Ours, Peer, Refused, Xgrammar
from benchmarks.grammar.vocabulary import Words

WALL_S = 40.0
TIMED = ("ours", "llguidance", "xgrammar")  # the others have no mask over a large vocabulary in a useful time


def timed(backend: str, words: Words) -> Peer | None:
    """The backend over the model's vocabulary."""
    if backend == "ours":
        return Ours(words.guided)
    if backend == "llguidance":
        return Guidance(words.guided)
    return Xgrammar(words.pieces) if backend == "xgrammar" else None


def asker(backend: str, measured: bool) -> Callable[[], Callable[[Any], Any]]:
    """Makes what answers a row: {"verdict", "first_mask_s", "masks_s", "tokens", "forced"}."""

    def make() -> Callable[[Any], Any]:
        peer = PEERS[backend]()
        words = Words.of_model() if measured else None
        clocked = timed(backend, words) if words else None

        def ask(row: dict[str, Any]) -> dict[str, Any]:
            started = time.process_time()
            try:
                found: dict[str, Any] = {"verdict": verdict(peer, row)}
            except Refused as refused:
                taken = time.process_time() - started
                return {"verdict": "declined", "why": str(refused)[:200], "first_mask_s": taken}
            if clocked is not None and words is not None:
                found |= clock(clocked, words, row)
            return found

        return ask

    return make


def verdict(peer: Peer, row: dict[str, Any]) -> str:
    """Of one schema over all its instances. Raises Refused."""
    walk = peer.compile(row["schema"])
    found = "passed"
    for test in row["tests"]:
        accepted = accepts(walk, test["data"])
        if accepted and not test["valid"]:
            return "wrongly accepted"
        if test["valid"] and not accepted:
            found = "wrongly refused"
    return found


def clock(peer: Peer, words: Words, row: dict[str, Any]) -> dict[str, Any]:
    """CPU seconds to the first mask (compiling included), of every mask on the valid instances, and forced tokens."""
    started = time.process_time()
    try:
        walk = peer.compile(row["schema"])
        walk.masks([])
    except Refused:
        return {}
    first = time.process_time() - started
    masks: list[float] = []
    tokens = forced = 0
    for test in row["tests"]:
        if test["valid"]:
            ids = words.encode(json.dumps(test["data"], separators=(",", ":"), ensure_ascii=False))
            masks += walk.masks(ids)
            told = walk.forced(ids)
            if told is not None:
                tokens, forced = tokens + len(ids), forced + told
    return {"first_mask_s": first, "masks_s": masks, "tokens": tokens, "forced": forced}


def run(path: Path, every: int = 1, backend: str = "ours", measured: bool = True, boxed: bool = True) -> dict[str, Any]:
    """Counts by schema, the wrong ones by name, and percentiles; `boxed` in a child with limits, as peers need it."""
    rows = [row for row in map(json.loads, path.read_text().splitlines()) if row["tests"]][::every]
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    firsts: list[float] = []
    masks: list[float] = []
    tokens = forced = 0
    make = asker(backend, measured)
    for row, answer in zip(rows, each(make, rows, WALL_S) if boxed else map(make(), rows), strict=True):
        found = {"verdict": answer} if isinstance(answer, str) else answer
        counts[found["verdict"]] += 1
        if found["verdict"] not in ("passed", "declined"):
            wrong.append(f"{found['verdict']}: {row['id']}")
        firsts += [found["first_mask_s"]] if "first_mask_s" in found else []
        masks += found.get("masks_s", [])
        tokens, forced = tokens + found.get("tokens", 0), forced + found.get("forced", 0)
    out: dict[str, Any] = {"schemas": len(rows), **dict(counts.most_common())}
    if measured:
        out["first_mask_cpu_ms"] = shares(firsts, 1e3)
        out["mask_cpu_us"] = shares(masks, 1e6)
        out["forced_share"] = round(forced / tokens, 4) if tokens else None
    return {**out, "wrong": wrong if backend == "ours" else len(wrong)}


def shares(times: Sequence[float], unit: float) -> dict[str, float]:
    """Percentiles of seconds in another unit."""
    ordered = sorted(times)
    if not ordered:
        return {}
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
    found = {name: round(ordered[int(len(ordered) * share)] * unit, 2) for name, share in at.items()}
    return {"count": len(ordered), **found, "max": round(ordered[-1] * unit, 2)}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--backends", default="ours")
    given = parser.parse_args()
    names = given.backends.split(",")
    print(json.dumps({name: run(given.file, given.every, name, name in TIMED) for name in names}, indent=1))


if __name__ == "__main__":
    main()
