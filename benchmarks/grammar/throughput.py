"""Tokens a second with and without a constraint at 16 at once, in one process, interleaved; steps with forced tokens.

Each round runs the constrained requests first, masked and with forced tokens, then as many tokens of the same prompts
without a constraint, in turning order: `python -m benchmarks.grammar.throughput [ROUNDS] [OUT.json] [--at-once N]
[--tokens N] [--only WORK]`. Constraints are compiled before the clock starts. Prints medians of the rounds' ratios, by
wall and by CPU time; the share of steps saved is a count, which a busy machine doesn't change.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from branchline.engine.cache import CacheContext, build_cache
from branchline.engine.errors import EngineError
from branchline.engine.executor.native import build_executor
from branchline.engine.grammar.hearth import Bounds, Hearth
from branchline.engine.grammar.manager import Compiled, Manager
from branchline.engine.grammar.pieces import lazily
from branchline.engine.grammar.testing import build_backend
from branchline.engine.loop import EngineLoop, LoopOptions
from branchline.engine.model.load import load_model
from branchline.engine.scheduler import SchedulerOptions
from branchline.engine.types import Delta, GrammarAsk, GrammarKind, Request, SamplingParams

from benchmarks.grammar.vocabulary import MODEL, Words

PAGES, SIZE = 2048, 16
AT_ONCE, TOKENS = 16, 64
PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "minLength": 2, "maxLength": 30},
        "occupation": {"enum": ["teacher", "engineer", "physician", "carpenter", "musician"]},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 120},
        "remarks": {"type": "string", "maxLength": 200},
    },
    "required": ["first_name", "occupation", "age_in_years", "remarks"],
    "additionalProperties": False,
}
CALL = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": '<tool_call>\n{"name": "register_person", "arguments": ',
        "content": {"type": "json_schema", "json_schema": PERSON},
        "end": "}\n</tool_call>",
    },
}
WORKS = {
    "json": GrammarAsk(GrammarKind.JSON, json.dumps(PERSON)),
    "free text in json": GrammarAsk(GrammarKind.JSON, '{"type": "array", "items": {"type": "string"}}'),
    "tool call": GrammarAsk(GrammarKind.STRUCTURAL_TAG, json.dumps(CALL)),
    "regex": GrammarAsk(GrammarKind.REGEX, "([A-Z][a-z]{1,9} ){20}[a-z]+"),
}


@dataclass(slots=True)
class Run:
    """What a run took and gave."""

    wall_s: float
    cpu_s: float
    steps: int
    counts: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Of all requests."""
        return sum(self.counts)


