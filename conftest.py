"""Settings of every Python test: what must hold before torch is imported, and which tests get a second try."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

# Waiting threads that spin stall each other when tests share the cores with anything else.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# How long one example takes says nothing on a machine that others share.
hypothesis.settings.register_profile("shared", deadline=None)
hypothesis.settings.load_profile("shared")

# Tests of several processes under a scheduler that owes them nothing: one more try, told as RERUN in the summary.
SEVERAL_PROCESSES = ("tests/e2e", "tests/k8s", "engine/tests/cli", "engine/tests/handover", "engine/tests/service")


GIB_A_WORKER = 4  # torch, a model or two and what their tests start


def pytest_xdist_auto_num_workers() -> int:
    """For `-n auto`: one more than there are cores, since tests wait for processes, as far as memory goes."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(len(os.sched_getaffinity(0)) + 1, memory // (GIB_A_WORKER << 30)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = Path(__file__).parent
    # Files that take longest go first, so that no worker is left with one of them at the end.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    folders = [root / name for name in SEVERAL_PROCESSES]
    for item in items:
        if any(folder in item.path.parents for folder in folders):
            item.add_marker(pytest.mark.flaky(reruns=1))
