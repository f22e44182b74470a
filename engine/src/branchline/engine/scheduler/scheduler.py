"""The step's plan and its bookkeeping: who runs, who waits, who yields.

One token budget and no phases: running decodes first, then prefill chunks of running sequences, then waiting
ones. Keeps the invariant that every page a sequence holds is given back when it ends, is retracted or fails.
Called by the loop, on its thread only; reads no clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import chain
from typing import ParamSpec

from branchline.engine.cache import RadixCacheBackend
from branchline.engine.cache.leases import LeaseBook
from branchline.engine.errors import EngineError, InternalError, ResourceExhausted
from branchline.engine.handover import Handovers
from branchline.engine.scheduler import ahead, drafting, scores, victims
from branchline.engine.scheduler.batch import Row, Step, pack
from branchline.engine.scheduler.cost import Allowance, StepCost, Work, allowance
from branchline.engine.scheduler.estimates import Estimates
from branchline.engine.scheduler.forecast import Forecast
from branchline.engine.scheduler.leasing import Leasing
from branchline.engine.scheduler.options import Counters, SchedulerOptions
from branchline.engine.scheduler.pages import PageTables, move_pages
from branchline.engine.scheduler.plain import Plain
from branchline.engine.scheduler.progress import Outbox, Progress
from branchline.engine.scheduler.sequence import Group, Sequence
from branchline.engine.scheduler.sharing import Inflight
from branchline.engine.scheduler.turns import Claim, Turns
from branchline.engine.scheduler.waiting import WaitingQueue
from branchline.engine.speculative.controller import Drafter
from branchline.engine.types import Executor, FinishReason, RowResult

P = ParamSpec("P")
logger = logging.getLogger(__name__)


class Scheduler:
    """Owns the waiting and running sequences and, through PageTables, their pages."""

    def __init__(
        self,
        executor: Executor,
        cache: RadixCacheBackend,
        options: SchedulerOptions,
        leases: LeaseBook,
        drafter: Drafter | None = None,
        handovers: Handovers | None = None,
    ) -> None:
        self.options = options
        self.leasing = Leasing(leases)
        self.drafter = drafter
        self.handovers = handovers
        self.counters = Counters()
        self.outbox = Outbox()
        self.waiting = WaitingQueue(options)
        self.pages = PageTables(cache, executor.num_pages, executor.page_size)
        self.store = scores.ScoreStore(executor.num_pages, executor.page_size)
        self.cost = StepCost()
        self.forecast = Forecast()
        self._cache = cache
        self._executor = executor
        self._progress = Progress(executor, self.outbox)
        self._plain = Plain()
        self._estimates = Estimates(self.waiting, self.pages, self.store)
        self._inflight = Inflight()
        self._decoding: dict[int, Sequence] = {}
        self._prefilling: dict[int, Sequence] = {}
        self._admissions = 0
        self._pass = 0
        self._lowest = 0  # nobody of a lower priority runs
        self._hidden: object | None = None

    # ---- what is there ----------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Sequences that hold pages."""
        return len(self._decoding) + len(self._prefilling)

    def sequences(self) -> Iterable[Sequence]:
        """Those that run, decoding ones first."""
        return chain(self._decoding.values(), self._prefilling.values())

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._decoding or self._prefilling or len(self.waiting))

    def waiting_uncached_tokens(self) -> int:
        """Tokens of waiting sequences that no cached page covers, by the latest estimates."""
        return max(self.waiting.tokens - self.waiting.matched, 0)

    # ---- in and out -------------------------------------------------------------------------

    def enqueue(self, group: Group, now: float) -> None:
        """Queue all sequences of a request. Raises for a lease that can't be granted, and has queued nothing."""
        self.leasing.enter(group, now)
        matched = 0
        for sequence in group.sequences:
            if sequence.index == 0:
                matched = self._estimates.of(sequence)
            sequence.matched, sequence.matched_version = matched, self.pages.version
            self.waiting.push(sequence, self._pass, now)

    def abort(self, group: Group, now: float, message: str) -> None:
        """End every unfinished sequence of a request with finish `abort`. Its whole pages stay cached."""
        for sequence in group.sequences:
            if not sequence.finished:
                self._drop(sequence, keep=True)
                self._progress.end(sequence, FinishReason.ABORT, now, message)

    def fail(self, group: Group, error: EngineError) -> None:
        """End a whole request with an error; KV computed in the failing step is not kept."""
        for sequence in group.sequences:
            if not sequence.finished:
                self._drop(sequence, keep=False)
        self._progress.fail(group, error)

    def flush(self) -> int:
        """Drop every cached page that nobody holds, and the stored scores; how many pages."""
        self.store.clear()
        self.pages.version += 1
        return self._cache.flush()

    # ---- schedule ---------------------------------------------------------------------------

    def schedule(self, now: float) -> Step | None:
        """The next step, or None if nothing can run. May end or retract sequences."""
        self._pass += 1
        self.forecast.step()
        if len(self.waiting):
            self._preempt()
        rows: list[Row] = []
        self._add_decodes(rows, now)
        decodes = len(rows)
        if self.drafter is not None and rows:
            drafting.add(self.drafter, rows, self.pages, self.options.max_step_tokens, self._unfilled() + len(rows))
        if self.options.forced_tokens and not all([row.sequence.plain for row in rows]):
            drafting.force(rows, self.pages, self.options.max_step_tokens, self._unfilled() + len(rows))
        if self._prefilling or len(self.waiting):
            room = self._allowance(rows)
            turns = self._turns()
            self._add_prefills(rows, room, turns, now)
            if len(self.waiting) and room.tokens > 0 and self.running < self.options.max_running_requests:
                self._admit(rows, room, turns, now)
            if turns.left and not turns.top_up(rows, self._prefilling, room, self.options.chunk, self.pages):
                self._add_prefills(rows, room, Turns((), (), 0), now)
        move_pages(self._cache, self._executor)
        return pack(rows, self.pages.page_size, decodes) if rows else None

    def ahead(self, step: Step) -> Step | None:
        """The decode step after `step`, whose results nobody knows yet; None if it depends on them. See ahead.py."""
        if self.drafter is not None or self._gives_way():
            return None
        return ahead.after(step, len(self._prefilling), self.pages)

    def _gives_way(self) -> bool:
        """Whether somebody who waits could run now, in a free place or in one of lower priority."""
        first, options = self.waiting.highest(), self.options
        if first is None or self.running < options.max_running_requests:
            return first is not None
        preempted = victims.for_priority(self.sequences(), first.priority, options.preemptions)
        return options.preemption and preempted is not None

    def alone(self, row: Row) -> Step:
        """A step of this one row of a step that failed, without its guesses."""
        decodes = int(row.sequence.number in self._decoding)
        return pack([Row(row.sequence, row.start, row.count - len(row.draft))], self.pages.page_size, decodes)

    def learn(self, step: Step, seconds: float) -> None:
        """A step took so long."""
        self.cost.learn(Work.of(step), seconds)

    def _allowance(self, decodes: list[Row]) -> Allowance:
        """What prompts may take of the step beside these decodes."""
        options = self.options
        tokens = options.max_step_tokens - sum([row.count for row in decodes])
        if decodes and options.mixed_prefill_tokens is not None:
            tokens = min(tokens, options.mixed_prefill_tokens)
        return allowance(self.cost, decodes, tokens, options.itl_target_s)

    def _add_decodes(self, rows: list[Row], now: float) -> None:
        size = self.pages.page_size
        while True:
            short = [item for item in self._decoding.values() if len(item.pages) * size <= item.computed]
            pages = self._cache.allocate(len(short)) if short else []
            if pages is not None:
                break
            if not self._make_room():
                self._end_full(short[0], now)
        for sequence, page in zip(short, pages, strict=True):
            sequence.pages.append(page)
        for sequence in self._decoding.values():
            row = sequence.row
            if row is None:
                row = sequence.row = Row(sequence, 0, 1)
            row.renew()
            rows.append(row)

    def _turns(self) -> Turns:
        """Everybody who could take prompt tokens now."""
        free = self.running < self.options.max_running_requests
        return Turns.of(self._prefilling.values(), self.waiting.window() if free else (), self._pass)

    def _add_prefills(self, rows: list[Row], room: Allowance, turns: Turns, now: float) -> None:
        for sequence in list(self._prefilling.values()):
            if sequence.number not in self._prefilling:  # retracted or failed for an earlier one
                continue
            wanted = min(room.room(sequence.computed), self.options.chunk, sequence.work)
            if wanted <= 0:
                return
            wanted = turns.share(Claim.running(sequence), wanted)
            if wanted <= 0:
                continue
            count = self._guard(sequence, self._extend, sequence, wanted, rows)
            if count is None:
                continue
            if count <= 0 and not rows:
                self._end_full(sequence, now)
            elif count > 0:
                rows.append(Row(sequence, sequence.computed, count))
                room.take(sequence.computed, count)

    def _extend(self, sequence: Sequence, wanted: int, rows: list[Row]) -> int:
        """Pages for up to `wanted` tokens, others' if nothing else could run in this step."""
        count = self.pages.extend(sequence, wanted)
        while count <= 0 and not rows and self._make_room(spare=sequence):
            count = self.pages.extend(sequence, wanted)
        return count

    def _guard(
        self, sequence: Sequence, action: Callable[P, int | None], *given: P.args, **named: P.kwargs
    ) -> int | None:
        """Do something for one sequence; an exception ends its request only. None if so, or if `action` gives it."""
        try:
            return action(*given, **named)
        except Exception as error:
            logger.exception("request %s failed while it was scheduled", sequence.group.request.request_id)
            self.fail(sequence.group, _internal(error))
            return None

    def _end_full(self, sequence: Sequence, now: float) -> None:
        """The last running sequence needs more than the whole pool, or than leases leave of it."""
        self._drop(sequence, keep=True)
        leases = self.leasing.book
        if leases.pages and not sequence.generated:
            self.fail(
                sequence.group,
                ResourceExhausted(
                    f"the prompt has {sequence.prompt_len} tokens; leases hold {leases.pages} of the KV pool's "
                    f"{self.pages.num_pages} pages of {self.pages.page_size}: try again when some were released",
                    retry_after_ms=1000,
                ),
            )
            return
        pool = self.pages.num_pages * self.pages.page_size
        self._progress.end(
            sequence,
            FinishReason.LENGTH,
            now,
            f"the KV pool of {pool} tokens is full after {len(sequence.tokens)} tokens; "
            "start the worker with a larger one",
        )

    def _make_room(self, spare: Sequence | None = None) -> bool:
        """Free pages that are held twice; if there are none, retract somebody."""
        folded = [self.pages.fold(sequence) for sequence in self.sequences()]
        lent = self.handovers is not None and self.handovers.landings.give_way()
        return any(folded) or lent or self._retract(spare)

    def _retract(self, spare: Sequence | None = None) -> bool:
        """Requeue one running sequence for want of pages. Never the last."""
        victim = victims.for_pages(self.sequences(), spare)
        if victim is None:
            return False
        self.forecast.retracted()
        self._requeue(victim)
        return True

    def _requeue(self, victim: Sequence) -> None:
        self._drop(victim, keep=True, finished=False)
        victim.retractions += 1
        self.counters.retractions += 1
        self.waiting.push_front(victim)

    def _preempt(self) -> None:
        """Make place for the first of the highest waiting priority, from lower ones that run."""
        options = self.options
        if not options.preemption or self.waiting.top() <= self._lowest:
            return
        first = self.waiting.highest()
        if first is None or self._is_put_off(first, scores.match_limit(first, 0)):
            return
        while (victim := victims.for_priority(self.sequences(), first.priority, options.preemptions)) is not None:
            place = self.running < options.max_running_requests
            if place and self._fits(first, first.matched):
                return
            victim.preemptions += 1
            self.counters.preemptions += 1
            self._requeue(victim)

    # ---- admission --------------------------------------------------------------------------

    def _admit(self, rows: list[Row], room: Allowance, turns: Turns, now: float) -> None:
        self._estimates.refresh(self._guard)
        for sequence in self.waiting.order(self._pass, now):
            if room.room(sequence.matched) <= 0 or self.running >= self.options.max_running_requests:
                return
            if sequence.finished:  # a sibling's fault in this pass ended the request
                continue
            if turns.passes(Claim.waiting(sequence)):
                continue
            count = self._guard(sequence, self._try, sequence, room, now)
            if count is None:
                continue
            if count == 0:
                return  # whoever is first waits for its pages; smaller ones do not overtake it
            rows.append(Row(sequence, sequence.computed, count))
            room.take(sequence.computed, count)

    def _try(self, sequence: Sequence, room: Allowance, now: float) -> int | None:
        """Tokens of the sequence's first chunk; 0 if pages are short, None if it is put off or has ended.

        After a retraction the page check keeps everybody out until something ends: the victim is first in the
        queue and needs what it gave back, part of which is taken, and a reserve.
        """
        known = self._estimates.known_scores(sequence)
        limit = scores.match_limit(sequence, len(known))
        if self._is_put_off(sequence, limit):
            sequence.share_waits += 1
            return None
        node, pages = self.pages.find(sequence, limit)
        self.waiting.estimate(sequence, len(pages) * self.pages.page_size, self.pages.version)
        self._cache.lock(node)
        self.pages.attach(sequence, node, pages)
        if self.running and not self._fits(sequence, 0):
            self.pages.release(sequence, keep=False)
            return 0
        self.pages.fetch(sequence, limit)
        # Even a step that is full by its seconds gives one token to whoever hits nearly all of its prompt.
        wanted = max(min(room.room(sequence.computed), self.options.chunk, sequence.work), 1)
        count = self.pages.extend(sequence, wanted)
        if count <= 0:  # alone, and still no room
            self.pages.release(sequence, keep=False)
            self._end_full(sequence, now)
            return None
        self._start(sequence, known, now)
        return count

    def _fits(self, sequence: Sequence, cached: int) -> bool:
        """Whether there are pages to admit a sequence of which `cached` further tokens are in the tree.

        Its own tokens and expected growth, the rest of running prefills, and the expected growth of what runs.
        """
        size = self.pages.page_size
        own = (
            self.pages.missing(sequence)
            - cached // size
            + int(self.forecast.left(sequence) * self.forecast.share / size)
        )
        room = self._cache.available() - own - self._unfilled()
        if room >= self.forecast.most(self.running, size):
            return True
        return room >= self.forecast.pages(self.sequences(), size)

    def _unfilled(self) -> int:
        """Pages that running prefills lack."""
        return sum(max(self.pages.missing(item), 0) for item in self._prefilling.values())

    def _start(self, sequence: Sequence, known: list[float], now: float) -> None:
        self.waiting.remove(sequence)
        self._lowest = min(self._lowest, sequence.priority) if self.running else sequence.priority
        self._admissions += 1
        sequence.admitted = self._admissions
        self._prefilling[sequence.number] = sequence
        if self._cache.shares:
            self._inflight.claim(sequence)
        if sequence.scheduled_s is None:
            sequence.scheduled_s = now
        group = sequence.group
        if group.cached_tokens is None:
            if self.handovers is not None:
                self.handovers.scheduled(group.request)
            # Of a resumed request the output so far may be cached too; it is no part of the prompt.
            group.cached_tokens = min(sequence.computed, sequence.prompt_len)
            if sequence.node is not None:
                self._cache.credit(sequence.node, sequence.priority)
            self.counters.lookups += 1
            self.counters.hits += sequence.computed > 0
            self.counters.prompt_tokens += sequence.prompt_len
            self.counters.cached_tokens += group.cached_tokens
        if known:
            self._progress.report_stored(sequence, known)

    def _is_put_off(self, sequence: Sequence, limit: int) -> bool:
        """Whether to wait for a page that another sequence is computing right now."""
        if not len(self._inflight) or sequence.share_waits >= self.options.share_wait_steps:
            return False
        return self._inflight.awaits(sequence, limit, self.pages.page_size)

    # ---- commit -----------------------------------------------------------------------------

    def commit(self, step: Step, results: list[RowResult], now: float, hidden: object | None = None) -> None:
        """Apply a step's results, one per plan. A fault in one sequence ends its request only.

        `hidden` are the model's last states of the step's logits rows, for a drafter that wants them.
        """
        self._hidden = hidden
        self._plain.push(step, results)
        for row in step.rows:
            sequence = row.sequence
            if sequence.finished:  # a sibling's fault in this step ended the request
                continue
            try:
                if row.news is None:
                    self._commit_row(row, results[row.first_plan : row.first_plan + row.plans], now)
                elif self._progress.append(row, results[row.first_plan].token_id, self._plain.share_s, now):
                    self._finish(sequence)
            except Exception as error:
                self.fail(sequence.group, _internal(error))

    def _commit_row(self, row: Row, results: list[RowResult], now: float) -> None:
        sequence = row.sequence
        if sequence.fault is not None:
            raise sequence.fault
        if row.waits:  # for its mask: the last token is computed again
            if sequence.number in self._decoding:
                return
            row.count, row.sampled = row.count - 1, False
            results = results[: row.scores]
        if row.sampled and sequence.number in self._decoding:
            if drafting.commit(self.drafter, row, results, self._progress, now, self._hidden):
                self._finish(sequence)
            return
        for result in results:
            drafting.check(result)
        sequence.computed = row.start + row.count
        before = sequence.full
        self.pages.publish(sequence)
        if self.handovers is not None:
            self.handovers.computed(sequence.group.request, sequence.computed)
        self._inflight.settle(sequence, before, sequence.full)
        if sequence.scored < sequence.prompt_len:
            self._score(row, results)
        if sequence.computed < len(sequence.tokens):
            return
        del self._prefilling[sequence.number]
        self._decoding[sequence.number] = sequence
        self._inflight.drop(sequence)
        if not row.sampled:
            self.leasing.grant(sequence, now)
            self._drop(sequence, keep=True)
            self._progress.end(sequence, FinishReason.LENGTH, now)
        elif self._progress.advance(sequence, results[-1], now):
            self._finish(sequence)
        else:
            sequence.plain = self._plain.is_plain(sequence, self.drafter)
            drafting.begin(self.drafter, row, self._hidden)

    def _score(self, row: Row, results: list[RowResult]) -> None:
        sequence = row.sequence
        self._progress.score(row, results[: row.scores])
        if sequence.scored == sequence.prompt_len:
            self.store.keep(sequence)
            sequence.scores = []

    def _drop(self, sequence: Sequence, *, keep: bool, finished: bool = True) -> None:
        """Take a sequence out of queue and batch and give its pages back, whatever its state."""
        if self.drafter is not None:
            self.drafter.end(sequence, finished)
        if self._decoding.pop(sequence.number, None) is None and self._prefilling.pop(sequence.number, None) is None:
            self.waiting.remove(sequence)
        self._inflight.drop(sequence)
        try:
            self.pages.release(sequence, keep=keep)
        except Exception:
            # A backend that can't take pages back must not keep a request from its end; the audit will tell.
            logger.exception("pages of request %s can't be given back", sequence.group.request.request_id)

    def _finish(self, sequence: Sequence) -> None:
        """A sequence ended by itself."""
        self.forecast.ended(sequence.generated)
        self._drop(sequence, keep=True)


def _internal(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    return InternalError(f"the request failed in the engine: {type(error).__name__}: {error}")
