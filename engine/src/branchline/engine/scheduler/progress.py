"""Turns results into news: tokens, text, logprobs, stops and ends, as Deltas grouped by sink.

Knows nothing of pages or queues: it says whether a sequence ended, the scheduler acts on it. Every sequence
gets exactly one finish, or its request exactly one error.
"""

from __future__ import annotations

import math
import time

from branchline.engine.errors import EngineError, InternalError
from branchline.engine.scheduler import scores
from branchline.engine.scheduler.batch import Row
from branchline.engine.scheduler.sequence import Group, Sequence, Sink
from branchline.engine.types import Delta, Executor, Finish, FinishReason, GrammarReport, PositionLogprobs, RowResult


class Outbox:
    """Deltas of one step, by sink, in order: one per sequence, but for further pieces of input logprobs."""

    def __init__(self) -> None:
        self._deltas: dict[Sink, list[Delta]] = {}
        self._latest: dict[int, Delta] = {}
        self._ended: list[Group] = []

    def open(self, sequence: Sequence) -> Delta:
        """The sequence's delta of this step."""
        return self._latest.get(sequence.number) or self._start(sequence)

    def tell(self, sequence: Sequence, token: int, text: str) -> Delta:
        """One more token and its text; the sequence's delta of this step."""
        number, group = sequence.number, sequence.group
        if number in self._latest or not group.reported:
            delta = self.open(sequence)
            delta.token_ids.append(token)
            delta.text += text
            return delta
        delta = self._latest[number] = Delta(group.request.request_id, sequence.index, [token], text)
        deltas = self._deltas.get(group.sink)
        if deltas is None:
            self._deltas[group.sink] = [delta]
        else:
            deltas.append(delta)
        return delta

    def add_scores(self, sequence: Sequence, piece: PositionLogprobs) -> None:
        """Report input logprobs, in a further delta if this step's has some."""
        delta = self.open(sequence)
        if delta.input_logprobs is not None:
            delta = self._start(sequence)
        delta.input_logprobs = piece

    def _start(self, sequence: Sequence) -> Delta:
        """A new delta; the request's first one carries the prompt report."""
        group = sequence.group
        delta = Delta(group.request.request_id, sequence.index)
        if not group.reported:
            group.reported = True
            delta.prompt = (sequence.prompt_len, group.cached_tokens or 0)
            delta.lease, group.lease = group.lease, None
        self._latest[sequence.number] = delta
        self._deltas.setdefault(group.sink, []).append(delta)
        return delta

    def fail(self, group: Group, error: EngineError) -> None:
        """The terminal error of a request."""
        self._deltas.setdefault(group.sink, []).append(Delta(group.request.request_id, error=error))

    def ended(self, group: Group) -> None:
        """Nothing of a request runs any more."""
        self._ended.append(group)

    def take_ended(self) -> list[Group]:
        """Requests that have ended since the last call."""
        groups, self._ended = self._ended, []
        return groups

    def take(self) -> dict[Sink, list[Delta]]:
        """All deltas since the last call."""
        deltas, self._deltas, self._latest = self._deltas, {}, {}
        return deltas

    def put(self, deltas: dict[Sink, list[Delta]]) -> None:
        """Give back what was taken, before anything new."""
        self._deltas = deltas


