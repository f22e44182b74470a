"""A speculative algorithm. Frozen: written for API version 1, never to be changed."""

from __future__ import annotations

import os

from branchline.engine.config import SpeculativeOptions
from branchline.engine.speculative.base import NOTHING, Ask, DraftContext, Drafted, Proposal


def note() -> None:
    """Tells the test that the plugin is in use."""
    if "ACME_NOTES" in os.environ:
        with open(os.environ["ACME_NOTES"], "a", encoding="ascii") as notes:
            notes.write("speculative_algorithms\n")


class Plugin:
    """Guesses that the last token comes again."""

    api_version = 1
    free = True
    wants_hidden = False

    def __init__(self, context: DraftContext) -> None:
        note()
        self.context = context

    @staticmethod
    def option_faults(options: SpeculativeOptions) -> list[str]:
        return []

    def propose(self, asked: list[Ask]) -> list[Proposal]:
        return [Proposal([ask.sequence.tokens[-1]] * ask.limit) if ask.sequence.tokens else NOTHING for ask in asked]

    def accepted(self, sequence: Drafted, hidden: object) -> None: ...

    def end(self, sequence: Drafted, finished: bool) -> None: ...

    def close(self) -> None: ...
