"""GenerateRequest → Request. Every field is checked here, once, before anything is queued.

Raises InvalidArgument or Unimplemented with the dotted field; never clamps nor ignores a value.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from branchline.engine.errors import InvalidArgument, Unimplemented
from branchline.engine.service import limits
from branchline.engine.service.adapters import LoadedAdapter
from branchline.engine.service.generated import engine_pb2 as pb
from branchline.engine.service.limits import ModelInfo
from branchline.engine.types import (
    GrammarAsk,
    GrammarKind,
    HandoverAsk,
    LeaseAsk,
    LogprobParams,
    ReasoningAsk,
    Request,
    Resume,
    SamplingParams,
)

# cache_salt, extra_key, digest of the adapter, weight_version → the namespace's bytes
NamespaceEncoder = Callable[[str | None, str | None, str | None, str], bytes]
# name and digest, or None for any digest → the loaded adapter; raises NotFound or Unimplemented
AdapterFinder = Callable[[str, str | None], LoadedAdapter]


def no_adapters(name: str, digest: str | None = None) -> LoadedAdapter:
    """The finder of a worker that has no place for adapters."""
    raise Unimplemented(
        f"adapter {name!r}: this worker runs no adapters, leave it out", field="cache_namespace.adapter"
    )


_LATER = ("draft", "cache_tier")
_FLOATS: dict[str, tuple[float, float, bool]] = {  # name: lowest, highest, whether the lowest is allowed
    "temperature": (0.0, 100.0, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "repetition_penalty": (0.0, 10.0, False),
    "frequency_penalty": (-2.0, 2.0, True),
    "presence_penalty": (-2.0, 2.0, True),
}


def to_request(
    message: pb.GenerateRequest, model: ModelInfo, encode: NamespaceEncoder, find_adapter: AdapterFinder = no_adapters
) -> Request:
    """The validated request; its deadline counts from now."""
    refuse_unknown(message)
    _refuse_later(message)
    request_id = check_request_id(message.request_id)
    token_ids = tuple(message.token_ids)
    check_ids(token_ids, model.vocab_size, "token_ids")
    sampling = _sampling(message.sampling, model)
    resume = _resume(message, sampling, model)
    _check_lengths(len(token_ids), sampling, model, 0 if resume is None else len(resume.token_ids))
    adapter = _adapter(message.cache_namespace, find_adapter)
    now = time.monotonic()
    return Request(
        request_id=request_id,
        token_ids=token_ids,
        sampling=sampling,
        logprobs=_logprobs(message.logprobs, len(token_ids), model.vocab_size),
        namespace=_namespace(message.cache_namespace, adapter, model, encode),
        deadline_s=_deadline(message, now),
        arrival_s=now,
        lease=_lease(message, sampling),
        resume=resume,
        priority=_priority(message),
        traceparent=message.traceparent,
        grammar=_grammar(message),
        handover=_handover(message, sampling, model),
        adapter=adapter,
    )


def refuse_unknown(message: Message, path: str = "", *, deep: bool = True) -> None:
    """Refuse field numbers that this worker's contract lacks, at any depth or in this message alone."""
    fields = UnknownFieldSet(message)
    unknown = sorted(fields[position].field_number for position in range(len(fields)))
    if unknown:
        where = f"{message.DESCRIPTOR.name} field number {unknown[0]}"
        raise Unimplemented(
            f"{where} is unknown to this worker (contract revision {limits.CONTRACT_REVISION}): upgrade it, or leave "
            "the field out",
            field=path or where,
        )
    if not deep:
        return
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        inner = f"{path}.{field.name}" if path else field.name
        for one in value if field.is_repeated else (value,):
            refuse_unknown(one, inner)


def _refuse_later(message: pb.GenerateRequest) -> None:
    for name in _LATER:
        if message.HasField(name):
            raise Unimplemented(f"{name} is not implemented by this worker: leave it out", field=name)


def _adapter(given: pb.CacheNamespace, find: AdapterFinder) -> LoadedAdapter | None:
    if given.HasField("adapter"):
        return find(given.adapter, given.adapter_digest if given.HasField("adapter_digest") else None)
    if given.HasField("adapter_digest"):
        raise InvalidArgument(
            "adapter_digest is given without adapter: name the adapter too", field="cache_namespace.adapter_digest"
        )
    return None


