"""AWQ and GPTQ words say what their dequantised weights say, and are read by both executors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from branchline.engine.errors import LoadError
from branchline.engine.model.source import LoadedModel, StoredTensor
from branchline.engine.model.spec import ModelSpec
from branchline.engine.quantization import choose
from branchline.engine.quantization.packed import Awq, Gptq, PackedTensors, unpack
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

SPEC = ModelSpec("LlamaForCausalLM", 64, 1, 2, 2, 32, 64, 96, 128, 1e-5, 1e4)
Array = npt.NDArray[Any]


class Raw:
    """Tensors in memory, as a safetensors folder would give them."""

    def __init__(self, tensors: dict[str, Array]) -> None:
        self.tensors = tensors

    def names(self) -> set[str]:
        return set(self.tensors)

    def in_file_order(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def raw(self, name: str, dtype: str = "") -> Array:
        return self.tensors[name]

    def read(self, name: str) -> Any:
        import torch

        return torch.from_numpy(self.tensors[name].astype(np.float32))

    def stored(self, name: str) -> StoredTensor:
        values = self.tensors[name].astype(np.float32)
        return StoredTensor("F32", values.shape, values.tobytes())


def pack(codes: Array, bits: int, axis: int, order: tuple[int, ...] | None = None) -> Array:
    """Int32 words of codes along `axis`; `order[i]` is the column that lies at place i."""
    per_word = 32 // bits
    moved = np.moveaxis(codes, axis, -1)
    split = moved.reshape(*moved.shape[:-1], -1, per_word).astype(np.uint32)
    words = np.zeros(split.shape[:-1], np.uint32)
    for place in range(per_word):
        words |= split[..., order[place] if order else place] << np.uint32(place * bits)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32)


def awq(chance: np.random.Generator, outputs: int, inputs: int, size: int) -> tuple[dict[str, Array], Array]:
    """(tensors, weight [out, in]) by the format's own definition."""
    codes, zeros = chance.integers(0, 16, (inputs, outputs)), chance.integers(0, 16, (inputs // size, outputs))
    scales = chance.uniform(0.001, 0.01, (inputs // size, outputs)).astype(np.float16)
    group = np.arange(inputs) // size
    weight = ((codes - zeros[group]) * scales[group].astype(np.float32)).T.astype(np.float32)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": pack(codes, 4, 1, order), "qzeros": pack(zeros, 4, 1, order), "scales": scales}, weight


def gptq(
    chance: np.random.Generator, outputs: int, inputs: int, size: int, bits: int = 4, shuffled: bool = False
) -> tuple[dict[str, Array], Array]:
    """The same for GPTQ's first format, which stores zero − 1."""
    top = 1 << bits
    codes, zeros = chance.integers(0, top, (inputs, outputs)), chance.integers(1, top, (inputs // size, outputs))
    scales = chance.uniform(0.001, 0.01, (inputs // size, outputs)).astype(np.float16)
    group = (np.arange(inputs) // size).astype(np.int32)
    if shuffled:
        chance.shuffle(group)
    weight = ((codes - zeros[group]) * scales[group].astype(np.float32)).T.astype(np.float32)
    tensors = {
        "qweight": pack(codes, bits, 0), "qzeros": pack(zeros - 1, bits, 1), "scales": scales, "g_idx": group,
    }  # fmt: skip
    return tensors, weight


def loaded(tensors: dict[str, Array], settings: dict[str, Any], spec: ModelSpec = SPEC) -> LoadedModel:
    return LoadedModel("tiny", Path("tiny"), spec, Raw(tensors), "f", "F16", quantization=settings)


def values(tensor: StoredTensor) -> Array:
    if tensor.type_name == "F32":
        return np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)
    rows = np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape[0], -1)
    return dequantize(rows, GGMLQuantizationType[tensor.type_name]).reshape(tensor.shape)


CASES = {
    "awq 32": (awq, {"group": 32}, {"quant_method": "awq", "bits": 4, "group_size": 32}, "Q4_1"),
    "awq row": (awq, {"group": 128}, {"quant_method": "awq", "bits": 4, "group_size": -1}, "Q4_1"),
    "gptq 4": (gptq, {"group": 64}, {"quant_method": "gptq", "bits": 4, "group_size": 64}, "Q4_1"),
    "gptq 8": (gptq, {"group": 32, "bits": 8}, {"quant_method": "gptq", "bits": 8, "group_size": 32}, "F32"),
    "gptq act-order": (
        gptq, {"group": 32, "shuffled": True},
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}, "F32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_packed_words_mean_the_dequantised_weight(case: tuple[Any, dict[str, Any], dict[str, Any], str]) -> None:
    make, options, settings, type_name = case
    extra = {key: value for key, value in options.items() if key != "group"}
    parts, weight = make(np.random.default_rng(1), 48, 128, options["group"], **extra)
    model = loaded({f"a.{name}": part for name, part in parts.items()}, settings)
    method = choose("auto", model)
    assert method is not None
    tensors = method.open(model).tensors
    assert tensors.names() == {"a.weight"} and tensors.shape("a.weight") == (48, 128)
    assert np.array_equal(tensors.read("a.weight").numpy(), weight)
    stored = tensors.stored("a.weight")
    assert stored.type_name == type_name
    assert np.abs(values(stored) - weight).max() <= (0 if type_name == "F32" else 1e-4)


def test_the_second_gptq_format_stores_zeros_as_they_are() -> None:
    parts, weight = gptq(np.random.default_rng(2), 32, 64, 32)
    parts["qzeros"] = pack(unpack(parts["qzeros"], 4, 1) + 1 & 15, 4, 1)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}
    model = Gptq().open(loaded({f"a.{name}": part for name, part in parts.items()}, settings))
    found = model.tensors.read("a.weight").numpy()
    whole = unpack(parts["qzeros"], 4, 1).T[:, np.arange(64) // 32] != 0  # 16 does not fit in four bits
    assert np.array_equal(found[whole], weight[whole])


@pytest.mark.parametrize(
    "settings,words",
    [
        ({"quant_method": "awq", "bits": 3}, "bits 3"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemv"),
        ({"quant_method": "gptq", "bits": 2}, "bits 2"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0"),
        ({"quant_method": "hqq"}, "hqq"),
    ],
)
def test_settings_that_are_not_supported_are_named(settings: dict[str, Any], words: str) -> None:
    model = loaded({}, settings)
    with pytest.raises(LoadError, match=words):
        method = choose("auto", model)
        assert method is not None
        method.open(model)


def test_a_missing_part_and_a_wrong_group_number_are_named() -> None:
    parts, _ = gptq(np.random.default_rng(3), 32, 64, 32)
    tensors = {f"a.{name}": part for name, part in parts.items()}
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    broken = {**tensors, "a.g_idx": np.full(64, 9, np.int32)}
    with pytest.raises(LoadError, match="g_idx names a group"):
        Gptq().open(loaded(broken, settings)).tensors.read("a.weight")
    del tensors["a.qzeros"]
    with pytest.raises(LoadError, match="qzeros is missing"):
        Gptq().open(loaded(tensors, settings))


def test_an_option_that_does_not_fit_the_checkpoint_is_refused() -> None:
    with pytest.raises(LoadError, match="does not fit the checkpoint, which is quantised with 'awq'"):
        choose("int8_dynamic", loaded({}, {"quant_method": "awq"}))
    with pytest.raises(LoadError, match="needs a checkpoint quantised so"):
        choose("gptq", loaded({}, {}))
    assert choose("auto", loaded({}, {})) is None


def tiny(make: Any, settings: dict[str, Any], **options: Any) -> tuple[LoadedModel, LoadedModel]:
    """(packed checkpoint, the same with dequantised weights)."""
    chance = np.random.default_rng(5)
    shapes = {
        "self_attn.q_proj": (64, 64), "self_attn.k_proj": (64, 64), "self_attn.v_proj": (64, 64),
        "self_attn.o_proj": (64, 64), "mlp.gate_proj": (64, 64), "mlp.up_proj": (64, 64), "mlp.down_proj": (64, 64),
    }  # fmt: skip
    packed: dict[str, Array] = {
        "model.embed_tokens.weight": chance.normal(0, 0.5, (96, 64)), "model.norm.weight": np.ones(64),
        "lm_head.weight": chance.normal(0, 0.2, (96, 64)),
    }  # fmt: skip
    for norm in ("input_layernorm", "post_attention_layernorm"):
        packed[f"model.layers.0.{norm}.weight"] = np.ones(64)
    plain = dict(packed)
    for name, (outputs, inputs) in shapes.items():
        parts, weight = make(chance, outputs, inputs, 32, **options)
        packed.update({f"model.layers.0.{name}.{part}": value for part, value in parts.items()})
        plain[f"model.layers.0.{name}.weight"] = weight
    return loaded(packed, settings), loaded(plain, {})


@pytest.mark.parametrize("method", ["awq", "gptq", "gptq act-order"])
@pytest.mark.parametrize("executor", ["native", "torch"])
def test_a_packed_checkpoint_runs_like_its_dequantised_weights(method: str, executor: str) -> None:
    from branchline.engine.executor import native, pytorch
    from branchline.engine.types import ForwardBatch

    make, options = (awq, {}) if method == "awq" else (gptq, {"shuffled": method != "gptq"})
    settings = {"quant_method": method.partition(" ")[0], "bits": 4, "group_size": 32}
    packed, plain = tiny(make, settings, **options)
    chosen = choose("auto", packed)
    assert chosen is not None
    batch = ForwardBatch(
        np.array([3, 9, 41, 7], np.int32), np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int64),
        np.array([4], np.int32), np.array([4], np.int32), [[0]], np.array([3], np.int64),
    )  # fmt: skip
    rows = []
    for model in (chosen.open(packed), plain):
        sizes: dict[str, Any] = {"device": "cpu", "num_pages": 4, "page_size": 16, "threads": 1}
        if executor == "native":
            built = native.build_executor(model, dtype="float32", **sizes)
            built.run(batch)
            rows.append(np.frombuffer(built.model.logits(), np.float32))
        else:
            made = pytorch.build_executor(model, dtype="float32", attention_backend="torch_paged", **sizes)
            rows.append(np.asarray(made.run(batch))[0])
    assert np.abs(rows[0] - rows[1]).max() < 0.01 * np.abs(rows[1]).max()


def test_an_awq_folder_is_read_from_its_files(tmp_path: Path) -> None:
    from branchline.engine.model.folder import read_folder
    from safetensors.numpy import save_file

    parts, weight = awq(np.random.default_rng(1), 64, 64, 32)
    name = "model.layers.0.self_attn.q_proj"
    save_file(
        {f"{name}.{part}": np.ascontiguousarray(value) for part, value in parts.items()}, tmp_path / "model.safetensors"
    )
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 64, "vocab_size": 96,
        "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    spec, tensors, stored, _, settings = read_folder(tmp_path)
    model = Awq().open(LoadedModel("x", tmp_path, spec, tensors, "f", stored, quantization=settings))
    assert isinstance(model.tensors, PackedTensors)
    assert np.array_equal(model.tensors.read(f"{name}.weight").numpy(), weight)
