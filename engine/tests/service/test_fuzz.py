"""The proto boundary against anything at all: a request or a typed refusal, never another exception, and the
next request is served."""

from __future__ import annotations

import math

import grpc
import grpc.aio
from branchline import _native
from branchline.engine.errors import EngineError
from branchline.engine.service.generated import engine_pb2 as pb
from branchline.engine.service.validate import to_request
from branchline.engine.types import Request
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from served import MODEL, served
from tiny import VOCAB

U32 = st.one_of(st.integers(0, 200), st.integers(0, 2**32 - 1))
FLOATS = st.one_of(st.floats(-1e6, 1e6), st.sampled_from([0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e38]))
WORDS = st.one_of(st.text(max_size=20), st.just("x" * 5000), st.just(""), st.just("\x00\ud7ff"))


SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        **{
            name: FLOATS
            for name in (
                "temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
            )
        },
        "top_k": st.integers(-(2**31), 2**31 - 1),
        "seed": st.integers(0, 2**64 - 1),
        "n": U32,
        "max_tokens": U32,
        "min_tokens": U32,
        "stop": st.lists(WORDS, max_size=70),
        "stop_token_ids": st.lists(U32, max_size=5),
        "ignore_eos": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "include_stop": st.booleans(),
        "logit_bias": st.dictionaries(U32, FLOATS, max_size=4),
    },
)  # fmt: skip
REQUESTS = st.fixed_dictionaries(
    {
        "request_id": WORDS,
        "token_ids": st.lists(U32, max_size=300),
    },
    optional={
        "sampling": SAMPLING,
        "logprobs": st.fixed_dictionaries(
            {}, optional={"output": st.booleans(), "top_k": U32, "input_start": U32, "token_ids": st.lists(U32)}
        ),
        "cache_namespace": st.fixed_dictionaries(
            {}, optional={"cache_salt": WORDS, "extra_key": WORDS, "adapter": WORDS}
        ),
        "priority": st.integers(-(2**31), 2**31 - 1),
        "deadline_ms": st.integers(0, 2**64 - 1),
        "traceparent": WORDS,
        "cache_tier": U32,
        "resume": st.just({"emitted_token_ids": [1]}),
        "draft": st.just({"token_ids": [1]}),
    },
)


def outcome(message: pb.GenerateRequest) -> Request | EngineError:
    """What becomes of it; anything else than these two is raised."""
    try:
        return to_request(message, MODEL, _native.namespace)
    except EngineError as error:
        assert error.message and not error.message.endswith("."), error.message
        return error


@settings(max_examples=400, deadline=None)
@given(REQUESTS)
def test_every_request_is_taken_or_refused_by_a_field(fields: dict[str, object]) -> None:
    found = outcome(pb.GenerateRequest(**fields))  # type: ignore[arg-type]
    if isinstance(found, EngineError):
        assert found.field
        return
    params = found.sampling
    assert 0 < len(found.token_ids) < MODEL.context_length and max(found.token_ids) < VOCAB
    assert 0 <= params.temperature <= 100 and 0 < params.top_p <= 1 and 1 <= params.n <= 128
    assert all(token < VOCAB and math.isfinite(value) for token, value in params.logit_bias)
    assert -100 <= found.priority <= 100


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=200))
def test_bytes_that_are_a_request_by_chance_are_taken_or_refused(data: bytes) -> None:
    message = pb.GenerateRequest()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return
    outcome(message)


@settings(max_examples=200, deadline=None)
@given(REQUESTS, st.integers(0, 400), st.integers(0, 255))
def test_a_flipped_byte_never_passes_for_an_internal_fault(fields: dict[str, object], at: int, value: int) -> None:
    data = bytearray(pb.GenerateRequest(**fields).SerializeToString())  # type: ignore[arg-type]
    if data:
        data[at % len(data)] = value
    message = pb.GenerateRequest()
    try:
        message.ParseFromString(bytes(data))
    except DecodeError:
        return
    outcome(message)


async def test_a_server_outlives_any_bytes_on_its_streams() -> None:
    async with served() as engine:
        address = f"127.0.0.1:{engine.server.port}"
        async with grpc.aio.insecure_channel(address) as channel:
            attach = channel.stream_stream("/branchline.engine.v1.Engine/Attach")
            generate = channel.unary_stream("/branchline.engine.v1.Engine/Generate")
            for data in (b"", b"\x00", b"\xff" * 64, b"\x0a\x00" * 9, b"\x12\xff\xff\xff\xff\x0f", bytes(range(256))):
                call = attach()
                try:
                    await call.write(data)
                    await call.done_writing()
                    async for _ in call:
                        pass
                except grpc.aio.AioRpcError:
                    pass
                try:
                    async for _ in generate(data):
                        pass
                except grpc.aio.AioRpcError as error:
                    assert error.code() is not grpc.StatusCode.UNKNOWN or "DecodeError" in (error.details() or "")
        sampling = pb.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        message = pb.GenerateRequest(request_id="after", token_ids=[1, 2, 3], sampling=sampling)
        told = [delta async for answer in engine.stub.Generate(message) for delta in answer.deltas]
        assert told[-1].finish.completion_tokens == 3
