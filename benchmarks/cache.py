"""What the page cache costs at 1k to 500k leaves: an eviction under each policy, and a match by its length.

    python benchmarks/cache.py [--before PATH/_native.abi3.so] [--rounds 5] [--leaves 1000 10000] [--out FILE]

With `--before`, a `branchline._native` built from another commit is measured in the same run, round by round in
turn, and the ratio of medians is given. CPU time of the calling thread through the Python binding, so that the cost
of crossing it is included; ids come as numpy arrays, as an engine keeps them, and as lists.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = 16
SHARED = 4  # pages that all leaves follow
EVICTIONS = 1000
LENGTHS = (8, 64, 512)  # pages of the matched prompts
POLICIES = ("lru", "lfu", "slru", "priority")


def load(path: str) -> Any:
    """A compiled `_native` module, whatever package it belongs to."""
    spec = importlib.util.spec_from_file_location("branchline._native", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(native: Any, pages: int, policy: str) -> Any:
    """A cache with a policy; older modules know only `lru`."""
    if policy == "lru":
        return native.PageCache(pages, PAGE)
    sys.path[:0] = [str(ROOT / "engine/src")]
    from branchline.engine.cache.eviction import ranks

    return native.PageCache(pages, PAGE, policy=ranks(policy).table)


def cpu_us(action: Any, times: int) -> float:
    """CPU microseconds of one call, once an allocator has settled what was freed before."""
    bytearray(100_000)  # a large request makes the allocator sort what caches before this one left behind
    for _ in range(max(times // 20, 1)):
        action()
    started = time.thread_time_ns()
    for _ in range(times):
        action()
    return (time.thread_time_ns() - started) / times / 1e3


def fill(native: Any, leaves: int, policy: str) -> Any:
    """A shared prefix and `leaves` prompts of one page after it, used unequally often where that is known."""
    import numpy as np

    cache = build(native, leaves + SHARED, policy)
    shared = np.arange(SHARED * PAGE, dtype=np.uint32)
    pages = cache.allocate(SHARED)
    cache.insert(b"", shared, pages)
    prompt = np.concatenate([shared, np.zeros(PAGE, dtype=np.uint32)])
    for leaf in range(leaves):
        prompt[SHARED * PAGE] = leaf
        (page,) = cache.allocate(1)
        more = () if policy == "lru" else (leaf % 7 - 3,)
        node, _ = cache.insert(b"", prompt, [*pages, page], *more)
        if policy != "lru" and leaf % 3 == 0:
            cache.credit(node, leaf % 7 - 3)
    return cache


def measure(path: str, leaves: list[int]) -> dict[str, float]:
    """All figures of one module, microseconds."""
    import numpy as np

    native, figures = load(path), {}
    policies = POLICIES if hasattr(native.PageCache, "credit") else POLICIES[:1]
    for policy in policies:
        for count in leaves:
            cache = fill(native, count, policy)
            figures[f"evict {policy} {count}"] = cpu_us(lambda cache=cache: cache.evict(1), min(EVICTIONS, count // 2))
    for count in leaves:
        cache = build(native, count + 2 * sum(LENGTHS), "lru")
        for leaf in range(count // 8):  # the rest of the tree, in prompts of eight pages
            prompt = np.full(8 * PAGE, leaf, dtype=np.uint32)
            cache.insert(b"", prompt, cache.allocate(8))
        for length in LENGTHS:
            prompt = np.arange(length * PAGE, dtype=np.uint32) + 2**31
            prompt[:PAGE] = 2**31 + length
            cache.insert(b"", prompt, cache.allocate(length))
            ids = prompt.tolist()
            times = 20_000 // length
            figures[f"match array {length} {count}"] = cpu_us(
                lambda cache=cache, prompt=prompt: cache.match(b"", prompt, len(prompt)), times
            )
            figures[f"match list {length} {count}"] = cpu_us(
                lambda cache=cache, ids=ids: cache.match(b"", ids, len(ids)), times
            )
    return figures


def verdict(figures: dict[str, float], leaves: list[int]) -> dict[str, Any]:
    """The bars of the design: at most 20 µs an eviction, 2 µs and 20 ns a page for a match of an array of ids."""
    short, long = min(LENGTHS), max(LENGTHS)
    found: dict[str, Any] = {}
    for count in leaves:
        at = {length: figures[f"match array {length} {count}"] for length in LENGTHS}
        found[str(count)] = {
            "eviction_us": max(value for name, value in figures.items() if name.split()[::2] == ["evict", str(count)]),
            "match_ns_a_page": (at[long] - at[short]) / (long - short) * 1e3,
            "match_us": at,
            "eviction_holds": all(
                value <= 20 for name, value in figures.items() if name.split()[::2] == ["evict", str(count)]
            ),
            "match_holds": all(at[length] <= 2 + 0.020 * length for length in LENGTHS),
        }
    return found


def main() -> None:
    """Measure in turns, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", help="another build of the native module")
    parser.add_argument("--module", default=str(ROOT / "engine/src/branchline/_native.abi3.so"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--leaves", type=int, nargs="+", default=[1000, 10_000, 50_000, 500_000])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.leaves)))
        return
    modules = {"now": options.module} | ({"before": options.before} if options.before else {})
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in modules}
    for _ in range(options.rounds):
        for name, path in modules.items():
            command = [sys.executable, __file__, "--one", path, "--leaves", *map(str, options.leaves)]
            rounds[name].append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
    medians = {
        name: {key: statistics.median(one[key] for one in many) for key in many[0]} for name, many in rounds.items()
    }
    report: dict[str, Any] = {"page_size": PAGE, "rounds": options.rounds, "cpu_us": medians}
    report["bars"] = verdict(medians["now"], options.leaves)
    if "before" in medians:
        report["ratio_before_to_now"] = {
            key: value / medians["now"][key] for key, value in medians["before"].items() if medians["now"][key]
        }
    for name, value in sorted(medians["now"].items()):
        before = medians.get("before", {}).get(name)
        print(f"{name:28} {value:9.3f} µs" + ("" if before is None else f"   before {before:9.3f}"))
    print(json.dumps(report["bars"], indent=1))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
