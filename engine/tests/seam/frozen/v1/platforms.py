"""A platform. Frozen: written for API version 1, never to be changed."""

from __future__ import annotations

import os


def note() -> None:
    """Tells the test that the plugin is in use."""
    if "ACME_NOTES" in os.environ:
        with open(os.environ["ACME_NOTES"], "a", encoding="ascii") as notes:
            notes.write("platforms\n")


class Plugin:
    """A cpu, chosen by name only."""

    api_version = 1
    rank = -1
    device = "cpu"
    dtype = "float32"
    executors = ("torch", "acme")

    def devices(self) -> list[str]:
        return ["acme 9"]

    def room(self, weights: int) -> float:
        note()
        return max(0.0, float((256 << 20) - weights))
