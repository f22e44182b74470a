"""The runners that hold constraints to their bars: what they count, what they survive, and their frozen sample."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.grammar import hostile, maskbench, suite, throughput
from benchmarks.grammar.peers import PEERS, Refused

ROOT = Path(__file__).resolve().parents[3]
RATCHET = json.loads((ROOT / "benchmarks/grammar/ratchet.json").read_text())
DATA = next((one for one in (ROOT.parent / "shared/data", ROOT.parents[1] / "shared/data") if one.is_dir()), None)
CASES: list[dict[str, Any]] = [
    {
        "description": "bounds",
        "schema": {"type": "integer", "minimum": 2},
        "tests": [
            {"description": "above", "data": 3, "valid": True},
            {"description": "below", "data": 1, "valid": False},
            {"description": "what the suite has wrong here", "data": 1, "valid": True},
            {"description": "and so here", "data": 3, "valid": False},
        ],
    },
    {
        "description": "what nobody enforces",
        "schema": {"type": "string", "pattern": "(a)\\1"},
        "tests": [{"description": "one", "data": "aa", "valid": True}],
    },
    {
        "description": "nothing fits",
        "schema": False,
        "tests": [{"description": "one", "data": 1, "valid": False}],
    },
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A suite of its own."""
    (tmp_path / "made.json").write_text(json.dumps(CASES))
    return tmp_path


@pytest.mark.parametrize("backend", ["ours", "llguidance"])
def test_verdicts_are_counted_by_what_the_suite_says(folder: Path, backend: str) -> None:
    score = suite.run(folder, "2020-12", backend, boxed=False)
    assert (score.right, score.lost) == (3 if backend == "ours" else score.right, 0)
    assert score.wrongly_accepted == ["made: bounds: and so here"]
    assert score.wrongly_refused == ["made: bounds: what the suite has wrong here"]
    assert score.declined >= 1


def test_every_backend_at_hand_tells_values_from_others() -> None:
    for name in ("ours", "llguidance", "outlines"):
        walk = PEERS[name]().compile({"type": "boolean"})
        assert [walk.accepts(text.encode()) for text in ("true", "tru", "truex", "1")] == [True, False, False, False]
    with pytest.raises(Refused):
        PEERS["ours"]().compile({"type": "nothing"})


def test_a_walk_tells_what_was_forced_and_the_cost_of_each_mask() -> None:
    walk = PEERS["ours"]().compile({"const": "abcdef"})
    text = b'"abcdef"'
    assert walk.forced(text) == len(text), "nothing of a constant is a choice"
    assert len(walk.masks(text)) == len(text) + 1
    free = PEERS["ours"]().compile({"type": "string"})
    assert free.forced(b'"abc"') == 1, "only the first quote is"


def test_a_backend_that_dies_or_hangs_loses_one_answer_only(tmp_path: Path) -> None:
    """In a process of its own: this one has threads, and forks."""
    program = tmp_path / "boxes.py"
    program.write_text(
        "import json, os, time\n"
        "from benchmarks.grammar.boxed import each\n"
        "def make():\n"
        "    def ask(row):\n"
        "        if row == 'die': os._exit(3)\n"
        "        if row == 'hang': time.sleep(3600)\n"
        "        if row == 'grow': return len(bytearray(8 << 30))\n"
        "        return [row]\n"
        "    return ask\n"
        "lost = list(each(make, ['a', 'die', 'b', 'grow', 'c'], 120.0))\n"
        "print(json.dumps([lost, list(each(make, ['hang'], 0.0))]))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(program)], env=env, capture_output=True, text=True, timeout=170)
    assert json.loads(done.stdout) == [[["a"], "died", ["b"], "died", ["c"]], ["timeout"]], done.stderr


def test_hostile_constraints_are_all_told_apart_and_readable() -> None:
    asks = hostile.asks()
    assert len({name for name, _ in asks}) == len(asks) > 30
    assert all(ask.kind != "json_schema" or ask.text.startswith("{") for _, ask in asks)


@pytest.mark.model
@pytest.mark.timeout(900)
def test_a_hostile_constraint_goes_the_way_of_a_request() -> None:
    found = hostile.run(300.0, 512 << 20, ("(^20000", "{1,129}$"))
    assert found["ebnf: (^20000"]["verdict"] == "invalid_argument"
    served = found["json: ^[^\\n]{1,129}$"]
    assert served["verdict"] == "served" and served["masks"] >= hostile.WALKS


def test_rates_are_medians_of_the_rounds_own_ratios() -> None:
    plain = {"tokens": 100, "steps": 100, "wall_s": 1.0, "cpu_s": 1.0}
    rounds = [
        {"plain": plain, "masked": {**plain, "wall_s": wall}, "forced": {**plain, "steps": steps, "cpu_s": 0.5}}
        for wall, steps in ((1.25, 80), (2.0, 90), (1.0, 70))
    ]
    found = throughput.summary(rounds)
    assert found["masked by wall"] == 0.8 and found["masked by cpu"] == 1.0
    assert found["forced by cpu"] == 2.0 and found["steps saved"] == 0.2


@pytest.mark.skipif(DATA is None, reason="NOT RUN: the shared data folder with the sample of real schemas is absent")
def test_a_frozen_sample_of_real_schemas_does_not_get_worse() -> None:
    assert DATA is not None
    found = maskbench.run(DATA / "jsonschema/maskbench_sample.jsonl", 90, measured=False, boxed=False)
    for verdict, most in RATCHET["maskbench, every 90th"].items():
        assert found.get(verdict, 0) <= most, found
    assert found["passed"] >= 15
