"""Generate, Abort and the information calls over a real channel."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time

import grpc
import grpc.aio
import pytest
from branchline import __version__
from branchline.engine.service.generated import engine_pb2 as pb
from branchline.engine.types import SamplingParams
from served import MODEL, PAGE, changed, contract_error, request, served, tokens, until
from tiny import VOCAB, expected


async def test_generate_streams_the_same_tokens_as_the_oracle() -> None:
    async with served() as engine:
        deltas = [delta async for answer in engine.stub.Generate(request()) for delta in answer.deltas]
        assert tokens(deltas) == expected([1, 2, 3], 8)
        assert {delta.handle for delta in deltas} == {0}
        assert deltas[0].prompt.prompt_tokens == 3
        assert deltas[-1].finish.timings.prefill_ms >= 0
        assert "".join(delta.text for delta in deltas) == "".join(chr(32 + token) for token in tokens(deltas))


async def test_generate_with_several_sequences_ends_after_the_last() -> None:
    async with served() as engine:
        answers = [one async for one in engine.stub.Generate(request(n=4, temperature=1.0, seed=3))]
        finished = [delta.index for one in answers for delta in one.deltas if delta.HasField("finish")]
        assert sorted(finished) == [0, 1, 2, 3]


async def test_logprobs_come_in_columns_of_equal_length() -> None:
    message = request()
    message.logprobs.CopyFrom(pb.LogprobParams(output=True, top_k=2, input_start=0, token_ids=[5, 6, 7]))
    async with served() as engine:
        deltas = [delta async for answer in engine.stub.Generate(message) for delta in answer.deltas]
        for delta in deltas:
            if delta.token_ids:
                assert delta.logprobs.token_ids == delta.token_ids
                assert len(delta.logprobs.logprobs) == len(delta.logprobs.top) == len(delta.token_ids)
                assert [list(one.token_ids) for one in delta.logprobs.chosen] == [[5, 6, 7]] * len(delta.token_ids)
        report = next(delta.input_logprobs for delta in deltas if delta.HasField("input_logprobs"))
        assert list(report.token_ids) == [1, 2, 3]
        assert report.logprobs[0] != report.logprobs[0], "position 0 has no logprob, which is NaN"
        assert all(value < 0 for value in report.logprobs[1:])


async def test_a_matched_stop_string_is_named() -> None:
    text = "".join(chr(32 + token) for token in expected([1, 2, 3], 8))
    async with served() as engine:
        deltas = [d async for a in engine.stub.Generate(request(stop=[text[3:5]])) for d in a.deltas]
        assert deltas[-1].finish.reason == pb.FINISH_REASON_STOP
        assert deltas[-1].finish.matched_stop == text[3:5]
        assert "".join(delta.text for delta in deltas) == text[: text.index(text[3:5])]


async def test_dropping_the_call_aborts_the_request() -> None:
    async with served() as engine:
        call = engine.stub.Generate(request(max_tokens=250))
        await call.read()
        call.cancel()
        await engine.idle()
        assert engine.executor.computed_tokens < 250


async def test_abort_is_exact_and_idempotent() -> None:
    async with served(pages=1024) as engine:
        calls = {name: engine.stub.Generate(request(name, max_tokens=240)) for name in ("job-1", "job-12", "xjob-1")}
        readers = {name: asyncio.ensure_future(_all(call)) for name, call in calls.items()}
        await until(lambda: engine.loop.stats().running == 3)
        assert (await engine.stub.Abort(pb.AbortRequest(request_id="job-1"))).aborted == 1
        ended = {name: await reader for name, reader in readers.items()}
        assert ended["job-1"][-1].finish.reason == pb.FINISH_REASON_ABORT
        assert [len(tokens(ended[name])) for name in ("job-12", "xjob-1")] == [240, 240]
        assert (await engine.stub.Abort(pb.AbortRequest(request_id="job-1"))).aborted == 0
        assert (await engine.stub.Abort(pb.AbortRequest(request_id="never"))).aborted == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await engine.stub.Abort(pb.AbortRequest())
        assert contract_error(caught.value).field == "request_id"


async def _all(call: object) -> list[pb.SequenceDelta]:
    return [delta async for answer in call for delta in answer.deltas]  # type: ignore[attr-defined]


async def test_abort_all_ends_everything() -> None:
    async with served(pages=1024) as engine:
        engine.executor.run = _slowed(engine.executor.run)  # type: ignore[method-assign]
        readers = [
            asyncio.ensure_future(_all(engine.stub.Generate(request(f"r{i}", max_tokens=240)))) for i in range(4)
        ]
        await until(lambda: engine.loop.stats().running == 4)
        assert (await engine.stub.Abort(pb.AbortRequest(abort_all=True))).aborted == 4
        for reader in readers:
            assert (await reader)[-1].finish.reason == pb.FINISH_REASON_ABORT
        await engine.idle()


def _slowed(run):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Steps that take long enough that no request ends by itself before it is aborted."""

    def slow(batch):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        time.sleep(0.02)
        return run(batch)

    return slow


