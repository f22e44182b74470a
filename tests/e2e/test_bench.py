"""`branchline bench` against the real stack, through its command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import Starter
from .stack import free_port

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
SMALL = ("--requests", "4", "--concurrency", "2", "--input-tokens", "20", "--output-tokens", "8", "--warmup", "1")


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "branchline.cli", "bench", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def measured(stacks: Starter, tmp_path: Path, *words: str) -> tuple[dict[str, Any], str]:
    """The document that a good run wrote, and what it printed."""
    out = tmp_path / "out.json"
    done = bench(*words, "--url", stacks().url, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text()), done.stdout


def test_throughput_counts_what_was_asked_for_and_draws_it(stacks: Starter, tmp_path: Path) -> None:
    for suffix, magic in (("svg", b"<?xml"), ("png", b"\x89PNG")):
        picture = tmp_path / f"run.{suffix}"
        found, shown = measured(stacks, tmp_path, "throughput", *SMALL, "--plot", str(picture))
        assert picture.read_bytes().startswith(magic)
    figures = found["figures"]
    assert (figures["requests"], figures["failed"], figures["output_tokens"]) == (4, 0, 32)
    assert 10 <= figures["prompt_tokens"] / 4 <= 40, "the length was calibrated to about 20 tokens"
    assert figures["output_tokens_per_s"] == pytest.approx(32 / figures["seconds"])
    assert all(len(one["chunks"]) >= 1 and one["ended"] > one["begun"] for one in found["samples"])
    assert "first token" in shown and "between pieces" in shown


def test_a_shared_prefix_and_a_fork_hit_the_cache(stacks: Starter, tmp_path: Path) -> None:
    stacks().flush()
    found, _ = measured(
        stacks, tmp_path, "shared-prefix", *SMALL, "--shared-tokens", "200", "--groups", "1", "--seed", "5"
    )
    kinds = found["figures"]["by_kind"]
    assert kinds["first"]["requests"] == 1 and kinds["request"]["cache_hit_rate"] > 0.5
    found, shown = measured(
        stacks, tmp_path, "fork", *SMALL, "--requests", "1", "--shared-tokens", "200", "--branches", "3"
    )
    kinds = found["figures"]["by_kind"]
    assert kinds["branch"]["requests"] == 3 and kinds["branch"]["cache_hit_rate"] > 0.5
    assert "branch" in shown


def test_conversations_go_on_with_what_was_said(stacks: Starter, tmp_path: Path) -> None:
    found, _ = measured(stacks, tmp_path, "multi-turn", *SMALL, "--requests", "2", "--turns", "3")
    kinds = found["figures"]["by_kind"]
    assert [kinds[f"turn {turn}"]["requests"] for turn in (1, 2, 3)] == [2, 2, 2]
    assert kinds["turn 3"]["cache_hit_rate"] > 0


def test_wrong_options_and_a_server_that_is_not_there_are_told(tmp_path: Path) -> None:
    done = bench("thruput", "--requests", "0", "--plot", "a.gif")
    assert done.returncode == 2
    for part in ("throughput", "requests"):
        assert part in done.stderr
    done = bench("throughput", "--plot", "a.gif")
    assert done.returncode == 2 and "must end with .svg or .png" in done.stderr
    url = f"http://127.0.0.1:{free_port()}"
    done = bench("throughput", "--url", url)
    assert done.returncode == 1 and url in done.stderr and "Traceback" not in done.stderr


def test_failed_requests_are_counted_with_their_reason(stacks: Starter, tmp_path: Path) -> None:
    done = bench("throughput", *SMALL, "--url", stacks().url, "--output-tokens", "999999")
    assert done.returncode == 1, done.stdout
    assert "4 (4 failed)" in done.stdout and "max_tokens" in done.stdout
