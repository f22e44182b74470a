"""An executor. Frozen: written for API version 1, never to be changed."""

from __future__ import annotations

import os

from branchline.engine.executor.pytorch import build_executor
from branchline.engine.types import Executor


def note() -> None:
    """Tells the test that the plugin is in use."""
    if "ACME_NOTES" in os.environ:
        with open(os.environ["ACME_NOTES"], "a", encoding="ascii") as notes:
            notes.write("executors\n")


def Plugin(*given: object, **options: object) -> Executor:
    """Builds the torch executor."""
    note()
    return build_executor(*given, **options)  # type: ignore[arg-type]
