"""The step's plan and its bookkeeping: who runs, who waits, who yields.

One token budget and no phases: running decodes first, then prefill chunks of running sequences, then waiting
ones. Keeps the invariant that every page a sequence holds is given back when it ends, is retracted or fails.
Called by the loop, on its thread only; reads no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from branchline.engine.cache import RadixCacheBackend
from branchline.engine.cache.leases import LeaseBook
from branchline.engine.errors import EngineError, InternalError, ResourceExhausted
from branchline.engine.scheduler import scores
from branchline.engine.scheduler.batch import Row, Step, pack
from branchline.engine.scheduler.leasing import Leasing
from branchline.engine.scheduler.options import SchedulerOptions
from branchline.engine.scheduler.pages import PageTables
from branchline.engine.scheduler.progress import Outbox, Progress
from branchline.engine.scheduler.sequence import Group, Sequence
from branchline.engine.scheduler.sharing import Inflight
from branchline.engine.scheduler.waiting import WaitingQueue
from branchline.engine.types import Executor, FinishReason, RowResult

REFRESHES = 8  # stale cache estimates renewed a pass


@dataclass(slots=True)
class Counters:
    """Sums since start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    lookups: int = 0
    hits: int = 0
    retractions: int = 0


class Scheduler:
    """Owns the waiting and running sequences and, through PageTables, their pages."""

    def __init__(
        self, executor: Executor, cache: RadixCacheBackend, options: SchedulerOptions, leases: LeaseBook
    ) -> None:
        self.options = options
        self.leasing = Leasing(leases)
        self.counters = Counters()
        self.outbox = Outbox()
        self.waiting = WaitingQueue(options)
        self.pages = PageTables(cache, executor.num_pages, executor.page_size)
        self.store = scores.ScoreStore(executor.num_pages, executor.page_size)
        self._cache = cache
        self._progress = Progress(executor, self.outbox)
        self._inflight = Inflight()
        self._decoding: dict[int, Sequence] = {}
        self._prefilling: dict[int, Sequence] = {}
        self._admissions = 0
        self._pass = 0

    # ---- what is there ----------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Sequences that hold pages."""
        return len(self._decoding) + len(self._prefilling)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._decoding or self._prefilling or len(self.waiting))

    def waiting_uncached_tokens(self) -> int:
        """Tokens of waiting sequences that no cached page covers, by the latest estimates."""
        return max(self.waiting.tokens - sum(sequence.matched for sequence in self.waiting.window()), 0)

    # ---- in and out -------------------------------------------------------------------------

    def enqueue(self, group: Group, now: float) -> None:
        """Queue all sequences of a request. Raises for a lease that can't be granted, and has queued nothing."""
        self.leasing.enter(group, now)
        matched = 0
        for sequence in group.sequences:
            if sequence.index == 0:
                matched = self._estimate(sequence)
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
        rows: list[Row] = []
        self._add_decodes(rows, now)
        budget = self.options.prefill_budget(len(rows))
        budget = self._add_prefills(rows, budget, now)
        if len(self.waiting) and budget > 0 and self.running < self.options.max_running_requests:
            self._admit(rows, budget, now)
        return pack(rows, self.pages.page_size) if rows else None

    def _add_decodes(self, rows: list[Row], now: float) -> None:
        size = self.pages.page_size
        while True:
            short = [item for item in self._decoding.values() if len(item.pages) * size <= item.computed]
            pages = self._cache.allocate(len(short)) if short else []
            if pages is not None:
                break
            if not self._retract():
                self._end_full(short[0], now)
        for sequence, page in zip(short, pages, strict=True):
            sequence.pages.append(page)
        rows.extend(Row(sequence, sequence.computed, 1) for sequence in self._decoding.values())

    def _add_prefills(self, rows: list[Row], budget: int, now: float) -> int:
        for sequence in list(self._prefilling.values()):
            if budget <= 0:
                break
            if sequence.number not in self._prefilling:  # retracted for an earlier one
                continue
            wanted = min(budget, self.options.chunk, sequence.work)
            count = self.pages.extend(sequence, wanted)
            while count <= 0 and not rows and self._retract(spare=sequence):
                count = self.pages.extend(sequence, wanted)
            if count <= 0 and not rows:
                self._end_full(sequence, now)
            elif count > 0:
                rows.append(Row(sequence, sequence.computed, count))
                budget -= count
        return budget

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

    def _retract(self, spare: Sequence | None = None) -> bool:
        """Requeue one running sequence: fewest generated tokens, then latest admitted. Never the last."""
        candidates = [*self._decoding.values(), *self._prefilling.values()]
        if len(candidates) < 2:
            return False
        victim = min(
            (item for item in candidates if item is not spare), key=lambda item: (item.generated, -item.admitted)
        )
        self._drop(victim, keep=True)
        victim.retractions += 1
        self.counters.retractions += 1
        self.waiting.push_front(victim)
        return True

    # ---- admission --------------------------------------------------------------------------

    def _admit(self, rows: list[Row], budget: int, now: float) -> None:
        self._refresh()
        for sequence in self.waiting.order(self._pass, now):
            if budget <= 0 or self.running >= self.options.max_running_requests:
                return
            count = self._try(sequence, budget, now)
            if count is None:
                continue
            if count == 0:
                return  # whoever is first waits for its pages; smaller ones do not overtake it
            rows.append(Row(sequence, sequence.computed, count))
            budget -= count

    def _try(self, sequence: Sequence, budget: int, now: float) -> int | None:
        """Tokens of the sequence's first chunk; 0 if pages are short, None if it is put off or has ended.

        After a retraction the page check keeps everybody out until something ends: the victim is first in the
        queue and needs what it gave back, part of which is taken, and a reserve.
        """
        known = self._known_scores(sequence)
        limit = scores.match_limit(sequence, len(known))
        if self._is_put_off(sequence, limit):
            sequence.share_waits += 1
            return None
        node, pages = self.pages.find(sequence, limit)
        sequence.matched, sequence.matched_version = len(pages) * self.pages.page_size, self.pages.version
        self._cache.lock(node)
        self.pages.attach(sequence, node, pages)
        if self.running and self.pages.missing(sequence) + self._reserve() > self._cache.available():
            self.pages.release(sequence, keep=False)
            return 0
        count = self.pages.extend(sequence, min(budget, self.options.chunk, sequence.work))
        if count <= 0:  # alone, and still no room
            self.pages.release(sequence, keep=False)
            self._end_full(sequence, now)
            return None
        self._start(sequence, known, now)
        return count

    def _start(self, sequence: Sequence, known: list[float], now: float) -> None:
        self.waiting.remove(sequence)
        self._admissions += 1
        sequence.admitted = self._admissions
        self._prefilling[sequence.number] = sequence
        if self._cache.shares:
            self._inflight.claim(sequence)
        if sequence.scheduled_s is None:
            sequence.scheduled_s = now
        group = sequence.group
        if group.cached_tokens is None:
            # Of a resumed request the output so far may be cached too; it is no part of the prompt.
            group.cached_tokens = min(sequence.computed, sequence.prompt_len)
            self.counters.lookups += 1
            self.counters.hits += sequence.computed > 0
            self.counters.prompt_tokens += sequence.prompt_len
            self.counters.cached_tokens += group.cached_tokens
        if known:
            self._progress.report_stored(sequence, known)

    def _reserve(self) -> int:
        """Pages spoken for: the rest of running prefills, and one for each running sequence to grow."""
        prefills = sum(max(self.pages.missing(item), 0) for item in self._prefilling.values())
        return prefills + len(self._decoding)

    def _is_put_off(self, sequence: Sequence, limit: int) -> bool:
        """Whether to wait for a page that another sequence is computing right now."""
        if not len(self._inflight) or sequence.share_waits >= self.options.share_wait_steps:
            return False
        return self._inflight.awaits(sequence, limit, self.pages.page_size)

    def _known_scores(self, sequence: Sequence) -> list[float]:
        logprobs = sequence.group.request.logprobs
        if sequence.scored >= sequence.prompt_len or logprobs.top_k or logprobs.token_ids:
            return []
        return self.store.known(sequence)

    def _refresh(self) -> None:
        """Renew a few estimates that are older than the tree."""
        version, left = self.pages.version, REFRESHES
        for sequence in self.waiting.window():
            if sequence.matched_version != version:
                sequence.matched, sequence.matched_version = self._estimate(sequence), version
                left -= 1
                if left == 0:
                    return

    def _estimate(self, sequence: Sequence) -> int:
        limit = scores.match_limit(sequence, len(self._known_scores(sequence)))
        return len(self.pages.find(sequence, limit)[1]) * self.pages.page_size

    # ---- commit -----------------------------------------------------------------------------

    def commit(self, step: Step, results: list[RowResult], now: float) -> None:
        """Apply a step's results, one per plan. A fault in one sequence ends its request only."""
        for row in step.rows:
            group = row.sequence.group
            if row.sequence.finished:  # a sibling's fault in this step ended the request
                continue
            try:
                self._commit_row(row, results[row.first_plan : row.first_plan + row.scores + row.sampled], now)
            except EngineError as error:
                self.fail(group, error)
            except Exception as error:
                self.fail(group, InternalError(f"the request failed in the engine: {type(error).__name__}: {error}"))

    def fail_step(self, step: Step, error: EngineError) -> None:
        """The executor failed: end the requests of the step; what was computed before stays cached."""
        for group in _groups(step.rows):
            self.fail(group, error)

    def _commit_row(self, row: Row, results: list[RowResult], now: float) -> None:
        sequence = row.sequence
        for result in results:
            if result.error is not None:
                raise InternalError(f"the model gave unusable logits: {result.error}")
        sequence.computed = row.start + row.count
        if row.sampled and sequence.number in self._decoding:
            if self._progress.advance(sequence, results[0], now):
                self._drop(sequence, keep=True)
            return
        before = sequence.full
        self.pages.publish(sequence)
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
            self._drop(sequence, keep=True)

    def _score(self, row: Row, results: list[RowResult]) -> None:
        sequence = row.sequence
        self._progress.score(row, results[: row.scores])
        if sequence.scored == sequence.prompt_len:
            self.store.keep(sequence)
            sequence.scores = []

    def _drop(self, sequence: Sequence, *, keep: bool) -> None:
        """Take a sequence out of queue and batch and give its pages back."""
        was_running = self._decoding.pop(sequence.number, None) or self._prefilling.pop(sequence.number, None)
        if was_running is None:
            self.waiting.remove(sequence)
            return
        self._inflight.drop(sequence)
        self.pages.release(sequence, keep=keep)


def _groups(rows: Iterable[Row]) -> list[Group]:
    return list({id(row.sequence.group): row.sequence.group for row in rows}.values())
