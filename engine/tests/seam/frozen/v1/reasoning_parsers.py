"""A parser of reasoning. Frozen: written for API version 1, never to be changed."""

from __future__ import annotations

import os


def note() -> None:
    """Tells the test that the plugin is in use."""
    if "ACME_NOTES" in os.environ:
        with open(os.environ["ACME_NOTES"], "a", encoding="ascii") as notes:
            notes.write("reasoning_parsers\n")


class Plugin:
    """Takes all for the answer."""

    def __init__(self, opened: bool = False, closed: bool = False) -> None:
        note()

    def push(self, text: str) -> list[tuple[str, str]]:
        return [("text", text)] if text else []

    def finish(self) -> list[tuple[str, str]]:
        return []
