"""What every quantisation method and every provider of model overrides must do."""

from __future__ import annotations

from collections.abc import Callable

from branchline.engine import options
from branchline.engine.config import EngineConfig
from branchline.engine.overrides.base import ModelFacts, ModelOverride
from branchline.engine.quantization.base import QuantizationMethod

WORST = 0.15  # relative error of a product, as a norm


def a_matrix_multiplies_nearly_as_its_weight_does(make: Callable[[], QuantizationMethod]) -> None:
    """With and without bias, in no more bytes than float32 takes. A method may leave weights as they are."""
    import torch

    method = make()
    assert method.executors, "no executor runs it"
    torch.manual_seed(1)
    weight, x, bias = torch.randn(24, 64), torch.randn(5, 64), torch.randn(24)
    held = method.matrix(weight.clone())
    if held is None:
        return
    assert tuple(held.shape) == (24, 64) and 0 < held.nbytes() <= 4 * weight.numel() + 4096
    for added in (None, bias):
        wanted = torch.nn.functional.linear(x, weight, added)
        found = held.linear(x, added)
        assert found.dtype == x.dtype and found.shape == wanted.shape
        error = ((found - wanted).norm() / wanted.norm()).item()
        assert error < WORST, f"relative error {error:.3f}"


def _facts(architecture: str, **more: object) -> ModelFacts:
    given: dict[str, object] = {
        "reference": "m", "architecture": architecture, "parameters": 10**9, "context_length": 8192,
        "vocab_size": 32_000, "stored_dtype": "bfloat16", "quantization": "", "sliding_window": None,
    }  # fmt: skip
    return ModelFacts(**{**given, **more})  # type: ignore[arg-type]


def options_are_known_and_in_range_for_any_checkpoint(make: Callable[[], ModelOverride]) -> None:
    """Whatever is told of a checkpoint; and the same is answered twice."""
    provider = make()
    rows = {row.name: row for row in options.table(EngineConfig)}
    for architecture in (*provider.architectures, "LlamaForCausalLM", "NobodysForCausalLM"):
        for more in ({}, {"context_length": 1_000_000}, {"quantization": "awq"}, {"sliding_window": 4096}):
            facts = _facts(architecture, **more)
            assert provider.applies(facts) is provider.applies(facts)
            found = provider.options(facts)
            assert dict(found) == dict(provider.options(facts))
            for name, value in found.items():
                assert name in rows, f"{name!r} is no option"
                assert not options.value_faults(rows[name], value), options.value_faults(rows[name], value)


QUANTIZATION = (a_matrix_multiplies_nearly_as_its_weight_does,)
OVERRIDES = (options_are_known_and_in_range_for_any_checkpoint,)
