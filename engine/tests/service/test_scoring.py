"""Score: sums of what Generate reports, whatever shares the step, and refusals by field."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from branchline.engine.service.generated import engine_pb2 as pb
from served import PAGE, Served, contract_error, request, served
from tiny import VOCAB

PREFIX = [1, 2, 3, 4, 5, 6, 7, 8, 9]
CHOICES = [[10], [11, 12], [13, 14, 15], [10, 11]]


def asked(prefix: list[int] | None = None, choices: list[list[int]] | None = None, **fields: object) -> pb.ScoreRequest:
    message = pb.ScoreRequest(request_id="s", prefix_token_ids=PREFIX if prefix is None else prefix, **fields)
    for choice in CHOICES if choices is None else choices:
        message.choices.add(token_ids=choice)
    return message


async def reported(engine: Served, prefix: list[int], choice: list[int]) -> list[float]:
    """The input logprobs of a choice by Generate, alone."""
    message = request("alone", prefix + choice, max_tokens=0)
    message.logprobs.input_start = len(prefix)
    out: list[float] = []
    async for answer in engine.stub.Generate(message):
        for delta in answer.deltas:
            out.extend(delta.input_logprobs.logprobs)
    return out


async def test_scores_are_the_sums_of_what_each_choice_reports_alone() -> None:
    async with served() as engine:
        alone = [await reported(engine, PREFIX, choice) for choice in CHOICES]
        answer = await engine.stub.Score(asked())
        assert [list(score.token_logprobs) for score in answer.scores] == alone
        for score, logprobs in zip(answer.scores, alone, strict=True):
            assert score.sum == pytest.approx(sum(logprobs), abs=1e-9)
        await engine.idle()


async def test_the_prefix_is_computed_once_for_all_choices() -> None:
    async with served() as engine:
        answer = await engine.stub.Score(asked())
        whole = len(PREFIX) // PAGE * PAGE
        assert answer.prompt.prompt_tokens == sum(len(PREFIX) + len(choice) for choice in CHOICES)
        assert answer.prompt.cached_tokens == whole * len(CHOICES)
        again = await engine.stub.Score(asked())
        assert again.prompt.cached_tokens >= answer.prompt.cached_tokens
        assert [score.sum for score in again.scores] == [score.sum for score in answer.scores]


async def test_one_choice_needs_no_planting() -> None:
    async with served() as engine:
        answer = await engine.stub.Score(asked(choices=[[10, 11]]))
        assert len(answer.scores) == 1
        assert list(answer.scores[0].token_logprobs) == await reported(engine, PREFIX, [10, 11])


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (asked(prefix=[]), "prefix_token_ids"),
        (asked(choices=[]), "choices"),
        (asked(choices=[[1]] * 1025), "choices"),
        (asked(choices=[[1], []]), "choices[1].token_ids"),
        (asked(lease=pb.Lease(acquire_ttl_ms=5)), "lease"),
    ],
)
async def test_what_cannot_be_scored_is_refused_by_field(message: pb.ScoreRequest, field: str) -> None:
    async with served() as engine:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await engine.stub.Score(message)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert contract_error(refused.value).field == field
        await engine.idle()


async def test_a_bad_token_refuses_the_score_and_leaves_nothing_running() -> None:
    async with served() as engine:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await engine.stub.Score(asked(choices=[[1], [VOCAB]]))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await engine.idle()


async def test_scores_and_answers_run_beside_each_other() -> None:
    async with served() as engine:
        alone = await engine.stub.Score(asked())
        tasks = []
        for number in range(4):
            message = asked()
            message.request_id = f"s{number}"
            tasks.append(asyncio.ensure_future(engine.stub.Score(message)))
        async for _ in engine.stub.Generate(request("g")):
            pass
        for answer in await asyncio.gather(*tasks):
            assert [score.sum for score in answer.scores] == [score.sum for score in alone.scores]
        await engine.idle()


async def test_leaving_a_score_ends_its_work() -> None:
    async with served() as engine:
        call = engine.stub.Score(asked())
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await engine.idle()
