"""Every wrong field is refused by name, over the wire, and the next request is served."""

from __future__ import annotations

import math

import grpc
import grpc.aio
import pytest
from branchline.engine.service.generated import engine_pb2 as pb
from served import Served, contract_error, request, served
from tiny import VOCAB, expected

WRONG, LATER = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED


def with_fields(**fields: object) -> pb.GenerateRequest:
    message = request()
    message.MergeFrom(pb.GenerateRequest(**fields))  # type: ignore[arg-type]
    return message


def resumed(resume: pb.Resume, **sampling: object) -> pb.GenerateRequest:
    message = request(**sampling)
    message.resume.CopyFrom(resume)
    return message


def without_prompt() -> pb.GenerateRequest:
    message = request()
    del message.token_ids[:]
    return message


CASES: dict[str, tuple[pb.GenerateRequest, grpc.StatusCode, str, str]] = {
    "empty request id": (request(""), WRONG, "request_id", "0 bytes"),
    "long request id": (request("x" * 129), WRONG, "request_id", "129 bytes"),
    "empty prompt": (without_prompt(), WRONG, "token_ids", "empty"),
    "id beyond the vocabulary": (request("r", [1, VOCAB]), WRONG, "token_ids", f"token_ids[1] is {VOCAB}"),
    "over-long prompt": (request("r", [1] * 256), WRONG, "token_ids", "256 tokens, and the limit is 256"),
    "negative temperature": (request(temperature=-0.5), WRONG, "sampling.temperature", "-0.5"),
    "nan temperature": (request(temperature=math.nan), WRONG, "sampling.temperature", "nan"),
    "infinite temperature": (request(temperature=math.inf), WRONG, "sampling.temperature", "inf"),
    "hot temperature": (request(temperature=101.0), WRONG, "sampling.temperature", "101"),
    "zero top_p": (request(top_p=0.0), WRONG, "sampling.top_p", "(0, 1]"),
    "top_p above one": (request(top_p=1.5), WRONG, "sampling.top_p", "1.5"),
    "negative top_k": (request(top_k=-2), WRONG, "sampling.top_k", "-2"),
    "min_p above one": (request(min_p=1.25), WRONG, "sampling.min_p", "1.25"),
    "zero repetition penalty": (request(repetition_penalty=0.0), WRONG, "sampling.repetition_penalty", "(0, 10]"),
    "frequency penalty": (request(frequency_penalty=2.5), WRONG, "sampling.frequency_penalty", "2.5"),
    "presence penalty": (request(presence_penalty=-3.0), WRONG, "sampling.presence_penalty", "-3"),
    "nan presence penalty": (request(presence_penalty=math.nan), WRONG, "sampling.presence_penalty", "nan"),
    "no sequences": (request(n=0), WRONG, "sampling.n", "n is 0"),
    "too many sequences": (request(n=129), WRONG, "sampling.n", "129"),
    "min above max": (request(min_tokens=9), WRONG, "sampling.min_tokens", "above max_tokens 8"),
    "empty stop": (request(stop=["a", ""]), WRONG, "sampling.stop", "stop[1] has 0 bytes"),
    "long stop": (request(stop=["é" * 513]), WRONG, "sampling.stop", "1026 bytes"),
    "many stops": (request(stop=[str(i) for i in range(65)]), WRONG, "sampling.stop", "65"),
    "stop id": (request(stop_token_ids=[VOCAB + 4]), WRONG, "sampling.stop_token_ids", str(VOCAB + 4)),
    "many stop ids": (request(stop_token_ids=[1] * 1025), WRONG, "sampling.stop_token_ids", "1025"),
    "bias id": (request(logit_bias={VOCAB: 1.0}), WRONG, "sampling.logit_bias", f"names id {VOCAB}"),
    "bias value": (request(logit_bias={3: 100.5}), WRONG, "sampling.logit_bias", "100.5"),
    "bias nan": (request(logit_bias={3: math.nan}), WRONG, "sampling.logit_bias", "nan"),
    "many alternatives": (with_fields(logprobs=pb.LogprobParams(top_k=129)), WRONG, "logprobs.top_k", "129"),
    "input start": (with_fields(logprobs=pb.LogprobParams(input_start=4)), WRONG, "logprobs.input_start", "length 3"),
    "chosen id": (with_fields(logprobs=pb.LogprobParams(token_ids=[VOCAB])), WRONG, "logprobs.token_ids", str(VOCAB)),
    "many chosen ids": (
        with_fields(logprobs=pb.LogprobParams(token_ids=[1] * 1025)), WRONG, "logprobs.token_ids", "1025",
    ),
    "long salt": (
        with_fields(cache_namespace=pb.CacheNamespace(cache_salt="x" * 4097)),
        WRONG, "cache_namespace.cache_salt", "4097",
    ),
    "no time": (with_fields(deadline_ms=0), WRONG, "deadline_ms", "deadline_ms is 0"),
    "priority": (with_fields(priority=101), WRONG, "priority", "priority is 101"),
    "adapter": (
        with_fields(cache_namespace=pb.CacheNamespace(adapter="")), LATER, "cache_namespace.adapter", "adapter",
    ),
    "lease of neither kind": (with_fields(lease=pb.Lease(tenant="t")), WRONG, "lease", "either lease_id or"),
    "lease of both kinds": (with_fields(lease=pb.Lease(lease_id="a", acquire_ttl_ms=5)), WRONG, "lease", "either"),
    "lease on an answer": (
        with_fields(lease=pb.Lease(acquire_ttl_ms=5)), WRONG, "lease.acquire_ttl_ms", "set max_tokens to 0",
    ),
    "resumed siblings": (resumed(pb.Resume(), n=2, seed=1), WRONG, "sampling.n", "n is 2"),
    "resumed without its seed": (resumed(pb.Resume()), WRONG, "sampling.seed", "seed is missing"),
    "resumed id": (
        resumed(pb.Resume(emitted_token_ids=[VOCAB]), seed=1), WRONG, "resume.emitted_token_ids", str(VOCAB),
    ),
    "nothing left to resume": (
        resumed(pb.Resume(emitted_token_ids=[1] * 8), seed=1), WRONG, "resume.emitted_token_ids", "8 tokens",
    ),
    "text that was never sent": (
        resumed(pb.Resume(emitted_token_ids=[1], emitted_text_bytes=99), seed=1),
        WRONG, "resume.emitted_text_bytes", "99",
    ),
    "resumed index": (
        resumed(pb.Resume(sequence_index=128), seed=1), WRONG, "resume.sequence_index", "128",
    ),
    "grammar form": (with_fields(grammar=pb.Grammar()), WRONG, "grammar", "form"),
    "reasoning without an end mark": (
        with_fields(grammar=pb.Grammar(regex="a", reasoning=pb.Reasoning(begin="<t>"))),
        WRONG,
        "grammar.reasoning.end",
        "0 bytes",
    ),
    "long mark": (
        with_fields(grammar=pb.Grammar(regex="a", reasoning=pb.Reasoning(begin="x" * 65, end="y"))),
        WRONG,
        "grammar.reasoning.begin",
        "65 bytes",
    ),
    "unknown enforcement": (
        with_fields(grammar=pb.Grammar(regex="a", enforcement=7)),  # type: ignore[arg-type]
        WRONG,
        "grammar.enforcement",
        "is 7",
    ),
    "grammar without a backend": (with_fields(grammar=pb.Grammar(regex="a+")), WRONG, "grammar", "grammar-backend"),
    "draft": (with_fields(draft=pb.Draft(token_ids=[1])), LATER, "draft", "draft"),
    "hand-over without its half": (
        with_fields(disaggregation=pb.Disaggregation()), WRONG, "disaggregation.half", "half",
    ),
    "prefill half that generates": (
        with_fields(disaggregation=pb.Disaggregation(half=1)), WRONG, "sampling.max_tokens", "max_tokens is 8",
    ),
    "decode half without an address": (
        with_fields(disaggregation=pb.Disaggregation(half=2)), WRONG, "disaggregation.bootstrap_host", "address",
    ),
    "room beyond the range": (
        with_fields(disaggregation=pb.Disaggregation(half=2, bootstrap_room=2**63)),
        WRONG, "disaggregation.bootstrap_room", str(2**63),
    ),
    "parameters of a hand-over": (
        with_fields(disaggregation=pb.Disaggregation(half=2, parameters="{}")),
        LATER, "disaggregation.parameters", "parameters",
    ),
    "cache tier": (with_fields(cache_tier=0), LATER, "cache_tier", "cache_tier"),
}  # fmt: skip


