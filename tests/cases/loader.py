"""Reads the cases: one JSON object a line, one file an area (README.md beside this file)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent


@cache
def area(name: str) -> dict[str, dict[str, Any]]:
    """All cases of an area by id."""
    lines = (FOLDER / f"{name}.jsonl").read_text().splitlines()
    return {case["id"]: case for case in map(json.loads, lines)}


def case(case_id: str) -> dict[str, Any]:
    """One case by its id, whatever its area."""
    for path in sorted(FOLDER.glob("*.jsonl")):
        found = area(path.stem).get(case_id)
        if found is not None:
            return found
    raise KeyError(case_id)
