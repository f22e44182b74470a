"""A hook. Frozen: written for API version 1, never to be changed."""

from __future__ import annotations

import os

from branchline.engine.types import Delta, Request


def note() -> None:
    """Tells the test that the plugin is in use."""
    if "ACME_NOTES" in os.environ:
        with open(os.environ["ACME_NOTES"], "a", encoding="ascii") as notes:
            notes.write("hooks\n")


class Plugin:
    """Sees what ends."""

    api_version = 1
    point = "request.end"
    point_version = 1
    mode = "before"
    priority = 0

    def __call__(self, request: Request, delta: Delta) -> None:
        note()