class Bench:
    """One executor and three loops over it, never run at once."""

    def __init__(self, at_once: int = AT_ONCE, tokens: int = TOKENS) -> None:
        self.most = [tokens] * at_once
        self.words = Words.of_model()
        self.executor = build_executor(
            load_model(MODEL), device="cpu", dtype="auto", num_pages=PAGES, page_size=SIZE, threads=None
        )
        context = self.words.context
        self.hearth = Hearth(context, ("llguidance",), Bounds(wall_s=60.0))
        self.hearth.start()
        pieces = lazily(self.words.native, context.vocab_size)
        backends = {"llguidance": build_backend("llguidance", context)}
        self.manager = Manager(self.hearth, backends, pieces=pieces)
        self.loops = {mode: self._loop(mode) for mode in ("plain", "masked", "forced")}
        self.number = 0

    def _loop(self, mode: str) -> EngineLoop:
        scheduler = SchedulerOptions(max_running_requests=AT_ONCE, max_step_tokens=512, forced_tokens=mode == "forced")
        cache = build_cache("native", CacheContext(PAGES, SIZE))
        options = LoopOptions(scheduler)
        return EngineLoop(self.executor, cache, self.words.native, options, draw_seed=lambda: 1, grammars=self.manager)

    def compile(self, ask: GrammarAsk) -> None:
        """Have a constraint remembered. These loops have no thread of their own: an answer that came from the
        compiling one later would come in the middle of a step."""
        done, found = threading.Event(), list[Compiled | EngineError]()

        def take(outcome: Compiled | EngineError) -> None:
            found.append(outcome)
            done.set()

        self.manager.request(ask, ask.tenant, take)
        assert done.wait(120), "a constraint was not compiled in two minutes"
        assert isinstance(found[0], Compiled), found[0]

    def run(self, mode: str, ask: GrammarAsk | None, most: list[int], turn: int) -> Run:
        """All requests at once; prompts are part of it."""
        loop, counts, ended = self.loops[mode], [0] * len(most), [0]

        def sink(place: int) -> Any:
            def take(step: int, deltas: list[Delta]) -> None:
                for delta in deltas:
                    assert delta.error is None, delta.error
                    counts[place] += len(delta.token_ids)
                    ended[0] += delta.finish is not None

            return take

        for place, limit in enumerate(most):
            self.number += 1
            prompt = self.words.encode(f"Round {turn}, person {place}, as data: ")
            sampling = SamplingParams(
                temperature=0.7, seed=turn * 100 + place, max_tokens=limit, ignore_eos=ask is None
            )
            loop.submit(Request(str(self.number), tuple(prompt), sampling, grammar=ask), sink(place))
        wall, cpu, steps = time.perf_counter(), time.process_time(), 0
        while ended[0] < len(most):
            steps += loop.step()
        return Run(time.perf_counter() - wall, time.process_time() - cpu, steps, counts)

    def round(self, name: str, turn: int) -> dict[str, Any]:
        """All three modes of one work."""
        found = {mode: self.run(mode, WORKS[name], self.most, turn) for mode in self._order(turn)}
        found["plain"] = self.run("plain", None, found["masked"].counts, turn)
        return {
            mode: {"tokens": one.tokens, "steps": one.steps, "wall_s": one.wall_s, "cpu_s": one.cpu_s}
            for mode, one in found.items()
        }

    @staticmethod
    def _order(turn: int) -> tuple[str, str]:
        return ("masked", "forced") if turn % 2 else ("forced", "masked")

    def close(self) -> None:
        """Stop the compiling process."""
        self.manager.close()


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over rounds of rates relative to the unconstrained run, and the share of steps that forcing saves."""
    out: dict[str, Any] = {}
    for mode in ("masked", "forced"):
        for clock in ("wall_s", "cpu_s"):
            ratios = [
                (one[mode]["tokens"] / one[mode][clock]) / (one["plain"]["tokens"] / one["plain"][clock])
                for one in rounds
            ]
            out[f"{mode} by {clock[:-2]}"] = round(statistics.median(ratios), 3)
    out["steps saved"] = round(
        statistics.median(1 - one["forced"]["steps"] / one["masked"]["steps"] for one in rounds), 3
    )
    return out


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Constrained beside unconstrained output of one engine.")
    parser.add_argument("rounds", nargs="?", type=int, default=5)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--at-once", type=int, default=AT_ONCE, choices=range(1, AT_ONCE + 1), metavar="N")
    parser.add_argument("--tokens", type=int, default=TOKENS, metavar="N", help="most of one answer")
    parser.add_argument("--only", action="append", choices=WORKS, metavar="WORK", help="these works")
    given = parser.parse_args()
    works = given.only or list(WORKS)
    bench = Bench(given.at_once, given.tokens)
    try:
        for name in works:
            bench.compile(WORKS[name])
            bench.round(name, 99)  # warms the cache of masks as a server is warm
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in works}
        for turn in range(given.rounds):
            for name in works:
                found[name].append(bench.round(name, turn))
    finally:
        bench.close()
    shown = {name: summary(one) for name, one in found.items()}
    print(json.dumps(shown, indent=1))
    if given.out:
        given.out.write_text(json.dumps({"summary": shown, "rounds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
