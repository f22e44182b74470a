"""Triton in the interpreter, or compiling only, for the length of one test file and for nobody else.

Triton decides when it is first imported whether its functions are interpreted. So it is imported anew here, with the
variable set for that import alone, and whatever the process had imported before is put back afterwards.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

VARIABLE = "TRITON_INTERPRET"
OURS = "branchline.engine.kernels.compiled"

_KEPT: dict[bool, dict[str, ModuleType]] = {}  # both forms, once imported: files share them


def _loaded() -> dict[str, ModuleType]:
    """Modules that were made by an import of Triton. Its native ones can't be made twice in a process."""
    return {
        name: module
        for name, module in sys.modules.items()
        if (name.split(".")[0] == "triton" and not name.startswith("triton._C")) or name.startswith(OURS)
    }


@contextmanager
def fresh_triton(*, interpreted: bool) -> Iterator[None]:
    """Triton and our kernels as if never imported; what was there comes back at the end."""
    before, variable = _loaded(), os.environ.pop(VARIABLE, None)
    kept = _KEPT.setdefault(interpreted, {})
    for name in before:
        del sys.modules[name]
    try:
        if interpreted:
            os.environ[VARIABLE] = "1"
        sys.modules.update(kept)
        importlib.import_module("triton.language")
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if variable is not None:
            os.environ[VARIABLE] = variable
        kept.update(_loaded())
        for name in kept:
            del sys.modules[name]
        sys.modules.update(before)


class Interpreted:
    """Our Triton modules by name, interpreted."""

    def __getattr__(self, name: str) -> ModuleType:
        return importlib.import_module(f"{OURS}.{name}")


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Interpreted]:
    """`interpreted.attention` and so on run on CPU tensors."""
    pytest.importorskip("triton", reason="no Triton for this platform")
    with fresh_triton(interpreted=True):
        yield Interpreted()


@pytest.fixture(scope="module")
def compiling() -> Iterator[None]:
    """Triton as it is on a GPU."""
    pytest.importorskip("triton", reason="no Triton for this platform")
    with fresh_triton(interpreted=False):
        yield
