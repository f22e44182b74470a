"""Adapters in the torch executor, against weights merged by hand; and what is refused of their files, by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import merge, save_adapter, save_llama
from branchline.engine.errors import LoadError
from branchline.engine.executor.pytorch import TorchExecutor, build_executor
from branchline.engine.model.adapter import AdapterExecutor, read_adapter
from branchline.engine.model.load import load_model
from branchline.engine.model.spec import ModelSpec
from harness import EOS, tokenizer_json
from safetensors.torch import load_file, save_file
from tiny import VOCAB

from .driver import Line, batch_of

ADAPTERS: dict[str, dict[str, Any]] = {
    "all projections": {},
    "attention alone": {"targets": ["q_proj", "v_proj"], "rank": 2, "seed": 5},
    "its own ranks": {
        "rank": 8, "ranks": {"v_proj": 3, "down_proj": 5}, "alpha_pattern": {"v_proj": 7, "up_proj": 1.5},
        "use_rslora": True, "seed": 6,
    },
}  # fmt: skip
PROMPTS = [[5, 9, 33, 2, 71, 8], [40, 41], [5, 9, 33, 2, 71, 8], [17] * 9]


def build(folder: Path) -> TorchExecutor:
    return build_executor(
        load_model(str(folder)), device="cpu", dtype="float32", num_pages=64, page_size=4, threads=1,
        attention_backend="torch_paged",
    )  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("base"), tokenizer_json(), VOCAB, EOS)


@pytest.fixture(scope="module")
def spec(base: Path) -> ModelSpec:
    return load_model(str(base)).spec


@pytest.fixture(scope="module")
def executor(base: Path) -> Iterator[TorchExecutor]:
    made = build(base)
    yield made
    made.close()


def prefill_and_decode(executor: TorchExecutor, adapters: list[int], which: list[int]) -> list[torch.Tensor]:
    """Logits of every token of some prompts and of one more step, in one batch each; [tokens, vocab] a prompt."""
    lines = [Line(list(range(4 * place, 4 * place + 4))) for place in range(len(which))]
    found: list[list[torch.Tensor]] = [[] for _ in which]
    for work in ([PROMPTS[one] for one in which], [[60] for _ in which]):
        batch = batch_of(4, list(zip(lines, work, strict=True)), every_row=True)
        batch.adapters = [adapters[one] for one in which] if any(adapters) else None
        logits = executor.run(batch)
        assert isinstance(logits, torch.Tensor)
        for place, rows in enumerate(logits.clone().split([len(one) for one in work])):
            found[place].append(rows)
    return [torch.cat(rows) for rows in found]


def test_each_row_of_a_batch_is_what_its_own_merged_weights_give(
    executor: TorchExecutor, base: Path, spec: ModelSpec, tmp_path: Path
) -> None:
    assert isinstance(executor, AdapterExecutor)
    for number, (name, how) in enumerate(ADAPTERS.items(), start=1):
        executor.load_adapter(number, read_adapter(save_adapter(tmp_path / name, **how), spec))
    together = prefill_and_decode(executor, [1, 2, 0, 3], [0, 1, 2, 3])
    plain = prefill_and_decode(executor, [0, 0, 0, 0], [0, 1, 2, 3])
    for number, name in enumerate(ADAPTERS, start=1):
        row = [0, 1, 3][number - 1]
        other = build(merge(base, tmp_path / name, tmp_path / f"merged {name}"))
        (wanted,) = prefill_and_decode(other, [0] * 4, [row])
        (alone,) = prefill_and_decode(executor, [number] * 4, [row])
        other.close()
        torch.testing.assert_close(together[row], wanted, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(alone, wanted, atol=2e-4, rtol=1e-4)
        assert (together[row] - plain[row]).abs().max() > 0.1, "the adapter does something"
    assert torch.equal(together[2], plain[2]), "a row of the base model has the bits of a batch without adapters"
    executor.unload_adapter(1)
    with pytest.raises(KeyError):
        prefill_and_decode(executor, [1] * 4, [0])
    executor.unload_adapter(1)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    "dora": ({"use_dora": True}, "use_dora is True, which is not implemented"),
    "biases": ({"bias": "lora_only"}, "bias is 'lora_only'"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
    "another base": ({"init_lora_weights": "pissa_niter_4"}, "changes the base model's weights"),
    "a setting of tomorrow": ({"use_hyper": 3}, "use_hyper is 3"),
    "no rank": ({"r": None}, "r is None"),
    "no scaling": ({"lora_alpha": "8"}, "lora_alpha is '8'"),
    "a rank that the file has not": ({"r": 5}, r"lora_A.weight has shape \[4, 64\], and rank 5"),
    "half a rank": ({"r": 4.5}, "must be a whole number"),
    "no targets": ({"target_modules": []}, "target_modules is"),
    "a head": ({"target_modules": ["q_proj", "lm_head"]}, "names 'lm_head', which is no projection"),
    "no pattern": ({"target_modules": "(q_proj"}, "which is none"),
    "a table that is a list": ({"rank_pattern": [1]}, "rank_pattern is"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_that_is_not_plain_lora_is_refused_by_name(name: str, spec: ModelSpec, tmp_path: Path) -> None:
    changes, words = CONFIGS[name]
    with pytest.raises(LoadError, match=words) as failure:
        read_adapter(save_adapter(tmp_path, **changes), spec)
    assert failure.value.field == "path"


def test_patterns_and_chosen_layers_are_read_as_peft_reads_them(spec: ModelSpec, tmp_path: Path) -> None:
    made = save_adapter(tmp_path / "a", targets=["q_proj"], target_modules=r".*self_attn\.q_proj")
    assert set(read_adapter(made, spec).parts) == {(0, "q_proj"), (1, "q_proj")}
    pattern = {r"layers\.1\..*_proj": 80, "q_proj": 4}
    made = save_adapter(tmp_path / "b", targets=["q_proj"], alpha_pattern=pattern)
    parts = read_adapter(made, spec).parts
    assert (parts[0, "q_proj"].scaling, parts[1, "q_proj"].scaling) == (1.0, 20.0)
    path = made / "adapter_model.safetensors"
    save_file({name: one for name, one in load_file(path).items() if ".layers.1." in name}, path)
    with pytest.raises(LoadError, match=r"layers\.0\.self_attn\.q_proj\.lora_A\.weight, which is missing"):
        read_adapter(made, spec)
    config = made / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"layers_to_transform": [1]}))
    assert set(read_adapter(made, spec).parts) == {(1, "q_proj")}


def test_a_file_that_is_damaged_or_of_another_model_is_refused(
    executor: TorchExecutor, spec: ModelSpec, tmp_path: Path
) -> None:
    made = save_adapter(tmp_path, targets=["q_proj"])
    path = made / "adapter_model.safetensors"
    whole, tensors = path.read_bytes(), load_file(path)
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

    def refused(words: str) -> None:
        with pytest.raises(LoadError, match=words):
            executor.load_adapter(99, read_adapter(made, spec))

    path.write_bytes(whole[:-100])
    refused("is truncated")
    save_file({name: one for name, one in tensors.items() if name != first}, path)
    refused("lora_A.weight is missing")
    save_file(tensors | {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 32)}, path)
    refused("lm_head.lora_A.weight is not LoRA on a projection")
    save_file(tensors | {first: torch.zeros(4, 33)}, path)
    refused("is it an adapter of this model")
    save_file(tensors | {first: torch.full((4, 32), torch.nan)}, path)
    refused("values that are not finite")
    path.rename(made / "adapter_model.bin")
    refused("which can run code")
    (made / "adapter_model.bin").unlink()
    refused("there is no adapter_model.safetensors")
    (made / "adapter_config.json").write_text("[")
    refused("can't be read")
    with pytest.raises(LoadError, match="there is no adapter_config"):
        read_adapter(tmp_path / "nowhere", spec)


def test_the_digest_follows_weights_and_settings(spec: ModelSpec, tmp_path: Path) -> None:
    kinds: list[dict[str, Any]] = [{}, {"seed": 12}, {"alpha": 9}]
    digests = [read_adapter(save_adapter(tmp_path / str(at), **how), spec).digest for at, how in enumerate(kinds)]
    assert len(set(digests)) == 3
    assert read_adapter(save_adapter(tmp_path / "again"), spec).digest == digests[0]
