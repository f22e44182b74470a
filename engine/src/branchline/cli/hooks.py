"""The hooks part of `branchline plugins`: which hooks stand where, in their order, and what they have cost.

Costs are a running engine's: they are read from its metrics.
"""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Mapping

from branchline.engine.errors import EngineError
from branchline.engine.hooks import Chain, assemble
from branchline.engine.service.metrics import PREFIX

_SAMPLE = re.compile(rf'{PREFIX}hook_(calls|seconds|failures)_total{{hook="((?:[^"\\]|\\.)*)",point="([^"]*)"}} (\S+)')
Costs = Mapping[tuple[str, str], Mapping[str, float]]


def rows(metrics_url: str | None) -> tuple[list[dict[str, object]], str]:
    """One row a hook in the order of its point, with its cost if an engine's metrics are named; and what went wrong."""
    try:
        chain = assemble()
        costs = fetch(metrics_url) if metrics_url else {}
    except (EngineError, OSError, ValueError) as error:
        return [], str(error)
    return [_row(chain, costs, index) for index in range(len(chain.hooks))], ""


def _row(chain: Chain, costs: Costs, index: int) -> dict[str, object]:
    one = chain.hooks[index]
    row: dict[str, object] = {
        "point": f"{one.point.name} {one.point.version}",
        "name": one.name,
        "mode": str(one.mode),
        "priority": one.priority,
        "ends": str(one.point.fault),
    }
    found = costs.get((one.name, one.point.name))
    if found is not None:
        calls = found.get("calls", 0.0)
        row["calls"] = int(calls)
        row["mean_us"] = round(1e6 * found.get("seconds", 0.0) / calls, 1) if calls else 0.0
        row["failures"] = int(found.get("failures", 0.0))
    return row


def fetch(url: str) -> Costs:
    """The hooks' counters at an engine's `--metrics-port`. Raises OSError or ValueError."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"metrics-url {url!r} must be an http address, such as http://127.0.0.1:9100/metrics")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as answer:
        return parse(answer.read().decode("utf-8", "replace"))


def parse(text: str) -> Costs:
    """(hook, point) → its counters, from Prometheus text."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for counter, hook, point, value in _SAMPLE.findall(text):
        found.setdefault((hook, point), {})[counter] = float(value)
    return found
