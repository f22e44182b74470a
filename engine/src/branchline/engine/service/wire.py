"""Deltas, errors and events as proto messages. Pure conversions; the only place that knows both sides."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

from branchline.engine.cache.base import CacheEvent
from branchline.engine.cache.feed import EventBatch
from branchline.engine.errors import EngineError, ErrorCode
from branchline.engine.scheduler.load import LoopStats
from branchline.engine.service.generated import engine_pb2 as pb
from branchline.engine.service.limits import MAX_CHUNK
from branchline.engine.types import (
    Delta,
    Finish,
    FinishReason,
    GrammarReport,
    LeaseReport,
    LeaseState,
    PositionLogprobs,
    SamplingParams,
)

logger = logging.getLogger(__name__)

_CODES = {
    ErrorCode.INVALID_ARGUMENT: pb.ERROR_CODE_INVALID_ARGUMENT,
    ErrorCode.NOT_FOUND: pb.ERROR_CODE_NOT_FOUND,
    ErrorCode.UNAUTHENTICATED: pb.ERROR_CODE_UNAUTHENTICATED,
    ErrorCode.RESOURCE_EXHAUSTED: pb.ERROR_CODE_RESOURCE_EXHAUSTED,
    ErrorCode.UNAVAILABLE: pb.ERROR_CODE_UNAVAILABLE,
    ErrorCode.DEADLINE_EXCEEDED: pb.ERROR_CODE_DEADLINE_EXCEEDED,
    ErrorCode.UNIMPLEMENTED: pb.ERROR_CODE_UNIMPLEMENTED,
    ErrorCode.INTERNAL: pb.ERROR_CODE_INTERNAL,
    ErrorCode.CANCELLED: pb.ERROR_CODE_CANCELLED,
}
_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}
_LEASE_STATES = {
    LeaseState.HELD: pb.LEASE_STATE_HELD,
    LeaseState.LOST: pb.LEASE_STATE_LOST,
    LeaseState.UNMATCHED: pb.LEASE_STATE_UNMATCHED,
}


def to_error(error: BaseException) -> pb.Error:
    """Any exception as the contract's error; one that is not ours is logged and becomes INTERNAL."""
    if not isinstance(error, EngineError):
        logger.error("unexpected %s in a request", type(error).__name__, exc_info=error)
        return pb.Error(
            code=pb.ERROR_CODE_INTERNAL, message=f"the worker failed with {type(error).__name__}: see its log"
        )
    made = pb.Error(code=_CODES[error.code], message=error.message, field=error.field)
    if error.retry_after_ms is not None:
        made.retry_after_ms = error.retry_after_ms
    return made


def to_deltas(delta: Delta, handle: int, engine_id: str) -> list[pb.SequenceDelta]:
    """The delta as one message, or as several of at most 1 MiB if its input logprobs are large."""
    made = pb.SequenceDelta(handle=handle, index=delta.index, token_ids=delta.token_ids, text=delta.text)
    if delta.logprobs is not None:
        made.logprobs.CopyFrom(to_logprobs(delta.logprobs))
    if delta.prompt is not None:
        made.prompt.prompt_tokens, made.prompt.cached_tokens = delta.prompt
    if delta.finish is not None:
        made.finish.CopyFrom(to_finish(delta.finish))
    if delta.lease is not None:
        made.lease.CopyFrom(to_lease(delta.lease, engine_id))
    if delta.error is not None:
        made.error.CopyFrom(to_error(delta.error))
    if delta.input_logprobs is None:
        return [made]
    *before, last = _split(delta.input_logprobs)
    made.input_logprobs.CopyFrom(to_logprobs(last))
    head = [pb.SequenceDelta(handle=handle, index=delta.index, input_logprobs=to_logprobs(piece)) for piece in before]
    if head and delta.prompt is not None:  # the prompt report comes with the request's first delta
        head[0].prompt.CopyFrom(made.prompt)
        made.ClearField("prompt")
    return [*head, made]


