"""A loop over the tiny executor whose constraints are compiled at once, on the caller's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from branchline.engine.errors import InvalidArgument
from branchline.engine.grammar.base import BaseGrammarBackend, GrammarContext
from branchline.engine.grammar.foundry import checked
from branchline.engine.grammar.guidance import GuidanceBackend
from branchline.engine.grammar.hearth import Done
from branchline.engine.grammar.manager import Manager
from branchline.engine.grammar.pieces import lazily
from branchline.engine.grammar.refusal import GrammarUnsupported
from branchline.engine.types import GrammarAsk, GrammarKind
from harness import EOS, Engine, tokenizer_json, vocabulary
from tiny import VOCAB

PROMPT = [40, 41, 42, 43, 44]


class Here:
    """A Compiler that compiles on the caller's thread, or holds jobs back."""

    def __init__(self, backend: BaseGrammarBackend) -> None:
        self.backend = backend
        self.held: list[Callable[[], None]] | None = None
        self.cancelled: list[int] = []
        self.count = 0

    def submit(self, backend: str, kind: GrammarKind, text: str, done: Done) -> int:
        def run() -> None:
            try:
                done({"compiled": self.backend.compile(kind, text), "ms": 1.0})
            except GrammarUnsupported as error:
                done({"unsupported": error.message, "keyword": error.keyword, "pointer": error.pointer})
            except InvalidArgument as error:
                done({"invalid": error.message, "pointer": None})

        self.count += 1
        run() if self.held is None else self.held.append(run)
        return self.count

    def check(self, schema: str, value: str, done: Done) -> int:
        done(checked(schema, value))
        return 0

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)

    def close(self) -> None:
        pass


class Constrained(Engine):
    """An engine with llguidance over the tiny vocabulary."""

    def __init__(self, **options: Any) -> None:
        backend = GuidanceBackend(GrammarContext(tokenizer_json(), VOCAB, (EOS,)))
        self.compiler = Here(backend)
        self.manager = Manager(self.compiler, {"llguidance": backend}, pieces=lazily(vocabulary(), VOCAB))
        super().__init__(grammars=self.manager, **options)

    def settle(self) -> None:
        """Wait until both of the manager's threads are through with what they had, and with what that asked for."""
        for _ in range(4):
            meeting = threading.Barrier(2)
            for there in [self.manager._loader.submit(meeting.wait, 60) for _ in range(2)]:
                there.result(60)


def ask(text: str, kind: GrammarKind = GrammarKind.REGEX) -> GrammarAsk:
    return GrammarAsk(kind, text)


def drive(engine: Constrained) -> None:
    """Turn until nothing is left, waiting for the manager in between."""
    for _ in range(2000):
        engine.step()
        if not engine.loop.busy:
            break
        if engine.loop.stats().running == 0:
            engine.settle()
    engine.finish()
