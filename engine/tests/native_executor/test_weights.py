"""Every weight format against its own definition: embeddings, products, requantised weights, refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from branchline.engine.errors import InternalError, LoadError
from branchline.engine.executor.native import numerics_id
from branchline.engine.model.source import LoadedModel, StoredTensor
from recast import Recast

from .driver import Line, batch_of, build, logits_of, stored, tiny_model, tiny_spec, values_of

QUANTISED = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
FORMATS = (*QUANTISED, "F16", "BF16")
TEXT = [int(one) for one in np.random.default_rng(1).integers(0, 320, 40)]


def exactly(model: LoadedModel) -> LoadedModel:
    """The same model with every tensor dequantised to F32 by the gguf package."""
    tensors = {name: model.tensors.stored(name) for name in model.tensors.names()}
    exact = {
        name: tensor if len(tensor.shape) == 1 else stored(values_of(tensor), "F32") for name, tensor in tensors.items()
    }
    return dataclasses.replace(model, tensors=Recast(exact))


def spread(found: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square error over the root mean square of what is expected."""
    return float(np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean()))


@pytest.mark.parametrize("format_name", FORMATS)
def test_format_computes_what_its_values_say(format_name: str, isa: str) -> None:
    model = tiny_model(format_name)
    found = logits_of(build(model, isa=isa), [(Line([0, 1, 2]), TEXT)], every_row=True)
    expected = logits_of(build(exactly(model), dtype="float32"), [(Line([0, 1, 2]), TEXT)], every_row=True)
    # Quantised formats round activations to 8 bits a block of 32 and the cache to 13 bits; the others the cache only.
    bound = 0.03 if format_name in QUANTISED else 0.002
    assert spread(found, expected) < bound
    if format_name in QUANTISED:
        assert spread(found, expected) > 1e-5


@pytest.mark.parametrize("format_name", FORMATS)
def test_float32_weights_are_the_exact_values_of_the_file(format_name: str) -> None:
    model = tiny_model(format_name)
    found = logits_of(build(model, dtype="float32"), [(Line([0, 1, 2]), TEXT)], every_row=True)
    expected = logits_of(build(exactly(model), dtype="float32"), [(Line([0, 1, 2]), TEXT)], every_row=True)
    assert spread(found, expected) < 1e-6


@pytest.mark.parametrize("dtype,bound", [("int8", 0.05), ("bfloat16", 0.02)])
def test_requantised_weights_stay_near(dtype: str, bound: float) -> None:
    model = tiny_model("F32")
    found = logits_of(build(model, dtype=dtype), [(Line([0, 1, 2]), TEXT)], every_row=True)
    expected = logits_of(build(model, dtype="float32"), [(Line([0, 1, 2]), TEXT)], every_row=True)
    assert 1e-5 < spread(found, expected) < bound


@pytest.mark.parametrize(
    "format_name,bits", [("Q4_0", 6.0), ("Q4_1", 5.0), ("Q8_0", 8.5), ("BF16", 16.0), ("F32", 32.0)]
)
def test_weights_take_the_memory_of_their_format(format_name: str, bits: float) -> None:
    model = tiny_model(format_name)
    spec = model.spec
    weights = spec.parameters()
    assert build(model).model.weight_bytes() <= weights * bits / 8 * 1.02