async def refused(engine: Served, message: pb.GenerateRequest) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in engine.stub.Generate(message):
            pytest.fail("the request was served")
    return caught.value


@pytest.mark.parametrize("name", CASES)
async def test_wrong_field_is_refused_by_name_and_the_next_request_is_served(name: str) -> None:
    message, status, field, words = CASES[name]
    async with served() as engine:
        error = await refused(engine, message)
        assert (error.code(), contract_error(error).field) == (status, field)
        assert words in error.details()
        assert error.details() == contract_error(error).message
        assert error.details()[0].islower() and not error.details().endswith(".")
        answers = [answer async for answer in engine.stub.Generate(request())]
        assert [token for one in answers for delta in one.deltas for token in delta.token_ids] == expected([1, 2, 3], 8)
        await engine.idle()


def test_every_field_of_the_contract_is_either_used_or_in_the_table() -> None:
    covered = {field.split(".")[0] for _, _, field, _ in CASES.values()} | {"traceparent"}
    assert covered == {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields}
    sampling = {field.split(".")[1] for _, _, field, _ in CASES.values() if field.startswith("sampling.")}
    free = {"seed", "max_tokens", "ignore_eos", "skip_special_tokens", "include_stop"}  # every value is right
    assert sampling | free == {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}


@pytest.mark.parametrize(
    ("depth", "where"),
    [
        ("", "GenerateRequest"),
        ("sampling", "sampling"),
        ("logprobs", "logprobs"),
        ("cache_namespace", "cache_namespace"),
    ],
)
async def test_a_field_number_that_the_contract_lacks_is_refused_at_any_depth(depth: str, where: str) -> None:
    unknown = b"\xfa\x3f\x02hi"  # field 1023, two bytes
    message = request()
    target = getattr(message, depth) if depth else message
    target.MergeFromString(unknown)
    if depth:
        target.SetInParent()
    async with served() as engine:
        error = await refused(engine, message)
        assert error.code() == LATER
        assert "1023" in error.details() and where in contract_error(error).field