def _lease(message: pb.GenerateRequest, sampling: SamplingParams) -> LeaseAsk | None:
    if not message.HasField("lease"):
        return None
    given = message.lease
    acquires = given.HasField("acquire_ttl_ms")
    if acquires == bool(given.lease_id):
        raise InvalidArgument("lease needs either lease_id or acquire_ttl_ms: give one of the two", field="lease")
    tenant = check_tenant(given.tenant, "lease.tenant")
    if not acquires:
        return LeaseAsk(tenant, lease_id=given.lease_id)
    if sampling.max_tokens != 0:
        raise InvalidArgument(
            f"lease.acquire_ttl_ms is given with max_tokens {sampling.max_tokens}: a lease is taken on a planted "
            "prefix, so set max_tokens to 0",
            field="lease.acquire_ttl_ms",
        )
    return LeaseAsk(tenant, ttl_ms=check_ttl(given.acquire_ttl_ms, "lease.acquire_ttl_ms"))


def _grammar(message: pb.GenerateRequest) -> GrammarAsk | None:
    if not message.HasField("grammar"):
        return None
    given = message.grammar
    form = given.WhichOneof("form")
    if form is None:
        raise InvalidArgument("grammar has no form: give one, or leave grammar out", field="grammar")
    text = getattr(given, form)
    size = len(text.encode())
    if size > limits.MAX_GRAMMAR_BYTES:
        raise InvalidArgument(
            f"grammar.{form} has {size} bytes: it must have at most {limits.MAX_GRAMMAR_BYTES}", field="grammar"
        )
    if given.enforcement not in pb.Enforcement.values():
        raise InvalidArgument(
            f"grammar.enforcement is {given.enforcement}: it must be one of {', '.join(pb.Enforcement.keys())}",
            field="grammar.enforcement",
        )
    return GrammarAsk(
        GrammarKind(form),
        text,
        given.backend,
        check_tenant(given.tenant, "grammar.tenant"),
        _reasoning(given),
        given.enforcement == pb.ENFORCEMENT_BEST_EFFORT,
        given.report,
    )


def _reasoning(given: pb.Grammar) -> ReasoningAsk | None:
    if not given.HasField("reasoning"):
        return None
    asked = given.reasoning
    for name in ("begin", "end"):
        size = len(getattr(asked, name).encode())
        if not 1 <= size <= limits.MAX_MARK_BYTES:
            field = f"grammar.reasoning.{name}"
            raise InvalidArgument(f"{field} has {size} bytes: it must have 1 to {limits.MAX_MARK_BYTES}", field=field)
    budget = asked.max_tokens if asked.HasField("max_tokens") else None
    return ReasoningAsk(asked.begin, asked.end, asked.implicit, budget)


def _handover(message: pb.GenerateRequest, sampling: SamplingParams, model: ModelInfo) -> HandoverAsk | None:
    given = message.disaggregation
    if not message.HasField("disaggregation"):
        if model.role == "prefill" and sampling.max_tokens != 0:
            raise Unimplemented(
                "this worker only prefills (role prefill): send the request to one of role decode or both",
                field="disaggregation",
            )
        return None
    if given.half not in (pb.DISAGGREGATION_HALF_PREFILL, pb.DISAGGREGATION_HALF_DECODE):
        raise InvalidArgument("half is missing: give prefill or decode", field="disaggregation.half")
    prefill = given.half == pb.DISAGGREGATION_HALF_PREFILL
    asked = "prefill" if prefill else "decode"
    if model.role not in (asked, "both"):
        raise Unimplemented(
            f"this worker has the role {model.role} and is asked for the half {asked}: start it with --role {asked}, "
            "or send the request elsewhere",
            field="disaggregation.half",
        )
    if given.parameters:
        raise Unimplemented("parameters are not implemented: leave them out", field="disaggregation.parameters")
    if given.bootstrap_room >= 2**63:
        raise InvalidArgument(
            f"bootstrap_room {given.bootstrap_room} is not in [0, 2^63): give a smaller one",
            field="disaggregation.bootstrap_room",
        )
    if prefill and sampling.max_tokens != 0:
        raise InvalidArgument(
            f"the prefill half generates nothing and max_tokens is {sampling.max_tokens}: set it to 0",
            field="sampling.max_tokens",
        )
    if not prefill and not (given.bootstrap_host and 0 < given.bootstrap_port < 65536):
        raise InvalidArgument(
            f"bootstrap_host {given.bootstrap_host!r} and bootstrap_port {given.bootstrap_port} are no address of a "
            "prefill half: give host and port",
            field="disaggregation.bootstrap_host",
        )
    return HandoverAsk(prefill, given.bootstrap_room, given.bootstrap_host, given.bootstrap_port)


def check_ttl(ttl_ms: int, field: str) -> int:
    """A lease's time in milliseconds."""
    if not 1 <= ttl_ms <= limits.MAX_TTL_MS:
        raise InvalidArgument(f"{field} is {ttl_ms}: it must be in [1, {limits.MAX_TTL_MS}]", field=field)
    return ttl_ms


def check_tenant(tenant: str, field: str) -> str:
    """The name of a lease's owner."""
    size = len(tenant.encode())
    if size > limits.MAX_TENANT_BYTES:
        raise InvalidArgument(f"{field} has {size} bytes: it must have at most {limits.MAX_TENANT_BYTES}", field=field)
    return tenant


