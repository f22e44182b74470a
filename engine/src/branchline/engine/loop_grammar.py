"""Where requests enter the loop: queued at once, or once their constraint is compiled.

A request that waits for its constraint holds no page, no row and no place in a queue; it can be aborted, and its
deadline counts. On the loop's thread; the manager of constraints answers from others.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from branchline.engine.errors import EngineError, InternalError, InvalidArgument
from branchline.engine.grammar.base import BaseGrammarObject
from branchline.engine.grammar.manager import Compiled, Manager
from branchline.engine.grammar.pieces import Pieces
from branchline.engine.grammar.reasoning import Marks, ReasoningObject, wrap
from branchline.engine.grammar.refusal import GrammarUnsupported
from branchline.engine.scheduler import Group, Scheduler
from branchline.engine.scheduler.enforcing import Enforcing
from branchline.engine.scheduler.intake import Intake
from branchline.engine.scheduler.sequence import Sequence
from branchline.engine.types import Finish, GrammarAsk, GrammarKind

Post = Callable[[Callable[[], None]], None]
MAX_MARKS = 16  # pairs of marks whose tables are kept
Enter = Callable[[Group, Callable[[Group], None]], None]
"""Calls what it is given with the group, now or later, or fails the group."""


class Entrance:
    """Every accepted request is queued or failed. `post` runs an action on the loop's thread, between two steps."""

    def __init__(
        self,
        intake: Intake,
        scheduler: Scheduler,
        deadlines: dict[str, float],
        manager: Manager | None,
        post: Post,
        clock: Callable[[], float],
        pieces: Callable[[], Pieces],
        enter: Enter,
    ) -> None:
        self._intake = intake
        self._scheduler = scheduler
        self._deadlines = deadlines
        self._manager = manager
        self._post = post
        self._clock = clock
        self._pieces = pieces
        self._marks: OrderedDict[tuple[str, str], Marks] = OrderedDict()
        self._enter = enter

    def accept(self, group: Group) -> None:
        """Take in a request; it may wait for pages and for its constraint first."""
        request = group.request
        if group.given_up:
            return
        if request.deadline_s is not None:
            self._deadlines[request.request_id] = request.deadline_s
        self._enter(group, self._proceed)

    def _proceed(self, group: Group) -> None:
        """Its pages are here, or it needs none."""
        request = group.request
        if request.grammar is None:
            self._enqueue(group)
        elif self._manager is None:
            words = "this worker enforces no constraints (grammar-backend is none): leave it out"
            self._scheduler.fail(group, InvalidArgument(words, field="grammar"))
        else:
            self._compile(self._manager, request.grammar, group)

    def _compile(self, manager: Manager, ask: GrammarAsk, group: Group) -> None:
        known: list[Compiled | EngineError] = []
        asking: int | None = threading.get_ident()

        def ready(outcome: Compiled | EngineError) -> None:
            if threading.get_ident() == asking:  # it was remembered
                known.append(outcome)
            else:
                self._post(lambda: self._settle(group, outcome))

        group.withdraw = manager.request(ask, ask.tenant, ready)
        asking = None
        for outcome in known:
            self._settle(group, outcome)

    def _settle(self, group: Group, outcome: Compiled | EngineError) -> None:
        """The constraint is there, or is refused."""
        group.withdraw = None
        if group.live == 0:  # ended while it waited
            return
        ask = group.request.grammar
        if isinstance(outcome, GrammarUnsupported) and ask is not None and ask.best_effort and not group.loosened:
            self._loosen(group, ask, outcome)
            return
        if isinstance(outcome, EngineError):
            self._scheduler.fail(group, outcome)
            return
        self._enqueue(group, outcome)

    def _loosen(self, group: Group, ask: GrammarAsk, refusal: GrammarUnsupported) -> None:
        """Ask for what can be enforced of a schema that can't: a value of its type. The answer is checked."""
        if ask.kind is not GrammarKind.JSON or self._manager is None:
            self._scheduler.fail(group, refusal)
            return
        group.loosened = True
        kind = json.loads(ask.text).get("type")
        text = json.dumps({"type": kind} if kind in ("object", "array", "string") else {})
        self._compile(self._manager, replace(ask, text=text, backend=""), group)

    def _later(self, sequence: Sequence, finish: Finish) -> None:
        """Tell a best-effort sequence's finish once its text is checked. It counts as running until then."""
        group, manager = sequence.group, self._manager
        ask = group.request.grammar
        assert ask is not None and manager is not None, "only loosened requests come here"

        def told(valid: bool | None) -> None:
            if finish.grammar is not None:
                finish.grammar = replace(finish.grammar, valid=valid)
            self._scheduler.outbox.open(sequence).finish = finish

        text = self._pieces().text([one for one in sequence.tokens[sequence.prompt_len :] if one not in sequence.ends])
        if ask.reasoning is not None:
            text = text.rpartition(ask.reasoning.end.encode())[2]
        manager.check(ask.text, text.decode(errors="replace"), lambda valid: self._post(lambda: told(valid)))

    def _enqueue(self, group: Group, compiled: Compiled | None = None) -> None:
        """Queue a request that has all it needs. Whatever its constraint's backend raises costs this request only."""
        try:
            if compiled is not None:
                _constrain(group, self._reasoned(group, compiled.grammar), compiled)
                if group.loosened:
                    for sequence in group.sequences:
                        if sequence.enforcing is not None:
                            sequence.enforcing.later = partial(self._later, sequence)
            self._intake.prepare(group)
            self._scheduler.enqueue(group, self._clock())
        except EngineError as error:
            self._scheduler.fail(group, error)
        except Exception as error:
            self._scheduler.fail(group, InternalError(f"the request can't be set up: {type(error).__name__}: {error}"))

    def _reasoned(self, group: Group, grammar: BaseGrammarObject) -> BaseGrammarObject:
        """The constraint behind the reasoning that the request allows, whatever its backend."""
        ask = group.request.grammar
        if ask is None or ask.reasoning is None:
            return grammar
        key = (ask.reasoning.begin, ask.reasoning.end)
        marks = self._marks.get(key)
        if marks is None:
            marks = self._marks[key] = Marks(self._pieces(), *key)
            if len(self._marks) > MAX_MARKS:
                self._marks.popitem(last=False)
        return wrap(grammar, ask.reasoning, marks, group.request.token_ids)


