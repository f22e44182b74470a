"""`branchline bench SCENARIO`: measure an OpenAI-compatible server, print figures, write JSON and a picture."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from branchline.bench import measure, plot
from branchline.bench.client import Client, Sample
from branchline.bench.options import BenchConfig
from branchline.bench.workload import Workload, words_per_token
from branchline.cli.engine import report
from branchline.engine import options

PROG = "branchline bench"
_DESCRIPTION = (
    "Measures a server that speaks OpenAI's API, from outside. throughput: prompts that share nothing; shared-prefix: "
    "few long beginnings, many ends; multi-turn: conversations; fork: one text, many continuations at once; json: "
    "answers that must follow a schema."
)


def run(argv: Sequence[str]) -> int:
    """0 if every request was answered, 1 if one failed or the server can't be used, 2 for wrong options."""
    parser = options.parser(BenchConfig, PROG, _DESCRIPTION)
    flags, faults = options.flags_of(BenchConfig, parser, argv)
    env = {key: value for key, value in os.environ.items() if key.startswith("BRANCHLINE_BENCH_")}
    try:
        config = options.resolve(BenchConfig, flags=flags, env=env, faults=faults)
    except options.ConfigError as error:
        report(PROG, error.faults)
        return 2
    wrong = [words for words in (_out_fault(config.out), plot.fault(config.plot) if config.plot else None) if words]
    if wrong:
        report(PROG, wrong)
        return 2
    try:
        samples, found, model = asyncio.run(_measure(config))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(measure.table(found))
    if config.out:
        text = json.dumps(_document(config, model, found, samples), indent=1)
        Path(config.out).write_text(text + "\n", "utf-8")
    if config.plot:
        plot.write(config.plot, samples, f"{config.scenario}: {model} at {config.url}")
    return 1 if found["failed"] else 0


def _out_fault(path: str | None) -> str | None:
    if path is None or Path(path).resolve().parent.is_dir():
        return None
    return f"out {path!r} is in a folder that does not exist"


async def _measure(config: BenchConfig) -> tuple[list[Sample], dict[str, object], str]:
    async with Client(config.url, config.api_key, config.timeout) as client:
        model = config.model
        if model is None:
            listed = await client.models()
            if not listed:
                raise OSError(f"{config.url} lists no model: name one with --model")
            model = listed[0]
        workload = Workload(config, client, model, await words_per_token(client, model))
        for number in range(config.warmup):
            await workload.warmup(number)(lambda _: None)
        plans = workload.plans()
        progress = measure.ProgressLine(len(plans))
        samples, seconds = await measure.run(plans, client, config.concurrency, config.rate, config.seed, progress)
        return samples, measure.figures(samples, seconds), model


def _document(
    config: BenchConfig, model: str, found: dict[str, object], samples: Sequence[Sample]
) -> dict[str, object]:
    """Options, figures and every request without its text."""
    each = []
    for sample in samples:
        fields = dataclasses.asdict(sample)
        del fields["text"]
        each.append(fields)
    return {"options": options.public(config), "model": model, "figures": found, "samples": each}