def check_request_id(request_id: str) -> str:
    """The id; InvalidArgument if it is empty or too long."""
    size = len(request_id.encode())
    if not 1 <= size <= limits.MAX_REQUEST_ID_BYTES:
        raise InvalidArgument(
            f"request_id has {size} bytes: it must have 1 to {limits.MAX_REQUEST_ID_BYTES}", field="request_id"
        )
    return request_id


def check_ids(token_ids: Sequence[int], vocab_size: int, field: str) -> None:
    """InvalidArgument for an id that the vocabulary lacks."""
    if token_ids and max(token_ids) >= vocab_size:
        position, token = next((i, token) for i, token in enumerate(token_ids) if token >= vocab_size)
        raise InvalidArgument(
            f"{field}[{position}] is {token}: ids must be below the vocabulary's size {vocab_size}", field=field
        )


def _resume(message: pb.GenerateRequest, sampling: SamplingParams, model: ModelInfo) -> Resume | None:
    """The output so far of a sequence that another worker began. It must be one that could go on."""
    if not message.HasField("resume"):
        return None
    given = message.resume
    emitted = tuple(given.emitted_token_ids)
    check_ids(emitted, model.vocab_size, "resume.emitted_token_ids")
    if sampling.n != 1:
        raise InvalidArgument(f"n is {sampling.n}: a resumed request is one sequence, give 1", field="sampling.n")
    if sampling.seed is None:
        raise InvalidArgument("seed is missing: a resumed request needs the one it began with", field="sampling.seed")
    if given.sequence_index >= limits.MAX_SEQUENCES:
        raise InvalidArgument(
            f"sequence_index is {given.sequence_index}: it must be below {limits.MAX_SEQUENCES}",
            field="resume.sequence_index",
        )
    if message.logprobs.HasField("input_start"):
        raise InvalidArgument(
            "input_start is given: prompt logprobs are told where a request begins, leave it out",
            field="logprobs.input_start",
        )
    if sampling.max_tokens is not None and len(emitted) >= sampling.max_tokens:
        raise InvalidArgument(
            f"max_tokens is {sampling.max_tokens} and {len(emitted)} tokens are emitted: nothing is left to generate",
            field="resume.emitted_token_ids",
        )
    return Resume(emitted, given.emitted_text_bytes, given.sequence_index)


def _check_lengths(prompt: int, sampling: SamplingParams, model: ModelInfo, emitted: int) -> None:
    if prompt == 0:
        raise InvalidArgument("token_ids is empty: give at least one id", field="token_ids")
    limit, owner = model.context_length, "the context length"
    if model.max_request_tokens < limit:
        limit, owner = model.max_request_tokens, "what the KV pool holds (raise max-total-tokens)"
    room = 0 if sampling.max_tokens == 0 else 1
    if prompt + emitted + room > limit:
        already = f" and {emitted} are emitted" if emitted else ""
        raise InvalidArgument(
            f"the prompt has {prompt} tokens{already}, and the limit is {limit}, {owner}"
            + (", of which at least one must be left for the output" if room else "")
            + ": shorten the prompt",
            field="token_ids",
        )


def _sampling(given: pb.SamplingParams, model: ModelInfo) -> SamplingParams:
    base = model.default_sampling

    def pick(name: str, default: Any) -> Any:
        return getattr(given, name) if given.HasField(name) else default

    params = SamplingParams(
        temperature=pick("temperature", base.temperature),
        top_p=pick("top_p", base.top_p),
        top_k=pick("top_k", base.top_k),
        min_p=pick("min_p", base.min_p),
        repetition_penalty=pick("repetition_penalty", base.repetition_penalty),
        frequency_penalty=pick("frequency_penalty", base.frequency_penalty),
        presence_penalty=pick("presence_penalty", base.presence_penalty),
        seed=pick("seed", None),
        n=pick("n", 1),
        max_tokens=pick("max_tokens", None),
        min_tokens=pick("min_tokens", 0),
        stop=tuple(given.stop),
        stop_token_ids=tuple(given.stop_token_ids),
        ignore_eos=pick("ignore_eos", False),
        skip_special_tokens=pick("skip_special_tokens", True),
        include_stop=pick("include_stop", False),
        logit_bias=tuple(sorted(given.logit_bias.items())),
    )
    _check_numbers(params)
    _check_stops(params, model.vocab_size)
    _check_bias(params.logit_bias, model.vocab_size)
    return params


