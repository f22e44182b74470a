"""Plugins that were written for each API version a kind has had: they must go on working, unchanged.

A change that breaks one of these needs a new version of its kind, what changed in `registry.py`, and a further frozen
sample; a sample is never edited.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from branchline import registry
from branchline.cli import extensions
from branchline.testing import SUITES, checks

FROZEN = Path(__file__).parent / "frozen"
GATEWAY = ("tool_parsers", "reasoning_parsers")
extensions.load([], {})
KINDS = {one.kind: one for one in registry.all_registries()}
VERSIONS = [(one.kind, version) for one in KINDS.values() for version in range(1, one.api_version + 1)]


def load(kind: str, version: int) -> ModuleType:
    """A sample as a module."""
    spec = importlib.util.spec_from_file_location(f"frozen_{kind}_{version}", FROZEN / f"v{version}" / f"{kind}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def sample(kind: str, version: int) -> Iterator[Any]:
    """A sample, registered as `frozen`."""
    store = KINDS[kind]
    store.register("frozen", api_version=version)(load(kind, version).Plugin)
    yield store.get("frozen")
    store._entries.pop("frozen")


@pytest.mark.parametrize(("kind", "version"), VERSIONS)
def test_there_is_a_sample_of_every_kind_and_version(kind: str, version: int) -> None:
    assert (FROZEN / f"v{version}" / f"{kind}.py").is_file()
    assert version == 1 or KINDS[kind].changes[version], "what changed is told"


@pytest.mark.parametrize("path", sorted(FROZEN.glob("v*/*.py")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_sample_has_not_been_edited(path: Path) -> None:
    digests = json.loads((FROZEN / "digests.json").read_text())
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digests[f"{path.parent.name}/{path.name}"]
    assert path.stem in {*KINDS, *GATEWAY}


@pytest.mark.parametrize(("kind", "version"), [(kind, 1) for kind in SUITES])
def test_a_sample_of_the_current_version_passes_its_kinds_suite(kind: str, version: int, sample: Any) -> None:
    assert KINDS[kind].api_version == version, "parametrise over the newest"
    each: dict[str, Callable[[], None]] = checks(kind, "frozen")
    assert len(each) == len(SUITES[kind]) + 1
    for check in each.values():
        check()


@pytest.mark.parametrize(("kind", "version"), [(kind, 1) for kind in KINDS if kind not in SUITES])
def test_a_sample_of_a_kind_without_a_suite_registers(kind: str, version: int, sample: Any) -> None:
    assert callable(sample) and KINDS[kind].entry("frozen").state == "loaded"
