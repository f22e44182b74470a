"""The one test that all suites need, for runs without test files of one's own: `--pyargs branchline.testing.suite`."""

from __future__ import annotations

from collections.abc import Callable


def test_conformance(conformance_check: Callable[[], None]) -> None:
    """One check of what `--conformance` names; the fixture is `branchline.testing.plugin`'s."""
    conformance_check()
