"""GGUF files: every quantisation, the row order of q and k, damage, and the rebuilt tokenizer."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from branchline.engine.errors import LoadError
from branchline.engine.model.gguf_file import SUPPORTED_TYPES, GgufFile
from branchline.engine.model.gguf_model import read_gguf, restore_rows
from branchline.engine.model.load import load_model
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from tests.cases.loader import case

WIDTH, HEADS, FEED, VOCAB = 256, 4, 256, 6
TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "ab"]


def write(
    path: Path,
    arch: str = "llama",
    tensors: dict[str, tuple[np.ndarray, GGMLQuantizationType | None]] | None = None,
    keys: dict[str, object] | None = None,
    skip: tuple[str, ...] = (),
) -> dict[str, np.ndarray]:
    """A one-layer GGUF file; returns its float tensors. `tensors` replaces some, already encoded if typed."""
    chance = np.random.default_rng(4)
    shapes = {
        "token_embd.weight": (VOCAB, WIDTH),
        "output_norm.weight": (WIDTH,),
        "blk.0.attn_norm.weight": (WIDTH,),
        "blk.0.ffn_norm.weight": (WIDTH,),
        "blk.0.attn_q.weight": (WIDTH, WIDTH),
        "blk.0.attn_k.weight": (WIDTH // 2, WIDTH),
        "blk.0.attn_v.weight": (WIDTH // 2, WIDTH),
        "blk.0.attn_output.weight": (WIDTH, WIDTH),
        "blk.0.ffn_gate.weight": (FEED, WIDTH),
        "blk.0.ffn_up.weight": (FEED, WIDTH),
        "blk.0.ffn_down.weight": (WIDTH, FEED),
    }
    values = {name: chance.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([2, 3, 3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in (keys or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    for name, value in values.items():
        if name not in (tensors or {}) and name not in skip:
            writer.add_tensor(name, value)
    for name, (value, kind) in (tensors or {}).items():
        writer.add_tensor(name, value, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def encoded(kind: GGMLQuantizationType, shape: tuple[int, int]) -> np.ndarray:
    """Rows of a quantised tensor: by the package's quantiser, or random blocks with sane scales where it has none."""
    chance = np.random.default_rng(9)
    try:
        return quantize(chance.standard_normal(shape, dtype=np.float32), kind)
    except NotImplementedError:
        block, size = GGML_QUANT_SIZES[kind]
        blocks = chance.integers(0, 256, (shape[0] * shape[1] // block, size), dtype=np.uint8)
        scale = np.frombuffer(np.float16(0.01).tobytes(), dtype=np.uint8)
        for at in (208,) if kind == GGMLQuantizationType.Q6_K else (0, 2):
            blocks[:, at : at + 2] = scale
        return blocks.reshape(shape[0], -1)


@pytest.mark.parametrize("name", SUPPORTED_TYPES)
def test_every_supported_type_loads_as_the_package_dequantises_it(name: str, tmp_path: Path) -> None:
    kind = GGMLQuantizationType[name]
    rows = encoded(kind, (WIDTH, FEED))
    write(tmp_path / "m.gguf", tensors={"blk.0.ffn_down.weight": (rows, kind)})
    _, tensors, _ = read_gguf(tmp_path / "m.gguf")
    found = tensors.read("model.layers.0.mlp.down_proj.weight").numpy()
    assert found.shape == (WIDTH, FEED)
    assert np.isfinite(found).all() and found.std() > 0
    assert np.array_equal(found, dequantize(rows, kind).reshape(WIDTH, FEED))


def test_unsupported_type_is_refused_by_name(tmp_path: Path) -> None:
    kind = GGMLQuantizationType.Q5_0
    rows = quantize(np.ones((WIDTH, FEED), dtype=np.float32), kind)
    write(tmp_path / "m.gguf", tensors={"blk.0.ffn_down.weight": (rows, kind)})
    with pytest.raises(LoadError, match=r"blk\.0\.ffn_down\.weight has type Q5_0, which is not supported"):
        load_model(str(tmp_path / "m.gguf"))


def test_loading_gguf_row_order() -> None:
    of_case = case("loading-gguf-row-order")
    values, right = of_case["given"], of_case["right"]
    stored = np.array(values["gguf_rows_as_hf_row_numbers"], dtype=np.float32)
    rows = np.repeat(stored[:, None], 3, axis=1)
    assert restore_rows(rows, values["heads"])[:, 0].tolist() == right["loaded_rows"]
    assert restore_rows(stored, values["heads"]).tolist() == right["loaded_rows"], "biases have the same order"


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_only_llama_files_are_reordered_and_only_q_and_k(arch: str, tmp_path: Path) -> None:
    biases = {
        f"blk.0.attn_{part}.bias": (np.zeros(size, np.float32), None)
        for part, size in (("q", 256), ("k", 128), ("v", 128))
    }
    values = write(tmp_path / "m.gguf", arch, tensors=biases if arch == "qwen2" else {})
    _, tensors, _ = read_gguf(tmp_path / "m.gguf")
    for part, name in (("q", "attn_q"), ("k", "attn_k"), ("v", "attn_v"), ("o", "attn_output")):
        found = tensors.read(f"model.layers.0.self_attn.{part}_proj.weight").numpy()
        stored = values[f"blk.0.{name}.weight"]
        assert np.array_equal(found, stored) == (arch == "qwen2" or part in "vo")
        assert np.array_equal(np.sort(found, axis=0), np.sort(stored, axis=0))


@pytest.mark.parametrize("cut", [3, 20, 40, 300, -1, -4096])
def test_truncated_file_is_refused_with_sizes(cut: int, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:cut])
    with pytest.raises(LoadError, match=r"truncated.*bytes?.*the file has \d+|not a gguf file|truncated"):
        load_model(str(tmp_path / "cut.gguf"))


def test_absurd_counts_do_not_allocate(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60) + b"\0" * 64)
    with pytest.raises(LoadError, match="header is damaged"):
        GgufFile(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 62) + b"\0" * 64)
    with pytest.raises(LoadError, match="truncated"):
        GgufFile(path)


