"""The engine's loop, readable aloud: receive → schedule → run → sample → commit → emit.

Owns the thread, the inbox and the order of steps; who runs is the scheduler's, what the model says the
executor's. Every accepted request gets one finish per sequence or one error; a fault of one request costs
only that request. Callers are on other threads; sinks are called on the loop's.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from branchline.engine.cache import RadixCacheBackend, TreeView
from branchline.engine.cache.feed import EventBatch, EventFeed, Subscription
from branchline.engine.cache.leases import Budgets, Lease, LeaseBook
from branchline.engine.errors import InternalError, InvalidArgument, ResourceExhausted, Unavailable
from branchline.engine.grammar.manager import Manager
from branchline.engine.grammar.pieces import lazily
from branchline.engine.handover import Handovers
from branchline.engine.loop_faults import Stall, audit, describe, isolate, tell, unblock
from branchline.engine.loop_grammar import Entrance, come, leave
from branchline.engine.loop_handover import Doorway
from branchline.engine.loop_parts import Inbox, Watch, Watcher, call_off, idle_limit, let_go
from branchline.engine.scheduler import Group, Scheduler, SchedulerOptions, Sink
from branchline.engine.scheduler.batch import Step
from branchline.engine.scheduler.intake import Intake
from branchline.engine.scheduler.load import LoopStats, OwnTime, Pace, picture
from branchline.engine.scheduler.masking import Masker
from branchline.engine.speculative.controller import Drafter
from branchline.engine.types import Executor, Request, RowResult

if TYPE_CHECKING:
    from branchline._native import Vocabulary

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """What the loop needs beyond its parts. `audit_when_idle` walks the whole page ledger when work runs out."""

    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    eos_token_ids: tuple[int, ...] = ()
    audit_when_idle: bool = False
    lease_budget: float = 0.3  # share of the pool's pages
    lease_tenant_budget: float | None = None  # None: all of lease_budget


class EngineLoop:
    """Runs requests on one executor and one cache. Thread-safe but for `step`, which the loop's thread calls.

    The executor and the cache belong to the caller and must not be used by anyone else until `close` returned.
    """

    def __init__(
        self,
        executor: Executor,
        cache: RadixCacheBackend,
        vocabulary: Vocabulary,
        options: LoopOptions = LoopOptions(),
        *,
        clock: Callable[[], float] = time.monotonic,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(64),
        epoch: int | None = None,
        drafter: Drafter | None = None,
        watch: Watch | None = None,
        grammars: Manager | None = None,
        handovers: Handovers | None = None,
    ) -> None:
        self.options = options
        self._executor = executor
        self._cache = cache
        self._clock = self.clock = clock
        budgets = Budgets.of(executor.num_pages, options.lease_budget, options.lease_tenant_budget)
        self._leases = LeaseBook(cache, executor.page_size, budgets)
        self.handovers = handovers
        self._scheduler = Scheduler(executor, cache, options.scheduler, self._leases, drafter, handovers)
        self._drafter = drafter
        self._watcher = Watcher(watch)
        self._intake = Intake(executor, cache, vocabulary, options.scheduler, options.eos_token_ids, draw_seed)
        self._feed = EventFeed(cache, time.time_ns() // 1_000_000 if epoch is None else epoch, executor.page_size)
        self._condition = threading.Condition()
        self._inbox = Inbox()
        self._live: dict[str, Group] = {}  # guarded by the condition
        self._deadlines: dict[str, float] = {}  # loop thread only
        pieces = lazily(vocabulary, executor.vocab_size)
        self._masker = Masker(executor.vocab_size, options.scheduler.mask_patience_s, pieces)
        enter = Doorway(handovers, self._scheduler, self.post).enter
        self._entrance = Entrance(
            self._intake, self._scheduler, self._deadlines, grammars, self.post, clock, pieces, enter
        )
        self._closing = False
        self._thread: threading.Thread | None = None
        self._steps = 0
        self._busy_since: float | None = None  # last completed step, or when work appeared
        self._own = OwnTime()
        self._pace = Pace()
        self._places = 0  # sequences of live requests; guarded by the condition
        self._done = False
        self._stall = Stall()
        self._running_step: Step | None = None  # what the executor works on
        self._evicted = 0
        self._stats = LoopStats()
        self._observe()

    # ---- for other threads ------------------------------------------------------------------

    def start(self) -> None:
        """Start the loop's thread. Raises RuntimeError if it was started before."""
        if self._thread is not None:
            raise RuntimeError("the loop is already started")
        self._thread = threading.Thread(target=self._main, name="engine-loop", daemon=True)
        self._thread.start()

    def submit(self, request: Request, sink: Sink) -> None:
        """Accept a request; its deltas go to `sink`.

        Raises, and accepts nothing: InvalidArgument for a prompt that can never fit or an id in use,
        ResourceExhausted for a full queue, Unavailable when closing.
        """
        group = self._intake.admit(request, sink, self._clock())
        with self._condition:
            if self._closing:
                raise Unavailable("the worker is shutting down; send the request to another one")
            self._stall.refuse()
            if request.request_id in self._live:
                raise InvalidArgument(
                    f"request_id {request.request_id!r} is in use; give every live request its own", field="request_id"
                )
            self._check_queue()
            come(group)
            self._live[request.request_id] = group
            group.places = len(group.sequences)
            self._places += group.places
            self._inbox.groups.append(group)
            self._condition.notify_all()

    def abort(self, request_id: str, message: str = "aborted by its owner") -> int:
        """End a request by its exact id, within one step; 1 if it was alive and not yet being aborted."""
        call_off(self.post, self.handovers, request_id)
        with self._condition:
            if request_id not in self._live or request_id in self._inbox.aborts:
                return 0
            self._inbox.aborts[request_id] = message
            self._leave(self._live[request_id])
            self._condition.notify_all()
            return 1

    def abort_all(self, message: str = "aborted with all others") -> int:
        """End every request; how many were alive."""
        call_off(self.post, self.handovers, None)
        return self._abort_where(lambda group: True, message)

    def abort_sink(self, sink: Sink, message: str = "its stream ended") -> int:
        """End every request of one sink; how many were alive."""
        return self._abort_where(lambda group: group.sink == sink, message)

    def flush(self) -> int:
        """Drop every cached page that no request holds, between two steps; how many."""
        return self._call(self._flush)

    def cache_tree(self, cursor: int, limit: int, tokens: int) -> TreeView:
        """A piece of the cache's tree, taken between two steps; see RadixCacheBackend.view."""
        return self._call(lambda: self._leases.view(cursor, limit, tokens, self._clock()))

    def renew_lease(self, lease_id: str, tenant: str, ttl_ms: int) -> Lease:
        """Let a live lease run out `ttl_ms` from now. Raises NotFound if it does not live."""
        return self._call(lambda: self._leases.renew(lease_id, tenant, ttl_ms, self._clock()))

    def release_lease(self, lease_id: str, tenant: str) -> bool:
        """End a lease; whether it was alive."""
        return self._call(lambda: self._leases.release(lease_id, tenant, self._clock()))

    def stats(self) -> LoopStats:
        """The picture after the latest step, with what arrived since as waiting. `step_age_ms` is as of now."""
        stats, busy = self._stats, self._busy_since
        with self._condition:
            arriving = sum(group.live for group in self._inbox.groups)
            tokens = sum(len(group.request.token_ids) * group.live for group in self._inbox.groups)
        return stats._replace(
            waiting=stats.waiting + arriving,
            waiting_uncached_tokens=stats.waiting_uncached_tokens + tokens,
            step_age_ms=0.0 if busy is None else max(self._clock() - busy, 0.0) * 1e3,
        )

    @property
    def busy(self) -> bool:
        """Whether any accepted request is unfinished."""
        with self._condition:
            return bool(self._live)

    def subscribe_events(self, callback: Callable[[EventBatch], None]) -> Callable[[], None]:
        """Send a snapshot and then every change to `callback`, on the loop's thread. Returns what ends it."""
        subscription: Subscription = self._call(lambda: self._feed.subscribe(callback))

        def unsubscribe() -> None:
            subscription.closed = True
            self.post(lambda: self._feed.unsubscribe(subscription))

        return unsubscribe

    def audit(self) -> None:
        """Walk the whole page ledger between two steps. Raises RuntimeError if a page is in no state or in two."""
        self._call(self._audit)

    def close(self, drain_s: float = 0.0, step_s: float | None = None) -> bool:
        """Refuse new requests, give running ones `drain_s` seconds, abort the rest, stop the thread. Idempotent.

        Waits for the end of the step that runs, at most `step_s` seconds (None: as long as it takes); past them
        every request gets its error and False is returned: the executor is in use and must not be closed.
        """
        with self._condition:
            self._closing = True
            if self._thread is not None:
                self._condition.wait_for(lambda: not self._live or self._done, timeout=drain_s)
        self.abort_all("the worker is shutting down")
        with self._condition:
            self._inbox.stop = True
            self._condition.notify_all()
        if self._thread is None:
            self._guarded_step()
            self._done = True
            return True
        self._thread.join(step_s)
        if not self._thread.is_alive():
            return True
        self.give_up("the worker is shutting down and its step does not end")
        return False

    def give_up(self, message: str) -> int:
        """While a step does not end: answer every live request with an error and refuse new ones. How many.

        For a watchdog on another thread. When the step ends after all, what it worked on is dropped, its pages
        are given back and requests are taken again.
        """
        with self._condition:
            groups = self._stall.begin(message, self._live.values())
            for group in groups:
                self._leave(group)
        tell(groups, self._steps, message)
        return len(groups)

    def describe(self) -> list[str]:
        """Lines about what the loop is doing, for a report on a step that does not end."""
        with self._condition:
            live = list(self._live.values())
        return describe(self._running_step, self.stats(), live)

    def _leave(self, group: Group) -> None:
        """Free the places of a request that is about to end and has not begun. Called with the condition held.

        So what was refused in part, or is no longer wanted, does not keep others out until a step ends.
        """
        if group.cached_tokens is None:
            self._places -= group.places
            group.places = 0

    def _check_queue(self) -> None:
        """Refuse what would wait behind a full queue. Called with the condition held."""
        limits = self.options.scheduler
        queued = self._places - limits.max_running_requests
        if queued >= limits.max_queued_requests:
            raise ResourceExhausted(
                f"{queued} sequences are queued and max_queued_requests is {limits.max_queued_requests}; "
                "try again later",
                retry_after_ms=self._pace.retry_after_ms(),
            )

    def _abort_where(self, matches: Callable[[Group], bool], message: str) -> int:
        with self._condition:
            found = [
                request_id
                for request_id, group in self._live.items()
                if request_id not in self._inbox.aborts and matches(group)
            ]
            self._inbox.aborts.update(dict.fromkeys(found, message))
            for request_id in found:
                self._leave(self._live[request_id])
            self._condition.notify_all()
            return len(found)

    def _call(self, action: Callable[[], T]) -> T:
        """Run `action` on the loop's thread between two steps and wait for its value or its exception."""
        if self._thread is None or threading.current_thread() is self._thread:
            return action()
        outcome: Future[T] = Future()

        def run() -> None:
            try:
                outcome.set_result(action())
            except BaseException as error:
                outcome.set_exception(error)

        self.post(run)
        return outcome.result()

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` on the loop's thread between two steps; at once if the loop has ended."""
        with self._condition:
            if not self._done and self._thread is not None:
                self._inbox.calls.append(action)
                self._condition.notify_all()
                return
        action()

    # ---- the loop ---------------------------------------------------------------------------

    def step(self) -> bool:
        """One turn: receive, schedule, run, sample, commit, emit. Whether the model ran."""
        started = time.perf_counter()
        self._receive()
        step = self._schedule()
        self._steps += step is not None
        before_run = time.perf_counter()
        results = self._run_and_sample(step) if step is not None else None
        after_run = time.perf_counter()
        self._resume()
        if step is not None and results is not None:
            if self._drafter is not None and step.only_decodes:
                self._drafter.measured(len(step.batch.token_ids), (after_run - before_run) * 1e3)
            self._commit(step, results)
        elif step is None and self._scheduler.has_work:
            unblock(self._scheduler)
        self._publish()
        self._emit()
        if step is not None:
            self._own.add((before_run - started + time.perf_counter() - after_run) * 1e3)
        return step is not None

    def _receive(self) -> None:
        """Take in what other threads asked for, and what the clock did."""
        with self._condition:
            inbox, self._inbox = self._inbox, Inbox(stop=self._inbox.stop)
        try:
            self._resume()
            now = self._clock()
            self._leases.expire(now)
            if self.handovers is not None:
                self.handovers.rooms.expire(now)
            for group in inbox.groups:
                self._entrance.accept(group)
            for request_id, message in inbox.aborts.items():
                self._end(request_id, now, message)
            for request_id in [key for key, deadline in self._deadlines.items() if now >= deadline]:
                self._end(request_id, now, "deadline passed")
            if self._busy_since is None and self._scheduler.has_work:
                self._busy_since = now
        finally:  # whoever called waits for an answer, whatever went wrong before
            inbox.run_calls()

    def _schedule(self) -> Step | None:
        """Choose the step's rows and take their pages."""
        return self._scheduler.schedule(self._clock()) if self._scheduler.has_work else None

    def _run_and_sample(self, step: Step) -> list[RowResult] | None:
        """Forward pass and sampling. A failure costs those requests that fail alone, too; None if it was settled."""
        started, self._running_step = self._clock(), step
        try:
            results = self._sample(self._run(step), step)
        except Exception as error:
            logger.exception("the executor failed in step %d with %d sequences", self._steps, len(step.rows))
            isolate(step, error, self._scheduler, lambda one: self._sample(self._run(one), one), self._commit)
            return None
        finally:
            self._running_step = None
        self._scheduler.learn(step, self._clock() - started)
        return results

    def _run(self, step: Step) -> object:
        """KV and logits of the step's rows, while their masks are filled."""
        self._masker.begin(step)
        try:
            return self._executor.run(step.batch)
        finally:
            self._masker.finish(step)

    def _sample(self, logits: object, step: Step) -> list[RowResult]:
        """One result per plan."""
        results = self._executor.sample(logits, step.plans) if step.plans else []
        if len(results) != len(step.plans):
            raise RuntimeError(f"{len(results)} results for {len(step.plans)} plans")
        self._masker.verify(step, results, lambda plans: self._executor.sample(logits, plans))
        return results

    def _resume(self) -> None:
        """The loop turns: drop what was given up while it did not, and take requests again."""
        if not self._stall.reason:
            return
        with self._condition:
            groups = self._stall.end(self._live.values())
        logger.warning("step %d has ended after all; %d requests were given up", self._steps, len(groups))
        for group in groups:
            self._scheduler.fail(group, Unavailable("given up"))

    def _commit(self, step: Step, results: list[RowResult]) -> None:
        """Tokens, text, ends and pages."""
        wants_hidden = self._drafter is not None and self._drafter.wants_hidden
        hidden = self._executor.hidden() if wants_hidden else None  # type: ignore[attr-defined]
        self._scheduler.commit(step, results, self._clock(), hidden)

    def _publish(self) -> None:
        """Cache events and statistics, before the news: who asks after an answer finds it counted."""
        let_go(self._scheduler, self.handovers, self._clock())
        self._evicted += self._feed.publish()
        self._observe()

    def _emit(self) -> None:
        """Send the step's news; forget what ended."""
        for sink, deltas in self._scheduler.outbox.take().items():
            for delta in deltas:
                if self._watcher.watch is not None:
                    self._watcher.tell(self._live.get(delta.request_id), delta, self._clock())
                if delta.error is not None or delta.finish is not None:
                    self._forget(delta.request_id)
            try:
                sink(self._steps, self._stall.wanted(deltas))
            except Exception:
                logger.exception("a stream can't take its news; its requests are aborted")
                self.abort_sink(sink)
        self._stall.given_up = set()

    # ---- helpers of the loop's thread -------------------------------------------------------

    def _main(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(
                    lambda: bool(self._inbox or self._stall.reason or self._scheduler.has_work),
                    idle_limit(self._clock(), self._deadlines, self._leases, self.handovers),
                )
                if self._inbox.stop and not self._live and not self._inbox.calls:
                    self._masker.close()
                    self._done = True
                    self._condition.notify_all()
                    return
            self._guarded_step()

    def _guarded_step(self) -> None:
        """A fault of the loop itself ends all requests, loudly, but not the worker."""
        try:
            self.step()
            if self.options.audit_when_idle and not self._scheduler.has_work:
                self._audit()
        except Exception as error:
            logger.exception("step %d failed outside any request; all requests are ended", self._steps)
            failure = InternalError(f"the engine's loop failed: {type(error).__name__}: {error}")
            with self._condition:
                groups = list(self._live.values())
            for group in groups:
                self._scheduler.fail(group, failure)
            self._scheduler.flush()  # a copy between the tiers may not have been done
            self._emit()
            self._publish()

    def _end(self, request_id: str, now: float, message: str) -> None:
        with self._condition:
            group = self._live.get(request_id)
        if group is None:
            return
        try:
            self._scheduler.abort(group, now, message)
        except Exception as error:  # its text, say, can't be finished
            logger.exception("request %s can't be aborted in good order", request_id)
            self._scheduler.fail(group, InternalError(f"the abort failed: {type(error).__name__}: {error}"))

    def _forget(self, request_id: str) -> None:
        """Drop a request of which nothing runs any more."""
        with self._condition:
            group = self._live.get(request_id)
            if group is not None and group.live == 0:
                leave(group)
                del self._live[request_id]
                self._places -= group.places
                self._pace.end(self._clock())
                self._deadlines.pop(request_id, None)
                if not self._live:
                    self._condition.notify_all()

    def _flush(self) -> int:
        self._evicted += self._feed.publish()
        dropped = self._scheduler.flush()
        self._feed.publish()
        return dropped

    def _audit(self) -> None:
        lent = set() if self.handovers is None else self.handovers.pages()
        audit(self._cache, self._executor.num_pages, self._leases, not self._scheduler.has_work, lent)

    def _observe(self) -> None:
        """Publish the picture that other threads read."""
        now = self._clock()
        self._busy_since = now if self._scheduler.has_work else None
        self._stats = picture(self._scheduler, self._cache.counters(), now, self._evicted, self._steps, self._own)