def _split(report: PositionLogprobs) -> Iterator[PositionLogprobs]:
    """Pieces whose messages stay below the chunk size: ids take at most 5 bytes, logprobs 4."""
    alternatives = max(
        [0, *(len(one) for one in report.top)],
    ) + max([0, *(len(one) for one in report.chosen)])
    position_bytes = 9 + 16 + 9 * alternatives
    step = max(1, (MAX_CHUNK // 2) // position_bytes)
    for begin in range(0, max(1, len(report.token_ids)), step):
        end = begin + step
        yield PositionLogprobs(
            start=report.start + begin,
            token_ids=report.token_ids[begin:end],
            logprobs=report.logprobs[begin:end],
            top=report.top[begin:end],
            chosen=report.chosen[begin:end],
        )


def to_logprobs(report: PositionLogprobs) -> pb.TokenLogprobs:
    """Columns as they are; None and NaN both mean that there is no logprob."""
    return pb.TokenLogprobs(
        start=report.start,
        token_ids=report.token_ids,
        logprobs=[math.nan if value is None else value for value in report.logprobs],
        top=[_alternatives(one) for one in report.top],
        chosen=[_alternatives(one) for one in report.chosen],
    )


def _alternatives(pairs: Sequence[tuple[int, float]]) -> pb.TopLogprobs:
    return pb.TopLogprobs(token_ids=[token for token, _ in pairs], logprobs=[value for _, value in pairs])


def to_lease(report: LeaseReport, engine_id: str) -> pb.LeaseReport:
    """How a lease was found, with the grant if one was made."""
    made = pb.LeaseReport(state=_LEASE_STATES[report.state])
    if report.lease_id:
        made.grant.CopyFrom(
            pb.LeaseGrant(
                lease_id=report.lease_id,
                engine_id=engine_id,
                tokens=report.tokens,
                pages=report.pages,
                ttl_ms=report.ttl_ms,
            )
        )
    return made


def to_finish(finish: Finish) -> pb.Finish:
    """The end of a sequence."""
    made = pb.Finish(
        reason=_REASONS[finish.reason],
        completion_tokens=finish.completion_tokens,
        retractions=finish.retractions,
        message=finish.message,
        timings=pb.Timings(
            queue_ms=finish.queue_ms,
            prefill_ms=finish.prefill_ms,
            decode_ms=finish.decode_ms,
            detokenise_ms=finish.detokenise_ms,
            drafted_tokens=finish.drafted,
            accepted_tokens=finish.accepted,
        ),
    )
    if finish.grammar is not None:
        made.grammar.CopyFrom(_grammar(finish.grammar))
    if finish.matched_stop is not None:
        made.matched_stop = finish.matched_stop
    elif finish.matched_token_id is not None:
        made.matched_token_id = finish.matched_token_id
    return made


def _grammar(report: GrammarReport) -> pb.GrammarReport:
    return pb.GrammarReport(
        backend=report.backend,
        reason=report.reason,
        compile_ms=report.compile_ms,
        mask_p99_ms=report.mask_p99_ms,
        constrained_tokens=report.constrained_tokens,
        forced_tokens=report.forced_tokens,
        complete=report.complete,
        enforced=report.enforced,
        valid=report.valid,
    )


def to_sampling(params: SamplingParams) -> pb.SamplingParams:
    """The default sampling of a model: only what differs from the contract's defaults."""
    base, made = SamplingParams(), pb.SamplingParams()
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        if getattr(params, name) != getattr(base, name):
            setattr(made, name, getattr(params, name))
    return made


def to_events(batch: EventBatch, page_size: int, include_token_ids: bool) -> pb.SubscribeKvEventsResponse:
    """One batch of cache changes; the feed has already cut it to well under 1 MiB."""
    return pb.SubscribeKvEventsResponse(
        epoch=batch.epoch,
        sequence=batch.sequence,
        snapshot=batch.snapshot,
        snapshot_end=batch.last,
        events=[_event(event, include_token_ids) for event in batch.events],
        page_size=page_size,
    )


def _event(event: CacheEvent, include_token_ids: bool) -> pb.KvEvent:
    kind, parts = event[0], cast("tuple[Any, ...]", event[1:])
    if kind == "stored":
        parent, hashes, tokens = parts
        ids = tokens if include_token_ids else ()
        return pb.KvEvent(stored=pb.BlocksStored(parent_hash=parent, block_hashes=hashes, token_ids=ids))
    if kind == "removed":
        return pb.KvEvent(removed=pb.BlocksRemoved(block_hashes=parts[0]))
    if kind == "cleared":
        return pb.KvEvent(cleared=pb.BlocksCleared())
    raise ValueError(f"unknown cache event {kind!r}")


def to_cache_stats(stats: LoopStats) -> pb.CacheStats:
    """The KV pool's figures."""
    return pb.CacheStats(
        page_size=stats.page_size,
        pages_total=stats.pages_total,
        pages_free=stats.pages_free,
        pages_evictable=stats.pages_evictable,
        pages_protected=stats.pages_protected,
        pages_private=stats.pages_private,
        prompt_tokens=stats.prompt_tokens,
        cached_tokens=stats.cached_tokens,
        lookups=stats.lookups,
        hits=stats.hits,
        evicted_pages=stats.evicted_pages,
        retractions=stats.retractions,
        pages_leased=stats.pages_leased,
        leases=stats.leases,
        lease_budget_pages=stats.lease_budget_pages,
        preemptions=stats.preemptions,
        host_pages_total=stats.host_pages_total,
        host_pages_used=stats.host_pages_used,
        host_stored_pages=stats.host_stored_pages,
        host_fetched_pages=stats.host_fetched_pages,
    )
