"""A package a kind, installed by pip in a fresh environment: registered by its entry point and used through `serve`."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from .stack import Process, free_port
from .tiny import TinyModels

SEAM = Path(__file__).resolve().parents[2] / "engine/tests/seam"
FROZEN = sorted((SEAM / "frozen/v1").glob("*.py"))
KINDS = [path.stem for path in FROZEN]
# Options that choose the plugin of a kind; the others are used by being there.
FLAGS = {
    "executors": "--executor",
    "attention_backends": "--attention-backend",
    "radix_cache_backends": "--radix-cache-backend",
    "eviction_policies": "--eviction-policy",
    "grammar_backends": "--grammar-backend",
    "speculative_algorithms": "--speculative-algorithm",
    "quantization_methods": "--quantization",
    "platforms": "--device",
    "serve_backends": "--backend",
    "tool_parsers": "--tool-call-parser",
    "reasoning_parsers": "--reasoning-parser",
}


def _installed() -> ModuleType:
    spec = importlib.util.spec_from_file_location("installed", SEAM / "installed.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


installed: Any = _installed()


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An environment with one package a kind, each of version 1.2.3."""
    folder = tmp_path_factory.mktemp("out-of-tree")
    made = installed.Venv(folder / "venv")
    wheels = []
    for path in FROZEN:
        kind = path.stem
        name = "AcmeForCausalLM" if kind == "models" else "acme"
        points = {f"branchline.{kind}": {name: f"acme_{kind}:Plugin"}}
        wheels.append(installed.wheel(folder, f"acme-{kind}", points, {f"acme_{kind}": path.read_text()}))
    made.install(*wheels)
    return made


@dataclass
class Used:
    """What was seen of a server with all of them."""

    notes: set[str]
    info: dict[str, Any]
    output: str


@pytest.fixture(scope="module")
def used(venv: Any, tiny: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Used]:
    """One `branchline serve` with every plugin, asked so that each has something to do."""
    folder = tmp_path_factory.mktemp("notes")
    model = tiny.llama("acme", config={"architectures": ["AcmeForCausalLM"]})
    port = free_port()
    flags = [word for kind, flag in FLAGS.items() for word in (flag, "acme")]
    # A backend that is not ours gets the engine's options as its arguments.
    mine = ("--backend", "--tool-call-parser", "--reasoning-parser")
    engine = [f"{flag}=acme" for flag in FLAGS.values() if flag not in mine]
    own = [word for at, word in enumerate(flags) if flags[at - at % 2] in mine]
    command = [venv.python, "-m", "branchline.cli", "serve", str(model), "--port", str(port), *own]
    command += [f"--backend-arg={flag}" for flag in engine]
    process = Process(command, {**venv.env(ACME_NOTES=str(folder / "notes")), "PYTHONPATH": ""})
    try:
        process.wait_for_line("curl", 400)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "temperature": 0}
            tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
            assert client.post("/v1/chat/completions", json={**chat, "tools": [tool]}).status_code == 200
            body = {"prompt": "Once", "max_tokens": 4, "temperature": 0, "regex": "[ab]{3}"}
            constrained = client.post("/v1/completions", json=body)
            assert constrained.status_code == 200, constrained.text
            info = client.get("/server_info").json()
        yield Used(set((folder / "notes").read_text().split()), info, process.output)
    finally:
        process.stop(signal.SIGINT)


# A transfer backend moves pages between two engines: installed and checked here, at work in the engine's own tests.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "kv_transfer_backends"])
def test_an_installed_plugin_is_used_end_to_end(kind: str, used: Used) -> None:
    assert kind in used.notes, used.output


def test_server_info_names_what_runs_with_its_distribution(used: Used) -> None:
    components = json.dumps(used.info)
    for kind in ("models", "executors", "attention_backends", "radix_cache_backends", "eviction_policies",
                 "grammar_backends", "speculative_algorithms", "quantization_methods", "hooks"):  # fmt: skip
        assert f"(acme-{kind} 1.2.3 " in components, kind


def test_every_installed_plugin_is_listed_loaded_and_conforms(venv: Any) -> None:
    done = venv.branchline("plugins", "--check", "--json")
    found = {
        row["kind"]: row for row in json.loads(done.stdout)["registered"] if row["distribution"].startswith("acme")
    }
    assert set(found) == {kind for kind in KINDS if not kind.endswith("_parsers")}, done.stdout
    assert {row["state"] for row in found.values()} == {"loaded"} and done.returncode == 0
    assert all(row["version"] == "1.2.3" and row["file"].endswith(f"acme_{kind}.py") for kind, row in found.items())
    routers = subprocess.run(
        [str(venv.root / "bin/branchline-router"), "plugins"],
        env=venv.env(), capture_output=True, text=True, timeout=400, check=True,
    )  # fmt: skip
    assert routers.stdout.count("acme-") == 2


BAD = {
    "branchline.eviction_policies": {"acme": "acme_bad:Twice", "lru": "acme_bad:Reserved"},
    "branchline.executors": {"gone": "no_such_module_xyz:Executor"},
    "branchline.hooks": {"newer": "acme_bad:Newer"},
    "branchline.radix_cache_backends": {"lacking": "acme_bad:Lacking", "half": "acme_bad"},
    "branchline.plugins": {"broken": "acme_broken"},
}
BAD_CODE = """
print("imported acme_bad")
class Twice:
    def rank(self, uses, priority): return 0
class Reserved(Twice): ...
class Newer:
    api_version, point, point_version, mode, priority = 2, "request.end", 1, "before", 0
    def __call__(self, request, delta): ...
class Lacking: ...
"""


@pytest.fixture(scope="module")
def faulty(venv: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same with a package in which everything is wrong."""
    folder = tmp_path_factory.mktemp("faulty")
    venv.install(installed.wheel(folder, "acme-bad", BAD, {"acme_bad": BAD_CODE, "acme_broken": "1 / 0\n"}))
    return venv


def test_what_is_wrong_with_a_package_is_told_and_what_is_right_goes_on(used: Used, faulty: Any) -> None:
    done = faulty.branchline("plugins", "--check", "--json")
    assert done.returncode == 1 and done.stdout.count("imported acme_bad") == 1, "once a process"
    document = json.loads(done.stdout[done.stdout.index("{") :])
    failures = {one["name"]: one["traceback"] for one in document["failures"]}
    collision = failures["acme = acme_bad:Twice"]
    assert "acme-eviction_policies 1.2.3" in collision and "acme-bad 1.2.3" in collision and "duplicate" in collision
    assert "reserved" in failures["lru = acme_bad:Reserved"]
    assert "no_such_module_xyz" in failures["executors gone"]
    assert "API version 2; this is API version 1" in failures["hooks newer"]
    assert "missing method 'match'" in failures["radix_cache_backends lacking"]
    assert "target must be 'module:object'" in failures["half = acme_bad"]
    assert "ZeroDivisionError" in failures["broken = acme_broken"]
    states = {(row["kind"], row["name"]): row["state"] for row in document["registered"]}
    assert states["eviction_policies", "acme"] == "loaded" and states["eviction_policies", "lru"] == "loaded"


def test_a_faulty_package_can_be_left_out_whole(used: Used, faulty: Any) -> None:
    done = faulty.branchline("plugins", "--check", "--plugins-disable", "acme_bad")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "imported acme_bad" not in done.stdout and done.stdout.count("disabled") == sum(map(len, BAD.values()))


def test_this_process_has_none_of_them() -> None:
    assert not [name for name in sys.modules if name.startswith("acme_")]
