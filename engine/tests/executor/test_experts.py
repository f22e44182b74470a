"""Models with experts: served by the executor torch by choice, refused by the native one, settings checked by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from branchline.engine.config import EngineConfig
from branchline.engine.errors import LoadError
from branchline.engine.executor.native import build_executor
from branchline.engine.model.families import qwen3_moe
from branchline.engine.model.load import load_model
from branchline.engine.service import assembly
from harness import tokenizer_json
from random_families import save

CONFIG: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "vocab_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("experts")
    save("qwen3 with experts", made)
    (made / "tokenizer.json").write_bytes(tokenizer_json())
    return made


def test_the_executor_that_runs_experts_is_chosen_and_said(folder: Path) -> None:
    config = EngineConfig(model=str(folder), max_total_tokens=256, grammar_backend="none")
    engine = assembly.build(config, lambda *_: None)
    try:
        assert (engine.model.executor, engine.model.architecture) == ("torch", "Qwen3MoeForCausalLM")
    finally:
        engine.close()


def test_the_native_executor_refuses_them_by_name(folder: Path) -> None:
    with pytest.raises(LoadError, match="--executor torch"):
        build_executor(load_model(str(folder)), device="cpu", dtype="auto", num_pages=4, page_size=4, threads=1)


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({}, set()),
        ({"mlp_only_layers": [0, 3]}, {0, 3}),
        ({"decoder_sparse_step": 2}, {0, 2, 4}),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, {0, 1, 2, 3, 4}),
    ],
)
def test_layers_with_one_mlp_are_those_of_the_config(changes: dict[str, Any], dense: set[int]) -> None:
    spec = qwen3_moe({**CONFIG, **changes})
    assert spec.experts is not None
    assert spec.experts.dense == dense
    sparse = 6 - len(dense)
    mlps = len(dense) * 3 * 16 * 32 + sparse * 4 * (3 * 16 * 8 + 16)
    assert spec.parameters() == mlps + 6 * 16 * (2 * spec.query_size + 2 * spec.kv_size) + 2 * 16 * 16


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"num_experts": 0}, "num_experts"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size"),
        ({"mlp_only_layers": [6]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ],
)
def test_settings_that_cannot_be_are_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(LoadError, match=field):
        qwen3_moe({**CONFIG, **changes})
