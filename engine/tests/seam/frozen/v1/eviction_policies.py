"""An eviction policy. Frozen: written for API version 1, never to be changed."""

from __future__ import annotations

import os


def note() -> None:
    """Tells the test that the plugin is in use."""
    if "ACME_NOTES" in os.environ:
        with open(os.environ["ACME_NOTES"], "a", encoding="ascii") as notes:
            notes.write("eviction_policies\n")


class Plugin:
    """What was used least goes first."""

    def __init__(self) -> None:
        note()

    def rank(self, uses: int, priority: int) -> int:
        return min(uses, 255)
