"""JSON-Schema-Test-Suite against the compiler: right, wrongly accepted, wrongly refused, declined, by file.

`python -m benchmarks.grammar.suite FOLDER DIALECT` prints the sums and every wrong verdict as JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from branchline.engine.errors import EngineError
from branchline.engine.grammar.refusal import GrammarInvalid
from branchline.engine.grammar.schema import SchemaOptions

from benchmarks.grammar.feed import Checker


@dataclass(slots=True)
class Score:
    """Verdicts counted by test. A schema that nothing fits may be refused: then no value is accepted."""

    right: int = 0
    declined: int = 0
    wrongly_accepted: list[str] = field(default_factory=list)
    wrongly_refused: list[str] = field(default_factory=list)


def run(folder: Path, dialect: str) -> Score:
    """Every test of the folder's core files (not of `optional`)."""
    score = Score()
    for path in sorted(folder.glob("*.json")):
        for case in json.loads(path.read_text()):
            checker: Checker | None = None
            try:
                checker = Checker(case["schema"], SchemaOptions(dialect=dialect))
            except EngineError as error:
                if not (isinstance(error, GrammarInvalid) and "no value fits" in error.message):
                    score.declined += len(case["tests"])
                    continue
            for test in case["tests"]:
                accepted = checker is not None and checker.accepts(test["data"])
                name = f"{path.stem}: {case['description']}: {test['description']}"
                if accepted == test["valid"]:
                    score.right += 1
                elif accepted:
                    score.wrongly_accepted.append(name)
                else:
                    score.wrongly_refused.append(name)
    return score


if __name__ == "__main__":
    found = run(Path(sys.argv[1]), sys.argv[2])
    print(
        json.dumps(
            {
                "right": found.right,
                "declined": found.declined,
                "wrongly_accepted": found.wrongly_accepted,
                "wrongly_refused": found.wrongly_refused,
            },
            indent=1,
        )
    )