async def test_unknown_numbers_in_other_calls_and_envelopes_are_refused_too() -> None:
    unknown = b"\xfa\x3f\x02hi"
    async with served() as engine:
        for call, message in (
            (engine.stub.GetModelInfo, pb.GetModelInfoRequest()),
            (engine.stub.Abort, pb.AbortRequest(request_id="r")),
            (engine.stub.FlushCache, pb.FlushCacheRequest()),
        ):
            message.MergeFromString(unknown)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(message)
            assert caught.value.code() == LATER


async def test_a_prompt_that_fills_the_context_may_be_planted_but_not_continued() -> None:
    async with served() as engine:
        planted = [answer async for answer in engine.stub.Generate(request("p", [1] * 256, max_tokens=0))]
        assert planted[-1].deltas[0].finish.reason == pb.FINISH_REASON_LENGTH
        assert planted[-1].deltas[0].finish.completion_tokens == 0
        assert (await refused(engine, request("q", [1] * 256))).code() == WRONG


async def test_bytes_that_are_no_message_end_the_call_and_not_the_worker() -> None:
    async with served() as engine:
        raw = engine.channel.unary_stream("/branchline.engine.v1.Engine/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in raw(b"\xff\xff\xff\xff"):
                pass
        assert caught.value.code() == grpc.StatusCode.UNKNOWN  # gRPC's own answer
        assert (await engine.stub.GetLoad(pb.GetLoadRequest())).running == 0
