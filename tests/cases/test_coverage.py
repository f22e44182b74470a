"""Every case of the areas that this version claims is carried by a test; the others are named as not claimed."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from .loader import FOLDER, area

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("crates", "gateway", "bindings", "engine", "tests")
CLAIMED = (
    "text",
    "sampling",
    "logprobs",
    "cache",
    "scheduler",
    "abort",
    "api",
    "streaming",
    "loading",
    "seam",
    "dsl",
    "headers",
    "grammar",
    "tools",
    "admission",
    "retry",
    "wasm",
    "discovery",
)
NOT_CLAIMED = {
    "routing": "most have tests; those of a replay of lost cache events have none",
    "pd": "prefill and decode run in one worker",
    "health": "breakers have tests; an engine's warm-up and dead scheduler have none",
    "security": "the gateway's cases have tests; templates' budget and open sockets have none",
}
# Cases of claimed areas that wait for another part.
LATER = {
    "tools-no-parallel-calls": "no constraint of automatic calls yet",
}


@cache
def names_of_tests() -> frozenset[str]:
    """Names of all test functions of the repository, and ids that a test looks up."""
    found: set[str] = set()
    for top in SOURCES:
        for path in (ROOT / top).rglob("*"):
            if path == Path(__file__) or path.suffix not in (".py", ".rs") or "target" in path.parts:
                continue
            text = path.read_text()
            if path.suffix == ".py":
                found.update(re.findall(r"def test_(\w+)", text))
                found.update(one.replace("-", "_") for one in re.findall(r"case\(\"([a-z0-9-]+)\"\)", text))
            else:
                found.update(re.findall(r"#\[(?:tokio::)?test[^\]]*\]\s+(?:async )?fn (\w+)", text))
                found.update(one.replace("-", "_") for one in re.findall(r"\"([a-z0-9]+(?:-[a-z0-9]+){2,})\"", text))
    return frozenset(found)


def carried(case_id: str) -> bool:
    """Whether a test has the case's id in its name or looks the case up."""
    name = case_id.replace("-", "_")
    return any(one == name or one.startswith(name + "_") for one in names_of_tests())


@pytest.mark.parametrize("name", CLAIMED)
def test_every_case_of_a_claimed_area_is_a_test(name: str) -> None:
    missing = [case_id for case_id in area(name) if not carried(case_id) and case_id not in LATER]
    assert not missing


def test_every_area_is_claimed_or_said_not_to_be() -> None:
    files = {path.stem for path in FOLDER.glob("*.jsonl")}
    assert files == {*CLAIMED, *NOT_CLAIMED}
    assert not {*CLAIMED} & {*NOT_CLAIMED}


def test_an_unknown_case_is_not_carried() -> None:
    assert not carried("text-no-such-case-anywhere")
