"""A serve backend. Frozen: written for API version 1, never to be changed."""

from __future__ import annotations

import os
import sys

from branchline.cli.backends import Ask, Command, Detection
from branchline.cli.backends.own import OwnEngine


def note() -> None:
    """Tells the test that the plugin is in use."""
    if "ACME_NOTES" in os.environ:
        with open(os.environ["ACME_NOTES"], "a", encoding="ascii") as notes:
            notes.write("serve_backends\n")


class Plugin(OwnEngine):
    """Our engine under another name."""

    api_version = 1

    def detect(self, model: str) -> Detection:
        return Detection(0.1, "acme serves anything")

    def launch(self, ask: Ask) -> Command:
        note()
        words = [sys.executable, "-m", "branchline.cli", "engine", ask.model, *ask.arguments]
        return Command((*words, f"--host={ask.host}", f"--port={ask.port}"))
