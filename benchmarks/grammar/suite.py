"""JSON-Schema-Test-Suite against a grammar backend: right, wrongly accepted, wrongly refused, declined, by file.

`python -m benchmarks.grammar.suite FOLDER DIALECT [BACKEND …]` prints the sums and every wrong verdict as JSON;
backends as in `peers`, this repository's by default.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.grammar.boxed import each
from benchmarks.grammar.feed import accepts
from benchmarks.grammar.peers import PEERS, Refused

WALL_S = 20.0


@dataclass(slots=True)
class Score:
    """Verdicts counted by test. A schema that nothing fits may be refused: then no value is accepted."""

    right: int = 0
    declined: int = 0
    lost: int = 0  # the backend hung, crashed or ran out of memory
    wrongly_accepted: list[str] = field(default_factory=list)
    wrongly_refused: list[str] = field(default_factory=list)

    def shown(self, names: bool) -> dict[str, Any]:
        """As JSON; the wrong ones by number only unless `names`."""
        wrong = {"wrongly_accepted": self.wrongly_accepted, "wrongly_refused": self.wrongly_refused}
        sums = {"right": self.right, "declined": self.declined, "lost": self.lost}
        return {**sums, **{key: (value if names else len(value)) for key, value in wrong.items()}}


def cases(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Every case of the folder's core files (not of `optional`), with its name."""
    return [
        (f"{path.stem}: {case['description']}", case)
        for path in sorted(folder.glob("*.json"))
        for case in json.loads(path.read_text())
    ]


def asker(backend: str, dialect: str) -> Callable[[], Callable[[Any], Any]]:
    """Makes what answers a schema and its values: a list of verdicts, or None where the schema is declined."""

    def make() -> Callable[[Any], Any]:
        peer = PEERS[backend]()

        def ask(case: dict[str, Any]) -> list[bool] | None:
            try:
                walk = peer.compile(case["schema"], dialect)
            except Refused as refused:
                return [False] * len(case["tests"]) if refused.empty else None
            return [accepts(walk, test["data"]) for test in case["tests"]]

        return ask

    return make


def run(folder: Path, dialect: str, backend: str = "ours", boxed: bool = True) -> Score:
    """Every test of the folder; `boxed` in a child with limits, as peers need it."""
    score = Score()
    named = cases(folder)
    make, rows = asker(backend, dialect), [case for _, case in named]
    answers = each(make, rows, WALL_S) if boxed else map(make(), rows)
    for (name, case), verdicts in zip(named, answers, strict=True):
        if verdicts is None:
            score.declined += len(case["tests"])
        elif isinstance(verdicts, str):
            score.lost += len(case["tests"])
        else:
            for test, accepted in zip(case["tests"], verdicts, strict=True):
                _count(score, f"{name}: {test['description']}", accepted, test["valid"])
    return score


def _count(score: Score, name: str, accepted: bool, valid: bool) -> None:
    if accepted == valid:
        score.right += 1
    elif accepted:
        score.wrongly_accepted.append(name)
    else:
        score.wrongly_refused.append(name)


if __name__ == "__main__":
    names = sys.argv[3:] or ["ours"]
    found = {name: run(Path(sys.argv[1]), sys.argv[2], name).shown(name == "ours") for name in names}
    print(json.dumps(found, indent=1))