def test_unknown_version_architecture_and_tensor_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 9, 0, 0))
    with pytest.raises(LoadError, match="version 9"):
        GgufFile(path)
    write(path, "mamba")
    with pytest.raises(LoadError, match="architecture 'mamba' is not supported"):
        read_gguf(path)
    write(path, tensors={"blk.0.ffn_gate_exps.weight": (np.ones((4, 4), np.float32), None)})
    with pytest.raises(LoadError, match=r"blk\.0\.ffn_gate_exps\.weight is not known"):
        read_gguf(path)


def test_missing_tensor_is_named_before_running(tmp_path: Path) -> None:
    from branchline.engine.executor.pytorch import build_executor

    write(tmp_path / "m.gguf", skip=("blk.0.attn_v.weight",))
    model = load_model(str(tmp_path / "m.gguf"))
    with pytest.raises(LoadError, match=r"model\.layers\.0\.self_attn\.v_proj\.weight is missing"):
        build_executor(
            model,
            device="cpu",
            dtype="float32",
            num_pages=1,
            page_size=1,
            threads=None,
            attention_backend="torch_paged",
        )


def test_rope_factors_are_used(tmp_path: Path) -> None:
    from branchline.engine.executor.rope import frequencies

    factors = np.linspace(1, 8, 32, dtype=np.float32)
    write(tmp_path / "m.gguf", tensors={"rope_freqs.weight": (factors, None)})
    spec, _, _ = read_gguf(tmp_path / "m.gguf")
    plain = 1.0 / 10000.0 ** (np.arange(0, 64, 2) / 64)
    assert np.allclose(frequencies(spec).numpy(), plain / factors)


def test_window_in_a_llama_file_means_mistral(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", keys={"llama.attention.sliding_window": 32})
    spec, _, _ = read_gguf(tmp_path / "m.gguf")
    assert (spec.architecture, spec.sliding_window) == ("MistralForCausalLM", 32)


def test_yarn_scaling_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", keys={"llama.rope.scaling.type": "yarn"})
    with pytest.raises(LoadError, match="'yarn' is not supported"):
        read_gguf(tmp_path / "m.gguf")


def test_end_ids_are_the_union_of_all_keys(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", keys={"tokenizer.ggml.eot_token_id": 5})
    spec, _, _ = read_gguf(tmp_path / "m.gguf")
    assert spec.eos_ids == (2, 5)
    assert spec.bos_id == 1
    assert spec.tied_head