async def test_model_info_says_what_is_loaded() -> None:
    model = changed(default_sampling=SamplingParams(temperature=0.5, top_k=20), bos_id=0)
    async with served(model=model) as engine:
        info = await engine.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert list(info.served_model_names) == ["tiny", "tiny.gguf"]
        assert (info.vocab_size, info.context_length, info.page_size) == (VOCAB, 256, PAGE)
        assert info.HasField("bos_token_id") and info.bos_token_id == 0
        assert (info.default_sampling.temperature, info.default_sampling.top_k) == (0.5, 20)
        assert not info.default_sampling.HasField("top_p")
    async with served() as engine:
        assert not (await engine.stub.GetModelInfo(pb.GetModelInfoRequest())).HasField("bos_token_id")


async def test_absent_sampling_fields_take_the_models_defaults() -> None:
    async with served(model=changed(default_sampling=SamplingParams(temperature=0.0))) as engine:
        message = pb.GenerateRequest(request_id="r", token_ids=[1, 2, 3])
        message.sampling.max_tokens = 8
        message.sampling.ignore_eos = True
        deltas = await _all(engine.stub.Generate(message))
        assert tokens(deltas) == expected([1, 2, 3], 8)


async def test_server_info_counts_the_cache_and_balances() -> None:
    prompt = list(range(1, 18))
    async with served() as engine:
        await _all(engine.stub.Generate(request("a", prompt, max_tokens=0)))
        again = await _all(engine.stub.Generate(request("b", prompt)))
        assert again[0].prompt.cached_tokens == 16
        info = await engine.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (info.version, info.engine_id) == (__version__, engine.servicer.engine_id)
        assert json.loads(info.options_json) == {"page_size": PAGE}
        assert list(info.components) == ["executors=tiny (test)"]
        cache = info.cache
        assert (cache.page_size, cache.pages_total) == (PAGE, 256)
        assert cache.pages_free + cache.pages_evictable + cache.pages_protected + cache.pages_private == 256
        assert (cache.prompt_tokens, cache.cached_tokens, cache.lookups, cache.hits) == (34, 16, 2, 1)
        assert info.steps > 0 and info.scheduler_ms_per_step > 0
        flushed = await engine.stub.FlushCache(pb.FlushCacheRequest())
        assert flushed.flushed_pages == cache.pages_evictable > 0 and flushed.held_pages == 0
        load = await engine.stub.GetLoad(pb.GetLoadRequest())
        assert (load.running, load.waiting, load.pages_used, load.pages_total) == (0, 0, 0, 256)


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        ({}, {}, 16),
        ({"cache_salt": "a"}, {"cache_salt": "a"}, 16),
        ({"cache_salt": "a"}, {"cache_salt": "b"}, 0),
        ({"cache_salt": "a"}, {"extra_key": "a"}, 0),
        ({"cache_salt": ""}, {}, 0),
    ],
)
async def test_prefixes_are_shared_within_a_namespace_only(
    first: dict[str, str], second: dict[str, str], shared: int
) -> None:
    async with served() as engine:
        deltas: list[pb.SequenceDelta] = []
        for name, space in (("a", first), ("b", second)):
            message = request(name, range(1, 18), max_tokens=1)
            message.cache_namespace.CopyFrom(pb.CacheNamespace(**space))
            deltas = await _all(engine.stub.Generate(message))
        assert deltas[0].prompt.cached_tokens == shared


async def test_tokenizer_comes_in_pieces_after_a_manifest_with_its_hash() -> None:
    async with served() as engine:
        parts = [part async for part in engine.stub.GetTokenizer(pb.GetTokenizerRequest())]
        manifest = parts[0].manifest
        content = b"".join(part.tokenizer_json for part in parts[1:])
        assert len(parts) == 4 and all(part.ByteSize() <= 1 << 20 for part in parts)
        assert content == MODEL.tokenizer_json
        assert manifest.tokenizer_json_bytes == len(content)
        assert manifest.tokenizer_json_sha256 == hashlib.sha256(content).digest()
        assert manifest.chat_template == "{{ messages }}" and manifest.eos_token == "</s>"
        assert not manifest.HasField("bos_token")


async def test_a_deadline_ends_the_request_as_aborted() -> None:
    async with served() as engine:
        message = request(max_tokens=250)
        message.deadline_ms = 1
        deltas = await _all(engine.stub.Generate(message))
        assert deltas[-1].finish.reason == pb.FINISH_REASON_ABORT
        assert "deadline" in deltas[-1].finish.message