def test_interleaved_query_rows_are_put_in_order() -> None:
    model = tiny_model("Q8_0")
    plain = {name: model.tensors.stored(name) for name in model.tensors.names()}
    mixed = dict(plain)
    for name, tensor in plain.items():
        heads = {"q_proj": model.spec.heads, "k_proj": model.spec.kv_heads}.get(name.split(".")[-2], 0)
        if heads:
            data = np.frombuffer(tensor.data, np.uint8).reshape(heads, 2, -1, len(tensor.data) // tensor.shape[0])
            mixed[name] = StoredTensor("Q8_0", tensor.shape, data.swapaxes(1, 2).tobytes(), heads)
    other = dataclasses.replace(model, tensors=Recast(mixed))
    found = logits_of(build(other), [(Line([0, 1, 2]), TEXT)])
    assert np.array_equal(found, logits_of(build(model), [(Line([0, 1, 2]), TEXT)]))


def test_a_tensor_that_is_missing_is_named() -> None:
    model = tiny_model("F32")
    tensors = {name: model.tensors.stored(name) for name in model.tensors.names() if "layers.1.mlp.up_proj" not in name}
    with pytest.raises(LoadError, match=r"tensor model.layers.1.mlp.up_proj.weight is missing"):
        build(dataclasses.replace(model, tensors=Recast(tensors)))


def test_a_tensor_of_the_wrong_shape_or_size_is_named() -> None:
    model = tiny_model("F32")
    tensors = {name: model.tensors.stored(name) for name in model.tensors.names()}
    name = "model.layers.0.mlp.down_proj.weight"
    wrong = {**tensors, name: stored(np.zeros((256, 256), np.float32), "F32")}
    with pytest.raises(LoadError, match=r"down_proj.weight is 256 x 256, the model needs 256 x 512"):
        build(dataclasses.replace(model, tensors=Recast(wrong)))
    short = {**tensors, name: StoredTensor("F32", (256, 512), tensors[name].data[:-4])}
    with pytest.raises(LoadError, match="cannot have 524284 bytes"):
        build(dataclasses.replace(model, tensors=Recast(short)))


@pytest.mark.parametrize(
    "options,message",
    [
        ({"device": "cuda"}, "device 'cuda' is not supported"),
        ({"dtype": "float16"}, "dtype 'float16' is unknown"),
        ({"isa": "neon"}, 'isa "neon" is unknown; use portable, avx2, avx512'),
        ({"num_pages": 0}, "num_pages 0 and page_size 16 must be positive"),
        ({"num_pages": 1 << 60}, "no memory for"),
    ],
)
def test_options_that_cannot_be_met_are_refused(options: dict[str, object], message: str) -> None:
    from branchline.engine.executor.native import build_executor

    known: dict[str, object] = {"device": "cpu", "dtype": "auto", "num_pages": 8, "page_size": 16, "threads": 1}
    with pytest.raises(LoadError, match=message):
        build_executor(tiny_model("F32"), **{**known, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change,message",
    [
        ({"token_ids": [320]}, "token_ids holds 320"),
        ({"token_ids": [-1]}, "token_ids holds -1"),
        ({"slots": [4096]}, "slots holds 4096"),
        ({"positions": [5]}, "position 5 outside"),
        ({"page_tables": [[999]]}, "page 999"),
        ({"page_tables": [[]]}, "0 pages for a context of 1"),
        ({"query_lens": [2], "context_lens": [2]}, "query_lens add up to more"),
        ({"logit_rows": [1]}, "logit_rows holds 1"),
    ],
)
def test_rows_that_reach_outside_are_refused_and_harm_nothing(change: dict[str, list[object]], message: str) -> None:
    executor = build(tiny_model("F32"))
    step = batch_of(16, [(Line([0]), [3])])
    fields = {
        name: np.array(value, getattr(step, name).dtype) for name, value in change.items() if name != "page_tables"
    }
    tables = {"page_tables": change["page_tables"]} if "page_tables" in change else {}
    with pytest.raises(ValueError, match=message):
        executor.run(dataclasses.replace(step, **fields, **tables))  # type: ignore[arg-type]
    assert executor.run(step) == 1


def test_closed_executor_refuses_and_closes_again() -> None:
    executor = build(tiny_model("F32"))
    executor.close()
    executor.close()
    with pytest.raises(InternalError, match="closed"):
        executor.run(batch_of(16, [(Line([0]), [3])]))


def test_numerics_id_tells_weights_kernels_and_types_apart() -> None:
    ids = {
        numerics_id(*parts)
        for parts in (("a", "avx2", "auto", "i16"), ("b", "avx2", "auto", "i16"), ("a", "avx512", "auto", "i16"),
                      ("a", "avx2", "int8", "i16"), ("a", "avx2", "auto", "f32"))
    }  # fmt: skip
    assert len(ids) == 5


def test_head_of_its_own_is_used_and_a_missing_one_refused() -> None:
    spec = tiny_spec(tied_head=False)
    model = tiny_model("F32", spec)
    with pytest.raises(LoadError, match=r"lm_head.weight is missing"):
        build(model)
    tensors = {name: model.tensors.stored(name) for name in model.tensors.names()}
    tensors["lm_head.weight"] = stored(-values_of(tensors["model.embed_tokens.weight"]), "F32")
    headed = LoadedModel("tiny", Path("tiny"), spec, Recast(tensors), "tiny", "F32")  # type: ignore[arg-type]
    tied = build(tiny_model("F32"))
    assert np.array_equal(logits_of(build(headed), [(Line([0]), [5])]), -logits_of(tied, [(Line([0]), [5])]))
