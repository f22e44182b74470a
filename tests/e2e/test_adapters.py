"""LoRA adapters through a real `branchline serve` with the executor torch: output, cache, lists, changes, refusals.

What an adapter must say is asked of the native executor on weights that were merged by hand.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import branchline.engine.executor  # noqa: F401  (registers the executors)
import httpx
import numpy as np
import pytest
from adapters import merge, save_adapter
from branchline.engine.executor.native import build_executor
from branchline.engine.model.load import load_model
from branchline.engine.types import ForwardBatch, RowPlan, SamplingParams

from .stack import Process, free_port, wait_until
from .tiny import TinyModels

PROMPT = [(37 * at) % 40000 + 5 for at in range(40)]
COUNT = 8


@dataclass(frozen=True)
class Served:
    """The running service, and folders by name."""

    client: httpx.Client
    base: Path
    folders: dict[str, Path]

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def generate(self, **body: Any) -> tuple[list[int], int]:
        """Greedy ids, and the prompt's tokens that were cached."""
        how = {"temperature": 0, "max_new_tokens": COUNT, "ignore_eos": True}
        answer = self.post("/generate", {"input_ids": PROMPT, "sampling_params": how, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()["output_ids"], answer.json()["meta_info"]["cached_tokens"]

    def models(self) -> dict[str, str | None]:
        """Listed names with their parents; the folder's path is a name too and left out."""
        listed = self.client.get("/v1/models").json()["data"]
        return {one["id"]: one.get("parent") for one in listed if not one["id"].startswith("/")}


@pytest.fixture(scope="module")
def service(tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("adapters")
    base = tiny.llama("tuned")
    how: dict[str, dict[str, Any]] = {
        "one": {},
        "two": {"seed": 12, "rank": 2, "use_rslora": True},
        "wide": {"rank": 9},
    }
    folders = {name: save_adapter(root / name, **given) for name, given in how.items()}
    port = free_port()
    command = [sys.executable, "-m", "branchline.cli", "serve", str(base), "--port", str(port), "--executor", "torch"]
    command += ["--adapter", f"one={folders['one']}", "--max-adapters", "2", "--max-adapter-rank", "8"]
    process = Process([*command, "--max-total-tokens", "2048", "--threads", "1"])
    try:
        process.wait_for_line("curl")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield Served(client, base, folders)
        assert process.stop(signal.SIGINT) in (0, 130), process.output
        assert "Traceback" not in process.output
    finally:
        process.stop(signal.SIGKILL)


def merged_says(base: Path, adapter: Path, folder: Path) -> list[int]:
    """Greedy ids of the base with the adapter merged into its weights."""
    executor = build_executor(
        load_model(str(merge(base, adapter, folder))),
        device="cpu",
        dtype="float32",
        num_pages=8,
        page_size=16,
        threads=1,
    )
    found: list[int] = []
    new, length = PROMPT, 0
    for _ in range(COUNT):
        places = np.arange(length, length + len(new))
        length += len(new)
        batch = ForwardBatch(
            np.array(new, np.int32), places.astype(np.int32), places.astype(np.int64), np.array([len(new)], np.int32),
            np.array([length], np.int32), [list(range(8))], np.array([len(new) - 1], np.int64),
        )  # fmt: skip
        (answer,) = executor.sample(executor.run(batch), [RowPlan(0, SamplingParams(temperature=0.0))])
        found.append(answer.token_id)
        new = [answer.token_id]
    executor.close()
    return found


def test_an_adapter_says_what_its_merged_weights_say(service: Served, tmp_path: Path) -> None:
    wanted = merged_says(service.base, service.folders["one"], tmp_path / "merged")
    plain, _ = service.generate()
    ids, cached = service.generate(model="tuned:one")
    assert (ids, cached) == (wanted, 0) and ids != plain, "pages of the base model are not the adapter's"
    assert service.generate(lora_path="one") == (wanted, 32), "the same adapter by SGLang's field hits its own pages"
    assert service.generate(model="default:one")[0] == wanted
    assert service.generate()[0] == plain
    how = {"temperature": 0, "max_new_tokens": COUNT, "ignore_eos": True}
    mixed = service.post(
        "/generate", {"input_ids": [PROMPT, PROMPT], "lora_path": ["one", None], "sampling_params": how}
    ).json()
    assert [one["output_ids"] for one in mixed] == [wanted, plain]
    body = {"model": "tuned:one", "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    told = service.post("/v1/completions", body).json()
    assert told["model"] == "tuned:one" and told["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
    chat = {"model": "tuned:one", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    assert service.post("/v1/chat/completions", chat).json()["model"] == "tuned:one"


def test_adapters_come_and_go_by_both_servers_forms(service: Served) -> None:
    two = str(service.folders["two"])
    loaded = service.post("/load_lora_adapter", {"lora_name": "two", "lora_path": two})
    assert loaded.status_code == 200, loaded.text
    told = loaded.json()
    assert told["success"] and told["loaded_adapters"] == {"one": str(service.folders["one"]), "two": two}
    assert told["workers"][0]["rank"] == 2
    models = service.models()
    assert models["tuned:two"] == models["tuned:one"] == "tuned" and models["tuned"] is None
    one = service.client.get("/v1/models/tuned:two").json()
    assert (one["id"], one["parent"], one["max_model_len"]) == ("tuned:two", "tuned", 2048)
    first, _ = service.generate(model="tuned:two")
    assert first != service.generate(model="tuned:one")[0]
    full = service.post("/v1/load_lora_adapter", {"lora_name": "three", "lora_path": two})
    assert full.status_code == 429 and "max-adapters is 2" in full.text
    gone = service.post("/v1/unload_lora_adapter", {"lora_name": "two"})
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'two' removed successfully.")
    assert "tuned:two" not in service.models()
    refused = service.post("/generate", {"text": "x", "model": "tuned:two"})
    assert refused.status_code == 404 and "use one of: tuned:one" in refused.text
    # The name comes back with other weights: nothing of what it meant before is found.
    again = service.post("/v1/load_lora_adapter", {"lora_name": "two", "lora_path": str(service.folders["one"])})
    assert again.text == "Success: LoRA adapter 'two' added successfully."
    assert service.generate(model="tuned:two")[0] == service.generate(model="tuned:one")[0] != first
    assert service.post("/unload_lora_adapter", {"lora_name": "two"}).json()["workers"][0]["running"] == 0
    wait_until(lambda: list(service.models()) == ["tuned", "tuned:one"], 5, "the list is as it was")


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/generate", {"text": "x", "model": "tuned:nope"}, 404, ("model", "adapter 'nope'", "tuned:one")),
        ("/generate", {"text": "x", "model": "nope:one"}, 404, ("model", "nope:one", "tuned:one")),
        ("/generate", {"text": "x", "model": "tuned:"}, 404, ("model",)),
        ("/generate", {"text": "x", "model": "tuned:one:one"}, 404, ("model",)),
        ("/generate", {"text": "x", "lora_path": "nope"}, 404, ("lora_path", "tuned:one")),
        ("/generate", {"text": "x", "lora_path": ""}, 400, ("lora_path",)),
        ("/generate", {"text": "x", "lora_path": ["one", "one"]}, 400, ("lora_path",)),
        ("/generate", {"text": "x", "lora_path": "one", "model": "tuned:one"}, 400, ("lora_path", "model")),
        ("/v1/completions", {"prompt": "x", "lora_path": "one"}, 400, ("lora_path",)),
        ("/v1/score", {"prompt": "x", "choices": ["a"], "model": "tuned:nope"}, 404, ("model",)),
        ("/load_lora_adapter", {"lora_path": "/x"}, 400, ("lora_name",)),
        ("/load_lora_adapter", {"lora_name": "x"}, 400, ("lora_path",)),
        ("/load_lora_adapter", {"lora_name": "a:b", "lora_path": "/x"}, 400, ("lora_name", "a:b")),
        ("/load_lora_adapter", {"lora_name": "x", "lora_path": "/nowhere"}, 400, ("lora_path", "adapter_config.json")),
        ("/load_lora_adapter", {"lora_name": "x", "lora_path": "WIDE"}, 400, ("rank 9", "max-adapter-rank is 8")),
        ("/load_lora_adapter", {"lora_name": "one", "lora_path": "TWO"}, 400, ("lora_name", "another adapter")),
        ("/load_lora_adapter", {"lora_name": "x", "lora_path": "/x", "model": "nope"}, 404, ("model",)),
        ("/load_lora_adapter", {"lora_name": "x", "lora_path": "/x", "model": "tuned:one"}, 400, ("model",)),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/x", "load_inplace": True}, 400, ("load_inplace",)),
        ("/v1/unload_lora_adapter", {"lora_name": "nope"}, 404, ("lora_name", "there are one")),
        ("/v1/unload_lora_adapter", {"lora_name": "one", "lora_path": "x"}, 400, ("lora_path",)),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    service: Served, path: str, body: dict[str, Any], status: int, words: tuple[str, ...]
) -> None:
    folders = {"WIDE": service.folders["wide"], "TWO": service.folders["two"]}
    if str(body.get("lora_path")) in folders:
        body = {**body, "lora_path": str(folders[body["lora_path"]])}
    answer = service.post(path, body)
    assert answer.status_code == status, answer.text
    assert all(word in answer.text for word in words), answer.text
    assert list(service.models()) == ["tuned", "tuned:one"]