def _constrain(group: Group, grammar: BaseGrammarObject, compiled: Compiled) -> None:
    """Give each sequence its state after the output it has. Raises InvalidArgument if that breaks the constraint, or if
    no text of it fits in the request's tokens."""
    ask = group.request.grammar
    assert ask is not None, "only constrained requests are compiled for"
    most = group.request.sampling.max_tokens
    if most and compiled.least > most:
        raise InvalidArgument(
            f"max_tokens is {most} and the constraint's shortest text has {compiled.least} tokens: raise it",
            field="sampling.max_tokens",
        )
    lead = grammar.closing() if isinstance(grammar, ReasoningObject) else []
    way = None if compiled.way is None else [*lead, *compiled.way]
    for sequence in group.sequences:
        sequence.grammar = grammar.start(sequence.ends)
        sequence.enforcing = Enforcing(
            ask.kind, compiled.backend, compiled.reason, compiled.compile_ms, ask.report, ask.best_effort, way
        )
        output = sequence.tokens[sequence.prompt_len :]  # of a resumed request
        if sequence.grammar.accept_tokens(output) < len(output):
            raise InvalidArgument("emitted_token_ids break the constraint", field="resume")


def come(group: Group) -> None:
    """A request is accepted: its adapter stays loaded until it leaves. Raises NotFound if that is gone."""
    if group.request.adapter is not None:
        group.request.adapter.hold()


def leave(group: Group) -> None:
    """A request is forgotten: nobody needs its constraint or its adapter for it any more."""
    if group.request.adapter is not None:
        group.request.adapter.let_go()
    if group.withdraw is not None:
        withdraw, group.withdraw = group.withdraw, None
        withdraw()
