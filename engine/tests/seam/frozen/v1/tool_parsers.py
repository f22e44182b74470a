"""A parser of tool calls. Frozen: written for API version 1, never to be changed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any


def note() -> None:
    """Tells the test that the plugin is in use."""
    if "ACME_NOTES" in os.environ:
        with open(os.environ["ACME_NOTES"], "a", encoding="ascii") as notes:
            notes.write("tool_parsers\n")


class Plugin:
    """Finds no calls."""

    def __init__(self, tools: Sequence[dict[str, Any]] = ()) -> None:
        note()

    def push(self, text: str) -> list[tuple[str, str]]:
        return [("text", text)] if text else []

    def finish(self) -> list[tuple[str, str]]:
        return []