def _check_numbers(params: SamplingParams) -> None:
    for name, (low, high, closed) in _FLOATS.items():
        value = getattr(params, name)
        inside = math.isfinite(value) and value <= high and (value >= low if closed else value > low)
        if not inside:
            bracket = "[" if closed else "("
            raise InvalidArgument(
                f"{name} is {value:g}: it must be in {bracket}{low:g}, {high:g}]", field=f"sampling.{name}"
            )
    if params.top_k < -1:
        raise InvalidArgument(
            f"top_k is {params.top_k}: it must be positive, or -1 or 0 for all tokens", field="sampling.top_k"
        )
    if not 1 <= params.n <= limits.MAX_SEQUENCES:
        raise InvalidArgument(f"n is {params.n}: it must be in [1, {limits.MAX_SEQUENCES}]", field="sampling.n")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidArgument(
            f"min_tokens is {params.min_tokens}, above max_tokens {params.max_tokens}: lower it",
            field="sampling.min_tokens",
        )


def _check_stops(params: SamplingParams, vocab_size: int) -> None:
    if len(params.stop) > limits.MAX_STOPS:
        raise InvalidArgument(
            f"stop has {len(params.stop)} strings: at most {limits.MAX_STOPS} are allowed", field="sampling.stop"
        )
    for position, stop in enumerate(params.stop):
        size = len(stop.encode())
        if not 1 <= size <= limits.MAX_STOP_BYTES:
            raise InvalidArgument(
                f"stop[{position}] has {size} bytes: it must have 1 to {limits.MAX_STOP_BYTES}", field="sampling.stop"
            )
    if len(params.stop_token_ids) > limits.MAX_STOP_IDS:
        raise InvalidArgument(
            f"stop_token_ids has {len(params.stop_token_ids)} ids: at most {limits.MAX_STOP_IDS} are allowed",
            field="sampling.stop_token_ids",
        )
    check_ids(params.stop_token_ids, vocab_size, "sampling.stop_token_ids")


def _check_bias(bias: Iterable[tuple[int, float]], vocab_size: int) -> None:
    for token, value in bias:
        if token >= vocab_size:
            raise InvalidArgument(
                f"logit_bias names id {token}: ids must be below the vocabulary's size {vocab_size}",
                field="sampling.logit_bias",
            )
        if not -100.0 <= value <= 100.0:
            raise InvalidArgument(
                f"logit_bias of id {token} is {value:g}: it must be in [-100, 100]", field="sampling.logit_bias"
            )


def _logprobs(given: pb.LogprobParams, prompt: int, vocab_size: int) -> LogprobParams:
    if given.top_k > limits.MAX_TOP_LOGPROBS:
        raise InvalidArgument(
            f"top_k is {given.top_k}: it must be in [0, {limits.MAX_TOP_LOGPROBS}]", field="logprobs.top_k"
        )
    start = given.input_start if given.HasField("input_start") else None
    if start is not None and start > prompt:
        raise InvalidArgument(
            f"input_start is {start}: it must not be above the prompt's length {prompt}", field="logprobs.input_start"
        )
    if len(given.token_ids) > limits.MAX_CHOSEN_LOGPROBS:
        raise InvalidArgument(
            f"token_ids has {len(given.token_ids)} ids: at most {limits.MAX_CHOSEN_LOGPROBS} are allowed",
            field="logprobs.token_ids",
        )
    check_ids(given.token_ids, vocab_size, "logprobs.token_ids")
    return LogprobParams(given.output, given.top_k, start, tuple(given.token_ids))


def _namespace(
    given: pb.CacheNamespace, adapter: LoadedAdapter | None, model: ModelInfo, encode: NamespaceEncoder
) -> bytes:
    salt = given.cache_salt if given.HasField("cache_salt") else None
    extra = given.extra_key if given.HasField("extra_key") else None
    for name, value in (("cache_salt", salt), ("extra_key", extra)):
        if value is not None and len(value.encode()) > limits.MAX_KEY_BYTES:
            raise InvalidArgument(
                f"{name} has {len(value.encode())} bytes: at most {limits.MAX_KEY_BYTES} are allowed",
                field=f"cache_namespace.{name}",
            )
    return encode(salt, extra, None if adapter is None else adapter.adapter.digest, model.weight_version)


def _priority(message: pb.GenerateRequest) -> int:
    if not -limits.MAX_PRIORITY <= message.priority <= limits.MAX_PRIORITY:
        raise InvalidArgument(
            f"priority is {message.priority}: it must be in [-{limits.MAX_PRIORITY}, {limits.MAX_PRIORITY}]",
            field="priority",
        )
    return int(message.priority)


def _deadline(message: pb.GenerateRequest, now: float) -> float | None:
    if not message.HasField("deadline_ms"):
        return None
    if message.deadline_ms == 0:
        raise InvalidArgument("deadline_ms is 0: give at least 1, or leave it out", field="deadline_ms")
    return now + message.deadline_ms / 1000.0
