"""`branchline serve --prefill N --decode M`: which engines are started, and what does not go together."""

from __future__ import annotations

import pytest
from branchline.cli.serve import ServeConfig
from branchline.engine import options
from branchline.engine.config import EngineConfig


def test_roles_are_those_of_the_engines_in_their_order() -> None:
    assert ServeConfig(prefill=2, decode=1).roles == ("prefill", "prefill", "decode")
    assert ServeConfig().roles == ()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prefill": 1}, "need each other"),
        ({"decode": 2}, "need each other"),
        ({"prefill": 1, "decode": 1, "workers": 3}, "workers 3"),
    ],
)
def test_half_a_fleet_of_pairs_and_plain_workers_beside_one_are_refused(given: dict[str, int], said: str) -> None:
    with pytest.raises(options.ConfigError, match=said):
        options.resolve(ServeConfig, flags=given)


def test_a_role_needs_shared_prefixes() -> None:
    faults = EngineConfig(model="m", role="decode", disable_radix_cache=True).faults()
    assert any("role decode" in fault for fault in faults)
    assert not EngineConfig(model="m", role="decode").faults()