class Progress:
    """Applies results to sequences and writes what they say to an outbox."""

    def __init__(self, executor: Executor, outbox: Outbox) -> None:
        self._executor = executor
        self._outbox = outbox

    def score(self, row: Row, results: list[RowResult]) -> None:
        """Report the chunk's input logprobs, `results` in order of position."""
        sequence = row.sequence
        logprobs = sequence.group.request.logprobs
        report = PositionLogprobs(start=sequence.scored)
        if sequence.scored == 0 and sequence.prompt_len:
            _append(report, sequence.tokens[0], math.nan, None, None, logprobs.top_k, logprobs.token_ids)
        for position, result in enumerate(results, max(sequence.scored, row.start + 1)):
            token = sequence.tokens[position]
            logprob = math.nan if result.logprob is None else result.logprob
            _append(report, token, logprob, result.top, result.chosen, logprobs.top_k, logprobs.token_ids)
        if not report.token_ids:
            return
        scores.take(sequence, report.logprobs)
        for piece in _split(report):
            self._outbox.add_scores(sequence, piece)

    def report_stored(self, sequence: Sequence, values: list[float]) -> None:
        """Report input logprobs that need no computing."""
        for piece in scores.stored_report(sequence, values):
            self._outbox.add_scores(sequence, piece)

    def advance(self, sequence: Sequence, result: RowResult, now: float) -> bool:
        """Append the sampled token; whether the sequence ended with it."""
        token = result.token_id
        sequence.tokens.append(token)
        if sequence.first_token_s is None:
            sequence.first_token_s = now
        if sequence.plan.penalties is not None:
            self._executor.observe(sequence.plan.penalties, token)
        grammar = sequence.grammar
        if grammar is not None and not grammar.accept_token(token):
            raise InternalError(f"the model's token {token} is outside the constraint's mask")
        how = sequence.enforcing
        if how is not None:
            how.tokens += 1
        delta = self._outbox.open(sequence)
        delta.token_ids.append(token)
        delta.text += sequence.owed
        sequence.owed = ""
        if sequence.plan.want_logprob:
            plan = sequence.plan
            columns = delta.logprobs = delta.logprobs or PositionLogprobs()
            logprob = math.nan if result.logprob is None else result.logprob
            _append(columns, token, logprob, result.top, result.chosen, plan.top_k, plan.chosen_ids)
        matched_id, matched_stop = None, None
        if token in sequence.ends:
            matched_id = token
            if sequence.group.request.sampling.include_stop:
                delta.text += self._push(sequence, token)[0]
        else:
            text, matched_stop = self._push(sequence, token)
            delta.text += text
        if matched_id is None and matched_stop is None:
            if grammar is not None and grammar.is_exhausted():  # only an end could follow
                self._close(sequence, delta, FinishReason.STOP, now)
                return True
            if len(sequence.tokens) < sequence.max_len:
                return False
            whole = grammar is not None and how is not None and how.is_whole(grammar.is_complete())
            self._close(sequence, delta, FinishReason.STOP if whole else FinishReason.LENGTH, now)
        else:
            finish = self._close(sequence, delta, FinishReason.STOP, now)
            finish.matched_token_id, finish.matched_stop = matched_id, matched_stop
        return True

    def append(self, row: Row, token: int, text_s: float, now: float) -> bool:
        """What `advance` does for a plain row that has its news, made in `text_s`; whether the sequence ended."""
        sequence, news = row.sequence, row.news
        assert news is not None, "only rows with news come here"
        row.news = None
        text, _, matched = news
        sequence.tokens.append(token)
        sequence.computed = row.start + 1
        sequence.text_s += text_s
        delta = self._outbox.tell(sequence, token, text)
        if matched is None and len(sequence.tokens) < sequence.max_len:
            return False
        reason = FinishReason.LENGTH if matched is None else FinishReason.STOP
        self._close(sequence, delta, reason, now).matched_stop = matched
        return True

    @staticmethod
    def _push(sequence: Sequence, token: int) -> tuple[str, str | None]:
        """(text, matched stop string) of one more token, and the time it took."""
        begun = time.perf_counter()
        text, _, matched = sequence.text.push([token])
        sequence.text_s += time.perf_counter() - begun
        return text, matched

    def end(self, sequence: Sequence, reason: FinishReason, now: float, message: str = "") -> None:
        """Finish a sequence without a new token."""
        self._close(sequence, self._outbox.open(sequence), reason, now).message = message

    def fail(self, group: Group, error: EngineError) -> None:
        """End a whole request with its one error."""
        if group.failed:
            return
        group.failed = True
        for sequence in group.sequences:
            sequence.finished = True
        group.live = 0
        self._outbox.ended(group)
        self._outbox.fail(group, error)

    def _close(self, sequence: Sequence, delta: Delta, reason: FinishReason, now: float) -> Finish:
        """Mark the end; text still held back is released with it."""
        group = sequence.group
        sequence.finished = True
        group.live -= 1
        if group.live == 0:
            self._outbox.ended(group)
        if group.lease is not None:  # granted after the first delta went out
            delta.lease, group.lease = group.lease, None
        delta.text += sequence.owed + sequence.text.finish()
        scheduled = now if sequence.scheduled_s is None else sequence.scheduled_s
        first = now if sequence.first_token_s is None else sequence.first_token_s
        finish = Finish(
            reason=reason,
            completion_tokens=sequence.generated,
            retractions=sequence.retractions,
            queue_ms=(scheduled - group.arrival_s) * 1e3,
            prefill_ms=(first - scheduled) * 1e3,
            decode_ms=(now - first) * 1e3,
            detokenise_ms=sequence.text_s * 1e3,
            drafted=sequence.drafted,
            accepted=sequence.accepted,
            grammar=_report(sequence),
        )
        if sequence.enforcing is not None and sequence.enforcing.later is not None:
            sequence.enforcing.later(finish)
        else:
            delta.finish = finish
        return finish


def _report(sequence: Sequence) -> GrammarReport | None:
    """How its constraint was enforced, if that is to be told. Cut-off texts always are."""
    how, grammar = sequence.enforcing, sequence.grammar
    if how is None or grammar is None:
        return None
    complete = how.late is None and grammar.is_complete()
    return how.told(complete) if how.is_told(complete) else None


def _append(
    columns: PositionLogprobs,
    token: int,
    logprob: float,
    top: list[tuple[int, float]] | None,
    chosen: list[tuple[int, float]] | None,
    top_k: int,
    chosen_ids: tuple[int, ...],
) -> None:
    columns.token_ids.append(token)
    columns.logprobs.append(logprob)
    if top_k:
        columns.top.append(top or [])
    if chosen_ids:
        columns.chosen.append(chosen or [])


def _split(report: PositionLogprobs) -> list[PositionLogprobs]:
    size = scores.MAX_POSITIONS
    if len(report.token_ids) <= size:
        return [report]
    return [
        PositionLogprobs(
            report.start + first,
            report.token_ids[first : first + size],
            report.logprobs[first : first + size],
            report.top[first : first + size],
            report.chosen[first : first + size],
        )
        for first in range(0, len(report.token_ids), size)
    ]
