"""The cases of area loading that start a worker."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.cases.loader import case

from .conftest import Starter
from .tiny import TinyModels, weights


def start_and_fail(model: Path) -> tuple[int, str, float]:
    """Exit code, output and seconds of a worker that must not start."""
    start = time.monotonic()
    command = [sys.executable, "-m", "branchline.cli", "engine", str(model), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - start


def test_loading_missing_shard(tiny: TinyModels) -> None:
    given = case("loading-missing-shard")
    index = given["given"]["model_dir"]["model.safetensors.index.json"]

    def save(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        save_file(
            {"model.embed_tokens.weight": weights()["model.embed_tokens.weight"]},
            folder / "model-00001-of-00002.safetensors",
        )

    code, output, seconds = start_and_fail(tiny.llama("missing-shard", save=save))
    assert code != 0 and seconds < 30
    assert "model-00002-of-00002.safetensors" in output
    assert '"event"' not in output


def test_loading_no_weights(tiny: TinyModels) -> None:
    code, output, _ = start_and_fail(tiny.llama("no-weights", save=lambda folder: None))
    assert code != 0
    assert "no weights" in output.lower()


def test_loading_stray_file_is_not_loaded(stacks: Starter, tiny: TinyModels) -> None:
    def save(folder: Path) -> None:
        tensors = weights()
        names = sorted(tensors)
        halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
        for file, members in halves.items():
            save_file({name: tensors[name] for name in members}, folder / file)
        weight_map = {name: file for file, members in halves.items() for name in members}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        save_file({"model.norm.weight": np.full(32, np.nan, np.float32)}, folder / "stray.safetensors")

    stray = stacks(model=str(tiny.llama("stray", save=save)))
    clean = stacks(model=str(tiny.llama("plain")))
    params = {"max_new_tokens": 8, "ignore_eos": True}
    assert (
        stray.generate([81, 90], sampling_params=params)["output_ids"]
        == clean.generate([81, 90], sampling_params=params)["output_ids"]
    )


@pytest.mark.parametrize("variant", range(3))
def test_loading_eos_union(stacks: Starter, tiny: TinyModels, variant: int) -> None:
    given = case("loading-eos-union")
    wanted, right = given["given"]["variants"][variant], given["right"]
    generation = None if wanted["generation_config"] is None else {"eos_token_id": wanted["generation_config"]}
    folder = tiny.llama(f"eos-{variant}", config={"eos_token_id": wanted["config"]}, generation_config=generation)
    stack = stacks(model=str(folder))
    info = stack.client.get("/get_model_info").json()
    assert sorted(info["eos_token_ids"]) == right["stop_set"][variant]
    other, last = given["given"]["forced_ids_each"][variant]
    # The end id is forced harder, but masked at the first position: that forces the two ids in their order.
    params = {
        "max_new_tokens": given["given"]["max_new_tokens"],
        "min_new_tokens": 1,
        "logit_bias": {str(other): 50, str(last): 100},
    }
    answer = stack.generate([90], sampling_params=params)
    assert answer["output_ids"] == [other, last]
    assert answer["meta_info"]["completion_tokens"] == right["completion_tokens"]
    assert answer["meta_info"]["finish_reason"] == {"type": right["finish_reason_type"], "matched": last}
