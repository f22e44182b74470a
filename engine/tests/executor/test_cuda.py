"""The executor torch-cuda on a CPU: the same code, over a device that is late and forbids what a GPU can not do."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from branchline.engine import attention, executor, hooks  # noqa: F401  the first two register
from branchline.engine.cache import CacheContext, build_cache
from branchline.engine.config import EngineConfig
from branchline.engine.errors import InternalError, LoadError
from branchline.engine.executor.cuda.build import CudaOptions, build_executor, build_on_ranks
from branchline.engine.executor.cuda.engine import CudaExecutor
from branchline.engine.executor.cuda.group import Alone
from branchline.engine.executor.cuda.lead import heard, told
from branchline.engine.executor.cuda.ops import KernelOps, PlainOps
from branchline.engine.executor.cuda.parallel import Place, gather, place_of
from branchline.engine.executor.cuda.shard import share_of
from branchline.engine.executor.cuda.staging import Staging
from branchline.engine.executor.cuda.step import graph_sizes
from branchline.engine.executor.pytorch import TorchExecutor
from branchline.engine.executor.pytorch import build_executor as build_torch
from branchline.engine.loop import EngineLoop, LoopOptions
from branchline.engine.loop_ahead import AheadLoop
from branchline.engine.model.load import load_model
from branchline.engine.model.spec import ModelSpec
from branchline.engine.quantization.online import Fp8, Int8Dynamic
from branchline.engine.sampling.sampler import sample
from branchline.engine.scheduler import SchedulerOptions
from branchline.engine.service import assembly, main
from branchline.engine.types import HostExecutor, LogprobParams, PageExecutor, Request, RowPlan, SamplingParams
from branchline.testing import attention as conformance
from flashlike import module
from harness import EOS, Answer, Engine, vocabulary
from recorder import Recorder, RuleBroken
from small import EXPERTS, SPEC, WINDOW, loaded, save
from tiny import VOCAB

from .driver import Line, batch_of

SIZE, PAGES = 4, 96
GRAPHS = CudaOptions(graph_rows=6, context_length=64)
GREEDY = SamplingParams(temperature=0.0)


def build(spec: ModelSpec = SPEC, options: CudaOptions = GRAPHS, backend: str = "fixed", **named: Any) -> CudaExecutor:
    named = {"dtype": "float32", "runtime": Recorder(), **named}
    return build_executor(
        loaded(spec), device="cpu", num_pages=PAGES, page_size=SIZE, threads=1, attention_backend=backend,
        options=options, **named,
    )  # fmt: skip


def plain(spec: ModelSpec = SPEC, dtype: str = "float32") -> TorchExecutor:
    return build_torch(
        loaded(spec), device="cpu", dtype=dtype, num_pages=PAGES, page_size=SIZE, threads=1,
        attention_backend="torch_paged",
    )  # fmt: skip


def logits_of(one: Any, work: Sequence[tuple[Line, Sequence[int]]], every_row: bool = False) -> torch.Tensor:
    found = one.run(batch_of(SIZE, work, every_row))
    assert isinstance(found, torch.Tensor)
    return found.clone()


def lines(count: int) -> list[Line]:
    order = list(range(PAGES))
    random.Random(4).shuffle(order)
    return [Line(order[number::count]) for number in range(count)]


def compare(one: CudaExecutor, oracle: TorchExecutor, tolerance: float, steps: int = 8) -> None:
    """Prompts, chunks beside decodes, then decodes alone, of more rows and fewer than there are graphs for."""
    chance, own, theirs = random.Random(1), lines(7), lines(7)
    for step in range(steps):
        among = range(7) if step < 4 else sorted(chance.sample(range(7), 1 + step % 7))
        counts = [1 if step > 3 or (step and row % 2) else chance.randrange(1, 9) for row in among]
        new = [[chance.randrange(VOCAB) for _ in range(count)] for count in counts]
        found = logits_of(one, [(own[row], ids) for row, ids in zip(among, new, strict=True)], step == 1)
        expected = logits_of(oracle, [(theirs[row], ids) for row, ids in zip(among, new, strict=True)], step == 1)
        assert found.shape == expected.shape
        assert (found - expected).abs().max() < tolerance


@pytest.mark.parametrize(
    ("spec", "options", "backend"),
    [
        (SPEC, GRAPHS, "fixed"),
        (WINDOW, replace(GRAPHS, deterministic=True), "fixed"),
        (WINDOW, CudaOptions(), "triton"),
        (EXPERTS, GRAPHS, "torch_paged"),
    ],
    ids=["graphs", "window, deterministic", "our kernels' plain forms", "experts"],
)
def test_mixed_steps_give_the_logits_of_the_torch_executor(spec: ModelSpec, options: CudaOptions, backend: str) -> None:
    one = build(spec, options, backend)
    one.pool.fill_(float("nan"))  # of others: reaches no row
    one.pool[:, :, -SIZE:] = 0
    compare(one, plain(spec), 1e-4)
    log = one._device.log  # type: ignore[attr-defined]
    assert log.count("capture") == (2 if options.graph_rows and spec.experts is None else 0)  # of 8 and 1 rows
    assert log.count("replay") >= log.count("capture")


def test_flashinfer_is_planned_once_a_step_and_outside_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "flashinfer", module(recorder))
    monkeypatch.setattr("branchline.engine.attention.flashinfer.WORKSPACE", 1 << 10)
    one = build(WINDOW, GRAPHS, "flashinfer", dtype="bfloat16", runtime=recorder)
    oracle = plain(WINDOW, "bfloat16")
    compare(one, oracle, 0.12)  # both round to 8 bits after each operation
    steps = [word for word in recorder.log if word in ("plan", "replay", "capture")]
    assert steps.count("plan") == 8 + steps.count("capture")
    for before, word in pairwise(steps):
        if word in ("replay", "capture"):
            assert before == "plan"
    with pytest.raises(LoadError, match="no float32 kernels"):
        build(backend="flashinfer")


@pytest.mark.parametrize("name", ["fixed", "triton", "triton_invariant"])
@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_attention_backends_conform(name: str, check: Callable[[Any], None]) -> None:
    from branchline.registry import attention_backends

    check(attention_backends.get(name))


def test_kernels_and_plain_operations_are_the_same_function() -> None:
    torch.manual_seed(2)
    ops = [KernelOps(1e-6, invariant=False), PlainOps(1e-6, invariant=False), KernelOps(1e-6, invariant=True)]
    weight, matrix, bias = torch.randn(48), torch.randn(128, 48), torch.randn(128)
    held = Fp8().matrix(matrix)
    assert held is not None
    found = []
    for one in ops:
        torch.manual_seed(3)
        x, residual, pool = torch.randn(5, 48), torch.randn(5, 48), torch.zeros(2, 12, 2, 16)
        table = (torch.randn(30, 16), torch.randn(30, 16))
        projected = one.linear(x, matrix, bias)
        places = torch.tensor([3, 0, 29, 7, 8])
        turned = one.rope_write(
            projected, table, places, torch.tensor([1, 0, 5, 11, 7]), (pool[0], pool[1]), (weight[:16], weight[:16])
        )
        normed = one.add_norm(x, residual, weight)
        found.append((projected, turned, pool, normed, residual, one.norm(x, weight), one.linear(x, held)))
    for own in zip(*found, strict=True):
        for other in own[1:]:
            torch.testing.assert_close(other, own[0], rtol=1e-4, atol=1e-4)


# ---- sampling -----------------------------------------------------------------------------------


def test_queued_sampling_answers_as_the_sampler_does() -> None:
    torch.manual_seed(1)
    one = build(options=CudaOptions())
    logits = torch.randn(13, VOCAB) * 3
    logits[7, 3], logits[8] = float("nan"), torch.round(logits[8])
    kinds = [
        GREEDY, SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_p=0.7), SamplingParams(min_p=0.1),
        SamplingParams(temperature=0.3, top_k=9, top_p=0.8, min_p=0.02), SamplingParams(repetition_penalty=1.3),
        SamplingParams(), GREEDY, SamplingParams(logit_bias=((3, 5.0), (9, -2.0))), SamplingParams(temperature=1e-5),
        SamplingParams(top_k=1), SamplingParams(temperature=0.0, frequency_penalty=0.5),
    ]  # fmt: skip
    plans = []
    for row, params in enumerate(kinds):
        state = one.penalty_state((1, 2, 3, 50), params)
        for token in (5, 6, 6, 90) if state is not None else ():
            one.observe(state, token)
        plans.append(
            RowPlan(
                row, params, seed=row * 3 * 10**18, position=row + 5, penalties=state, want_logprob=row % 3 > 0,
                banned=(2, 7) if row % 3 == 0 else (), top_k=3 if row % 2 else 0,
                chosen_ids=(1, 2) if row % 4 == 0 else (), ahead=(4, 4) if state is not None else (),
                mask=np.array([0x0FF0F0F0, 7], np.int32) if row == 1 else None,
            )
        )  # fmt: skip
    plans.append(RowPlan(3, GREEDY, target=44, want_logprob=True, top_k=2))
    plans.append(RowPlan(3, GREEDY, mask=np.zeros(2, np.int32)))
    expected = sample(logits.clone(), plans)
    found = one.sample(logits, plans)
    assert found == expected
    assert [plan.error is None for plan in found].count(False) == 2
    assert one.sample(logits, []) == []


# ---- the loop -----------------------------------------------------------------------------------


class Served:
    """A loop over an executor, stepped by hand."""

    def __init__(self, one: Any, kind: type[EngineLoop], **limits: Any) -> None:
        options = LoopOptions(SchedulerOptions(**limits), eos_token_ids=(EOS,), audit_when_idle=True)
        cache = build_cache("native", CacheContext(PAGES, SIZE))
        self.loop = kind(one, cache, vocabulary(), options, draw_seed=lambda: 5)
        self.answers: dict[tuple[str, int], Answer] = {}

    def submit(self, name: str, prompt: Sequence[int], logprobs: LogprobParams | None = None, **params: Any) -> None:
        request = Request(
            name, tuple(prompt), SamplingParams(**{"temperature": 0.0, **params}), logprobs or LogprobParams()
        )
        self.loop.submit(request, self._take)

    def _take(self, step: int, deltas: list[Any]) -> None:
        for delta in deltas:
            assert delta.error is None, delta.error
            Engine._add(self.answers.setdefault((delta.request_id, delta.index), Answer()), delta)

    def finish(self) -> None:
        while self.loop.busy:
            self.loop.step()
        self.loop.audit()


def traffic(served: Served, count: int = 8) -> dict[tuple[str, int], tuple[list[int], str]]:
    """Requests of all kinds, coming while others run; their ids and texts."""
    chance = random.Random(9)
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0.8, "top_p": 0.9}, {"n": 2, "temperature": 1.0}, {"stop": ("e", "Q7")},
        {"frequency_penalty": 0.7}, {"min_tokens": 4}, {"temperature": 0.7, "top_k": 8, "seed": 77},
        {"ignore_eos": True},
    ]  # fmt: skip
    for number in range(count):
        prompt = [chance.randrange(VOCAB - 1) for _ in range(chance.randrange(1, 22))]
        logprobs = LogprobParams(output=number % 2 == 0, top_k=2, input_start=0 if number == 3 else None)
        served.submit(str(number), prompt, logprobs, max_tokens=chance.randrange(2, 16), **kinds[number])
        for _ in range(chance.randrange(4)):
            served.loop.step()
    served.finish()
    return {key: (one.token_ids, one.text) for key, one in served.answers.items()}


@pytest.fixture(scope="module")
def expected() -> dict[tuple[str, int], tuple[list[int], str]]:
    """What the torch executor answers."""
    return traffic(Served(plain(), EngineLoop, max_step_tokens=24, max_running_requests=5))


@pytest.mark.parametrize("backend", ["fixed", "triton"])
def test_the_whole_loop_answers_as_on_the_torch_executor(
    backend: str, expected: dict[tuple[str, int], tuple[list[int], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = build(options=GRAPHS if backend == "fixed" else CudaOptions(), backend=backend)
    ahead: list[int] = []
    launch = CudaExecutor.launch

    def counted(self: CudaExecutor, batch: Any, plans: list[RowPlan]) -> object:
        ahead.append(batch.ahead is not None)
        return launch(self, batch, plans)

    monkeypatch.setattr(CudaExecutor, "launch", counted)
    assert traffic(Served(one, AheadLoop, max_step_tokens=24, max_running_requests=5)) == expected
    assert sum(ahead) > 10
    one._device.settle(list(one._device.queue))  # type: ignore[attr-defined]


# ---- deterministic ------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SPEC, EXPERTS], ids=["dense", "experts"])
def test_deterministic_gives_the_same_bits_in_any_company(spec: ModelSpec) -> None:
    chance = random.Random(2)
    text = [chance.randrange(VOCAB) for _ in range(75)]
    found = []
    for options, cuts, neighbours in (
        (CudaOptions(deterministic=True), [75], 0),
        (CudaOptions(deterministic=True), [1] * 75, 0),
        (replace(GRAPHS, deterministic=True, context_length=128), [30, 1, 20, 1, 1, 22], 4),
        (replace(GRAPHS, deterministic=True, context_length=128), [70, 1, 1, 1, 1, 1], 2),
    ):
        one, own = build(spec, options), lines(5)
        at, pieces = 0, []
        for step, cut in enumerate(cuts):
            others = [
                (line, [chance.randrange(VOCAB) for _ in range(1 if step > 2 else chance.randrange(1, 9))])
                for line in own[1 : 1 + neighbours]
            ]
            place = chance.randrange(len(others) + 1)
            work = [*others[:place], (own[0], text[at : at + cut]), *others[place:]]
            first = sum(len(ids) for _, ids in others[:place])
            pieces.append(logits_of(one, work, every_row=True)[first : first + cut])
            at += cut
        found.append(torch.cat(pieces))
    assert all(torch.equal(other, found[0]) for other in found[1:])
    # What is compared can differ: the same rows of an executor that promises less do.
    loose = build(spec, CudaOptions(), "torch_paged")
    rows = [logits_of(loose, [(line, [token])]) for line in lines(1) for token in text]
    assert not torch.equal(torch.cat(rows), logits_of(loose, [(lines(1)[0], text)], every_row=True))


# ---- rules --------------------------------------------------------------------------------------


def test_pinned_buffers_in_flight_are_not_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Recorder()
    staging = Staging(device, buffers=2)
    for number in range(5):
        found = staging.upload({"a": np.arange(number, number + 40), "b": np.ones((2, 3), np.float32)})
        assert found["a"].tolist() == list(range(number, number + 40)) and found["b"].shape == (2, 3)
    large = staging.upload({"a": np.arange(40_000, dtype=np.int32)})["a"]
    assert int(large[-1]) == 39_999
    with pytest.raises(ValueError, match="do not fit a graph's inputs of 8"):
        staging.upload({"a": np.arange(4)}, into=torch.empty(8, dtype=torch.uint8))
    monkeypatch.setattr(staging, "_marks", [None, None])  # one that forgets to wait
    staging.upload({"a": np.arange(3)})
    monkeypatch.setattr(staging, "_marks", [None, None])
    staging.upload({"a": np.arange(7, 10)})
    monkeypatch.setattr(staging, "_marks", [None, None])
    staging.upload({"a": np.arange(9, 12)})
    with pytest.raises(RuleBroken, match="while a copy from it was in flight"):
        device.mark().wait()


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda device, x: x.sum().item(), "inside a capture"),
        (lambda device, x: x[x > 0], "index waits"),
        (lambda device, x: x.add_(torch.tensor([1.0, 2.0])), "tensor inside"),
        (lambda device, x: device.send(x, x), "send inside"),
        (lambda device, x: device.mark(), "mark inside"),
    ],
)
def test_a_capture_refuses_what_a_device_could_not_repeat(step: Callable[..., Any], words: str) -> None:
    device, x = Recorder(), torch.ones(2)
    with pytest.raises(RuleBroken, match=words):
        device.capture(lambda: step(device, x) if device.capturing else None)


def test_results_are_not_there_before_they_were_waited_for() -> None:
    device = Recorder()
    target = device.pinned(8)
    device.fetch(target, torch.arange(8, dtype=torch.uint8))
    mark = device.mark()
    assert target.tolist() == [0xAB] * 8
    mark.wait()
    assert target.tolist() == list(range(8))
    with pytest.raises(RuleBroken, match="needs pinned memory"):
        device.fetch(torch.empty(8, dtype=torch.uint8), target)


def test_a_graph_whose_input_is_replaced_and_not_filled_gives_the_old_answer() -> None:
    device, box = Recorder(), [torch.ones(3)]
    out = torch.zeros(3)
    graph = device.capture(lambda: out.copy_(box[0] * 2))
    box[0] = torch.full((3,), 5.0)
    graph.replay()
    assert out.tolist() == [2.0] * 3


def test_sizes_of_graphs_reach_the_limit() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(6) == [1, 2, 4, 8]
    sizes = graph_sizes(300)
    assert sizes[-1] >= 300 and sizes == sorted(set(sizes))


# ---- pool, weights, refusals --------------------------------------------------------------------


def test_an_fp8_pool_holds_pages_of_a_quarter_and_gives_near_answers() -> None:
    exact, short = build(), build(options=replace(GRAPHS, kv_cache_dtype="fp8"))
    assert 4 * short.page_bytes == exact.page_bytes
    prompt = list(range(30))
    expected = logits_of(exact, [(Line([3, 1, 7, 5, 9, 11, 2, 8]), prompt)])
    found = logits_of(short, [(Line([3, 1, 7, 5, 9, 11, 2, 8]), prompt)])
    assert 0 < (found - expected).abs().max() < 0.25 * expected.abs().max()
    other = build(options=replace(GRAPHS, kv_cache_dtype="fp8"))
    other.write_pages([20, 21], short.read_pages([3, 1]))
    assert other.read_pages([20, 21]) == short.read_pages([3, 1])
    assert exact.numerics_id != short.numerics_id


def test_fp8_weights_run_and_stay_near() -> None:
    prompt = list(range(30))
    expected = logits_of(build(), [(Line(list(range(8))), prompt)])
    found = logits_of(build(quantization=Fp8()), [(Line(list(range(8))), prompt)])
    assert 0 < (found - expected).abs().max() < 0.2 * expected.abs().max()


@pytest.mark.parametrize(
    ("backend", "options", "named", "field"),
    [
        ("torch_paged", CudaOptions(deterministic=True), {}, "attention_backend"),
        ("torch_paged", CudaOptions(kv_cache_dtype="fp8"), {}, "kv_cache_dtype"),
        ("fixed", CudaOptions(kv_cache_dtype="int3"), {}, "kv_cache_dtype"),
        ("fixed", CudaOptions(deterministic=True), {"quantization": Int8Dynamic()}, "quantization"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    backend: str, options: CudaOptions, named: dict[str, Any], field: str
) -> None:
    with pytest.raises(LoadError) as refused:
        build(SPEC, options, backend, **named)
    assert refused.value.field == field


def test_a_closed_executor_refuses_to_run() -> None:
    one = build()
    one.close()
    one.close()
    with pytest.raises(InternalError, match="closed"):
        logits_of(one, [(Line([0]), [1])])
    with pytest.raises(InternalError, match="0 plans"):
        one.launch(batch_of(SIZE, [(Line([0]), [1])]), [])


# ---- ranks --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    save(folder)
    return folder


def test_two_ranks_answer_as_one_and_the_death_of_one_is_told(checkpoint: Path) -> None:
    named: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "num_pages": PAGES, "page_size": SIZE, "threads": 1,
        "attention_backend": "fixed", "options": CudaOptions(graph_rows=4, context_length=64),
    }  # fmt: skip
    lost: list[str] = []
    model = load_model(str(checkpoint))
    limits = {"max_step_tokens": 24, "max_running_requests": 5}
    alone = build_executor(model, **named)
    whole = traffic(Served(alone, EngineLoop, **limits))
    two = build_on_ranks(model, 2, os.environ, lost.append, **named)
    try:
        assert two.decoder.pool.shape[3] * 2 == alone.decoder.pool.shape[3]
        assert two.decoder.weights.head.shape[0] * 2 == VOCAB
        common = {name: value for name, value in named.items() if name not in ("options", "attention_backend")}
        compare(two, build_torch(model, **common, attention_backend="torch_paged"), 1e-4)
        assert traffic(Served(two, AheadLoop, **limits)) == whole
        assert not isinstance(two, PageExecutor) and isinstance(two, HostExecutor)
        expected = logits_of(two, [(Line([5, 6]), [1, 2, 3, 4, 5])])
        two.reserve_host(2)
        two.move_pages([(True, 5, 1), (True, 6, 0)])
        two.move_pages([(False, 7, 1), (False, 8, 0)])
        moved, kept = Line([7, 8], 5), Line([5, 6], 5)
        assert torch.equal(logits_of(two, [(moved, [9])]), logits_of(two, [(kept, [9])]))
        assert expected.shape == (1, VOCAB) and not lost
        child = two._ranks._children[0]  # type: ignore[attr-defined]
        child.kill()
        child.wait(20)
        with pytest.raises(InternalError, match="can't be computed without all 2 ranks"):
            for _ in range(100):
                logits_of(two, [(Line([5, 6]), [1, 2, 3])])
        assert len(lost) == 1
    finally:
        two.close()


def test_ranks_that_do_not_fit_are_refused(checkpoint: Path) -> None:
    group = Alone()
    group.size = 3  # type: ignore[misc]
    with pytest.raises(LoadError, match="heads 4 can't be divided among 3 ranks"):
        share_of(load_model(str(checkpoint)), group)
    torchrun = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with pytest.raises(LoadError, match="tensor-parallel-size is 2 and torchrun started 4 ranks"):
        gather(2, gpu=False, fixed_order=False, env=torchrun)
    assert place_of({}) is None and place_of(torchrun) == Place(0, 4, 0)


def test_a_batch_is_heard_as_it_was_told() -> None:
    batch = batch_of(SIZE, [(Line([4, 9, 2]), [1] * 9), (Line([7]), [3])])
    batch.ahead = np.array([-1] * 9 + [4], np.int32)
    again = heard(told(batch))
    assert again.page_tables == batch.page_tables
    for name in ("token_ids", "positions", "slots", "query_lens", "context_lens", "logit_rows", "ahead"):
        assert getattr(again, name).tolist() == getattr(batch, name).tolist()


def test_options_reach_the_executor_and_what_is_told_of_it(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common: dict[str, Any] = {
        "model": str(checkpoint), "executor": "torch-cuda", "device": "cpu", "max_total_tokens": 128,
        "grammar_backend": "none", "threads": 1,
    }  # fmt: skip
    made = assembly.build(EngineConfig(**common, deterministic=True, cuda_graph_rows=3), lambda *_: None)
    other = assembly.build(EngineConfig(**common, overlap_schedule=False, kv_cache_dtype="auto"), lambda *_: None)
    try:
        assert isinstance(made, assembly.Engine) and isinstance(other, assembly.Engine)
        assert (type(made.loop), type(other.loop)) == (AheadLoop, EngineLoop)
        assert (made.model.output_promise, other.model.output_promise) == ("bitwise", "near-ties")
        assert any("attention_backends=fixed" in one for one in made.components)
        assert isinstance(made.executor, CudaExecutor) and made.executor._graphs is not None
        assert made.executor._graphs.fits(4) and not made.executor._graphs.fits(5)
        assert made.model.numerics_id != other.model.numerics_id
    finally:
        made.close()
        other.close()

    class Hooked(hooks.Chain):
        def at(self, point: str) -> list[Any]:
            return [point] if point == "weights.loaded" else []

    with monkeypatch.context() as patch:
        patch.setattr(hooks, "assemble", Hooked)
        with pytest.raises(LoadError, match="see one rank's weights"):
            assembly.build(EngineConfig(**common, tensor_parallel_size=2), lambda *_: None)
    heard: list[str] = []
    monkeypatch.setattr("branchline.engine.executor.cuda.follow.main", lambda env: (heard.append(env["RANK"]), 7)[1])
    monkeypatch.setenv("RANK", "1")
    assert main.run(EngineConfig(**common, tensor_parallel_size=2)) == 7 and heard == ["1"]
