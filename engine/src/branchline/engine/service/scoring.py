"""Score: the logprobs of several continuations of one prefix.

The prefix is computed once; then all continuations run as rows of the same steps, over its pages. Pure glue between
messages and the loop.
"""

from __future__ import annotations

import math
import time

from branchline.engine.errors import InternalError, InvalidArgument
from branchline.engine.service import attach
from branchline.engine.service.generated import engine_pb2 as pb

MAX_CHOICES = 1024


async def score(host: attach.Host, request: pb.ScoreRequest, peer: str) -> pb.ScoreResponse:
    """Raises what Generate raises; leaving it aborts the work."""
    if not request.prefix_token_ids:
        raise InvalidArgument("prefix_token_ids is empty: give at least one token", field="prefix_token_ids")
    if not 1 <= len(request.choices) <= MAX_CHOICES:
        raise InvalidArgument(
            f"choices has {len(request.choices)} entries: give 1 to {MAX_CHOICES} continuations", field="choices"
        )
    for position, choice in enumerate(request.choices):
        if not choice.token_ids:
            raise InvalidArgument(
                f"choices[{position}] is empty: give at least one token", field=f"choices[{position}].token_ids"
            )
    if request.HasField("lease") and request.lease.HasField("acquire_ttl_ms"):
        raise InvalidArgument(
            "lease.acquire_ttl_ms is not for scores: acquire first, then name the lease", field="lease"
        )
    started = time.monotonic()
    stream = attach.Stream(host, peer)
    try:
        prefix = list(request.prefix_token_ids)
        answer = pb.ScoreResponse()
        if len(request.choices) > 1:  # what the rows share is computed before they start
            await _run(stream, [_part(request, "prefix", prefix, None, started)], [], answer)
        parts = [
            _part(request, str(number), prefix, list(choice.token_ids), started)
            for number, choice in enumerate(request.choices)
        ]
        found: list[list[float]] = [[] for _ in parts]
        answer.ClearField("prompt")
        await _run(stream, parts, found, answer)
    finally:
        stream.close()
    for choice, logprobs in zip(request.choices, found, strict=True):
        if len(logprobs) != len(choice.token_ids):
            raise InternalError(f"{len(logprobs)} logprobs came for {len(choice.token_ids)} tokens")
        answer.scores.add(sum=math.fsum(logprobs), token_logprobs=logprobs)
    return answer


def _part(
    request: pb.ScoreRequest, name: str, prefix: list[int], choice: list[int] | None, started: float
) -> pb.GenerateRequest:
    """One continuation as a prompt without output; None: the bare prefix."""
    message = pb.GenerateRequest(
        request_id=f"{request.request_id}:{name}",
        token_ids=prefix + (choice or []),
        sampling=pb.SamplingParams(max_tokens=0),
        traceparent=request.traceparent,
    )
    if choice is not None:
        message.logprobs.input_start = len(prefix)
    if request.HasField("cache_namespace"):
        message.cache_namespace.CopyFrom(request.cache_namespace)
    if request.HasField("lease"):
        message.lease.CopyFrom(request.lease)
    if request.HasField("deadline_ms"):
        message.deadline_ms = max(1, request.deadline_ms - int((time.monotonic() - started) * 1e3))
    return message


async def _run(
    stream: attach.Stream, parts: list[pb.GenerateRequest], found: list[list[float]], answer: pb.ScoreResponse
) -> None:
    """Submits parts under handles from 1 and takes their deltas until all have ended."""
    for handle, part in enumerate(parts, start=1):
        stream.submit(handle, part)
    left = set(range(1, len(parts) + 1))
    while left:
        message = await stream.outbox.get()
        if message is None:
            raise InternalError("the stream ended before all choices were scored")
        for delta in message.frame.deltas:
            if delta.HasField("error"):
                raise attach.RequestFailed(delta.error)
            if delta.HasField("prompt"):
                answer.prompt.prompt_tokens += delta.prompt.prompt_tokens
                answer.prompt.cached_tokens += delta.prompt.cached_tokens
            if delta.HasField("lease"):
                answer.lease.CopyFrom(delta.lease)
            if found and delta.HasField("input_logprobs"):
                found[delta.handle - 1].extend(delta.input_logprobs.logprobs)
            if delta.HasField("finish"):
                if delta.finish.reason == pb.FINISH_REASON_ABORT:
                    words = delta.finish.message or "the request was aborted"
                    raise attach.RequestFailed(pb.Error(code=pb.ERROR_CODE_CANCELLED, message=words))
                left.discard(delta.handle)
