"""A grammar backend. Frozen: written for API version 1, never to be changed."""

from __future__ import annotations

import os

from branchline.engine.grammar.base import GrammarContext
from branchline.engine.grammar.guidance import GuidanceBackend


def note() -> None:
    """Tells the test that the plugin is in use."""
    if "ACME_NOTES" in os.environ:
        with open(os.environ["ACME_NOTES"], "a", encoding="ascii") as notes:
            notes.write("grammar_backends\n")


class Plugin(GuidanceBackend):
    """Ours under another name."""

    def __init__(self, context: GrammarContext) -> None:
        note()
        super().__init__(context)
