"""Runs plans side by side, says how far it is, and turns samples into figures."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TextIO

from branchline.bench.client import Client, Sample
from branchline.bench.workload import Plan

PERCENTILES = (50, 90, 99)
_EVERY_S = (0.2, 5.0)  # between two lines of progress: on a terminal, elsewhere


class ProgressLine:
    """One line that is written over on a terminal; a line now and then elsewhere."""

    def __init__(self, total: int, out: TextIO = sys.stderr, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._out, self._clock = total, out, clock
        self._live = out.isatty()
        self._told = -1e9

    def tell(self, done: int, samples: Sequence[Sample], elapsed: float) -> None:
        """`done` of all plans have ended, `samples` came so far."""
        now = self._clock()
        if done < self._total and now - self._told < _EVERY_S[not self._live]:
            return
        self._told = now
        failed = sum(1 for sample in samples if sample.error)
        tokens = sum(sample.output_tokens for sample in samples)
        line = f"{done}/{self._total} done, {failed} failed, {tokens / max(elapsed, 1e-9):.0f} output tokens/s"
        end = "\n" if not self._live or done == self._total else ""
        self._out.write(("\r\x1b[K" if self._live else "") + line + end)
        self._out.flush()


async def run(
    plans: Sequence[Plan],
    client: Client,
    concurrency: int,
    rate: float,
    seed: int,
    progress: ProgressLine,
) -> tuple[list[Sample], float]:
    """All samples and the seconds that they took together. `rate` plans start a second; 0: no such bound."""
    samples: list[Sample] = []
    slots, done = asyncio.Semaphore(concurrency), 0
    generator = random.Random(seed)

    def report(sample: Sample) -> None:
        samples.append(sample)
        progress.tell(done, samples, client.now())

    async def one(plan: Plan) -> None:
        nonlocal done
        try:
            await plan(report)
        finally:
            slots.release()
            done += 1
        progress.tell(done, samples, client.now())

    client.restart()
    start = 0.0
    async with asyncio.TaskGroup() as group:
        for plan in plans:
            if rate > 0:
                start += generator.expovariate(rate)
                await asyncio.sleep(max(start - client.now(), 0.0))
            await slots.acquire()
            group.create_task(one(plan))
    return samples, client.now()


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` percent lie, between neighbours by line. Raises ValueError without values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * share / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles; empty without values."""
    if not values:
        return {}
    found = {"mean": sum(values) / len(values)}
    return found | {f"p{share}": percentile(values, share) for share in PERCENTILES}


def figures(samples: Sequence[Sample], seconds: float) -> dict[str, object]:
    """What a run came to. Milliseconds for latencies, tokens a second for rates."""
    good = [sample for sample in samples if not sample.error]
    prompt, cached = sum(one.prompt_tokens for one in good), sum(one.cached_tokens for one in good)
    output = sum(one.output_tokens for one in good)
    per_token = [
        (one.chunks[-1] - one.chunks[0]) / (one.output_tokens - 1) * 1e3
        for one in good
        if one.output_tokens > 1 and len(one.chunks) > 1
    ]
    found: dict[str, object] = {
        "requests": len(samples),
        "failed": len(samples) - len(good),
        "errors": dict(Counter(one.error for one in samples if one.error).most_common(5)),
        "seconds": seconds,
        "requests_per_s": len(good) / seconds if seconds else 0.0,
        "output_tokens": output,
        "output_tokens_per_s": output / seconds if seconds else 0.0,
        "prompt_tokens": prompt,
        "prompt_tokens_per_s": prompt / seconds if seconds else 0.0,
        "cached_tokens": cached,
        "cache_hit_rate": cached / prompt if prompt else 0.0,
        "ttft_ms": spread([one.ttft * 1e3 for one in good if one.ttft is not None]),
        "itl_ms": spread([gap * 1e3 for one in good for gap in one.gaps]),
        "tpot_ms": spread(per_token),
        "e2e_ms": spread([(one.ended - one.begun) * 1e3 for one in good]),
    }
    checked = [one.valid for one in good if one.valid is not None]
    if checked:
        found["valid_share"] = sum(checked) / len(checked)
    kinds = list(dict.fromkeys(one.kind for one in good))
    if len(kinds) > 1:
        found["by_kind"] = {kind: _of_kind([one for one in good if one.kind == kind]) for kind in kinds}
    times = {name for one in good for name in one.server_times}
    if times:
        found["server_ms"] = {
            name: spread([one.server_times[name] * 1e3 for one in good if name in one.server_times])
            for name in sorted(times)
        }
    return found


def _of_kind(samples: Sequence[Sample]) -> dict[str, object]:
    prompt = sum(one.prompt_tokens for one in samples)
    return {
        "requests": len(samples),
        "cache_hit_rate": sum(one.cached_tokens for one in samples) / prompt if prompt else 0.0,
        "ttft_ms": spread([one.ttft * 1e3 for one in samples if one.ttft is not None]),
    }


def table(found: dict[str, object]) -> str:
    """The figures for people."""
    lines = [
        f"requests         {found['requests']} ({found['failed']} failed) in {found['seconds']:.2f} s, "
        f"{found['requests_per_s']:.2f}/s",
        f"output           {found['output_tokens']} tokens, {found['output_tokens_per_s']:.1f}/s",
        f"prompts          {found['prompt_tokens']} tokens, {found['prompt_tokens_per_s']:.1f}/s, "
        f"{found['cache_hit_rate']:.1%} of them cached",
    ]
    if "valid_share" in found:
        lines.append(f"valid JSON       {found['valid_share']:.1%}")
    names = {"ttft_ms": "first token", "itl_ms": "between pieces", "tpot_ms": "a token", "e2e_ms": "whole request"}
    for key, name in names.items():
        spread_of = found[key]
        if isinstance(spread_of, dict) and spread_of:
            shown = "  ".join(f"{part} {value:9.2f}" for part, value in spread_of.items())
            lines.append(f"{name:<15}  {shown}  ms")
    kinds = found.get("by_kind")
    for kind, part in kinds.items() if isinstance(kinds, dict) else ():
        if part["ttft_ms"]:
            first = f"first token p50 {part['ttft_ms']['p50']:.2f} ms"
            lines.append(f"  {kind:<13}  {part['requests']:>5} requests, {part['cache_hit_rate']:6.1%} cached, {first}")
    errors = found["errors"]
    for words, count in errors.items() if isinstance(errors, dict) else ():
        lines.append(f"failed {count:>4} ×    {words}")
    return "\n".join(lines)
