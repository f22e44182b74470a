"""The GPU check's report: what breaks, runs late or is absent is a row, and only a failed comparison fails."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from benchmarks.gpu.report import Report


def test_a_section_that_breaks_fails_and_the_next_one_runs(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    report = Report(out, by_cpu=True)
    with report.section("first", 10):
        report.figure("speed", 1.5, "tok/s", ms=2.0)
        raise ValueError("no such kernel")
    with report.section("second", 10):
        report.check("close", 0.5, 1.0)
    written = json.loads(out.read_text())
    assert written["passed"] is False and not report.passed
    rows = [(row["section"], row["name"]) for row in written["rows"]]
    assert rows == [
        ("first", "speed"), ("first", "section"), ("first", "seconds"), ("second", "close"), ("second", "seconds"),
    ]  # fmt: skip
    assert written["rows"][1]["error"] == "ValueError: no such kernel"


def test_a_section_ends_with_its_time_even_where_everything_is_caught(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(None, by_cpu=True)
    with report.section("slow", 0.05):
        assert report.left_s() <= 0.05
        with contextlib.suppress(Exception):
            while True:
                pass
    assert report.passed, "no time is no failure"
    assert "absent: its 0 s are over" in capsys.readouterr().out


@pytest.mark.parametrize(("worst", "passed"), [(1.0, True), (1.0001, False), (float("nan"), False)])
def test_a_comparison_passes_up_to_what_is_allowed_and_nan_never_does(worst: float, passed: bool) -> None:
    report = Report(None, by_cpu=True)
    report.check("close", worst, 1.0)
    report.absent("flashinfer", "not installed")
    assert report.passed is passed
