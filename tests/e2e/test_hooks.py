"""Hooks of an installed plugin in a real engine: they run, are measured, are shown, and cost what they declare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from branchline.cli import hooks as shown

from tests.e2e.stack import Engine, Stack
from tests.e2e.tiny import TinyModels

PLUGIN = """
import json, os
from branchline import registry
from branchline.engine.errors import InvalidArgument


def note(line):
    with open(os.environ["ACME_NOTES"], "a") as file:
        file.write(line + "\\n")


def register():
    for point in ("engine.start", "weights.loaded", "scheduler.step", "sampling", "request.end", "engine.stop"):
        registry.hooks.register("note-" + point)(made(point))
    registry.hooks.register("refuse")(Refuse)


def made(at):
    class Note:
        api_version = 1
        point = at
        point_version = 1
        mode = "before"
        priority = 0

        def __call__(self, first, second=None):
            note(at)

    return Note


class Refuse:
    api_version = 1
    point = "request.admission"
    point_version = 1
    mode = "before"
    priority = 5

    def __call__(self, request):
        if len(request.token_ids) == 13:
            raise InvalidArgument("thirteen tokens are refused here", field="token_ids")
"""


def test_hooks_run_in_a_served_engine_and_are_measured_and_shown(
    tmp_path: Path, tiny: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_hooks.py").write_text(PLUGIN)
    notes = tmp_path / "notes"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("ACME_NOTES", str(notes))
    flags = ("--plugin", "acme_hooks:register", "--metrics-port", "0")
    stack = Stack(*flags, model=str(tiny.llama("hooked")))
    try:
        answer = stack.generate([5, 6, 7], sampling_params={"max_new_tokens": 3, "ignore_eos": True})
        assert answer["meta_info"]["completion_tokens"] == 3
        refused = stack.post("/generate", {"input_ids": list(range(5, 18))})
        assert refused.status_code == 400 and "thirteen tokens are refused here" in refused.text
        url = metrics_url(stack.engines[0])
        costs = shown.fetch(url)
        assert costs["note-request.end", "request.end"]["calls"] == 1
        assert costs["note-sampling", "sampling"]["calls"] == 3
        assert costs["refuse", "request.admission"] == {"calls": 2.0, "failures": 1.0} | {
            "seconds": costs["refuse", "request.admission"]["seconds"]
        }
        command = [sys.executable, "-m", "branchline.cli", "plugins", "--plugin", "acme_hooks:register"]
        done = subprocess.run(
            [*command, "--metrics-url", url, "--json"], capture_output=True, text=True, timeout=240, check=True
        )
        rows = {row["name"]: row for row in json.loads(done.stdout)["hooks"]}
        assert rows["refuse"]["point"] == "request.admission 1" and rows["refuse"]["calls"] == 2
        assert rows["note-sampling"]["mean_us"] >= 0 and rows["note-engine.start"]["ends"] == "start"
        assert "hooks=refuse" in stack.client.get("/server_info").text
    finally:
        stack.close()
    seen = notes.read_text().split()
    assert seen[:2] == ["engine.start", "weights.loaded"] and seen[-1] == "engine.stop"
    assert seen.count("scheduler.step") == 3


def metrics_url(engine: Engine) -> str:
    """Where its metrics are."""
    ready = json.loads(engine.process.wait_for_line('"event"'))
    return f"http://127.0.0.1:{ready['metrics_port']}/metrics"


def test_two_hooks_that_replace_one_point_end_the_start(tmp_path: Path) -> None:
    (tmp_path / "both.py").write_text(
        "from branchline import registry\n"
        "class One:\n    api_version, point, point_version, mode, priority = 1, 'sampling', 1, 'replace', 0\n"
        "    def __call__(self, logits, step): return []\n"
        "registry.hooks.register('one')(One)\nregistry.hooks.register('two')(type('Two', (One,), {}))\n"
    )
    command = [sys.executable, "-m", "branchline.cli", "engine", "no-such.gguf", "--plugin", "both"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 2
    assert "all replace sampling" in ended.stderr and "'two'" in ended.stderr
