"""helm as a process: render, lint, install. The binary is that of `make k8s-tools`.

Owns the command line. Must not know what the chart holds.
"""

from __future__ import annotations

import copy
import functools
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "k8s" / "chart"
EXAMPLES = sorted((ROOT / "deploy" / "k8s" / "examples").glob("*.yaml"))
VALUES = Path(__file__).parent / "values"
KUBERNETES = "1.37.0"


@dataclass(frozen=True, slots=True)
class Helm:
    """The binary, and the cluster that it talks to, if any."""

    binary: Path
    kubeconfig: Path | None = None

    def run(self, *words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
        if self.kubeconfig is not None:
            environment["KUBECONFIG"] = str(self.kubeconfig)
        done = subprocess.run([self.binary, *words], capture_output=True, text=True, env=environment, check=False)
        assert not check or done.returncode == 0, f"helm {words}: {done.stderr}{done.stdout}"
        return done

    def template(self, *words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run(
            "template", "rel", CHART, "--namespace", "gw", "--kube-version", KUBERNETES, *words, check=check
        )

    def objects(self, *words: str | Path) -> list[dict[str, Any]]:
        """What is rendered, parsed; the same words are rendered once."""
        return copy.deepcopy(rendered(self, words))

    def refusal(self, values: Any, folder: Path) -> str:
        """What helm says to values that must be refused."""
        file = folder / "values.json"
        file.write_text(json.dumps(values))
        done = self.template("-f", file, check=False)
        assert done.returncode != 0, f"{values} was taken"
        return done.stderr


@functools.cache
def rendered(helm: Helm, words: tuple[str | Path, ...]) -> list[dict[str, Any]]:
    """Objects of one rendering. Not to be changed: it is shared."""
    return [one for one in yaml.safe_load_all(helm.template(*words).stdout) if one]


def find() -> Helm:
    """helm, or the test is skipped in words."""
    out = subprocess.run([ROOT / "scripts/k8s/helm.sh", "--where"], capture_output=True, text=True, check=True)
    binary = Path(out.stdout.strip())
    if not binary.is_file():
        pytest.skip("helm is not built here: make k8s-tools (needs Go)")
    return Helm(binary)


def pick(objects: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    """The one object of a kind, or the one whose name ends so."""
    found = [one for one in objects if one["kind"] == kind and one["metadata"]["name"].endswith(name)]
    assert len(found) == 1, f"{len(found)} objects are {kind} …{name}"
    return found[0]


def pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Specs of all pods that the objects make, by kind and name."""
    out = {}
    for one in objects:
        name = f"{one['kind']}/{one['metadata']['name']}"
        if one["kind"] == "Pod":
            out[name] = one["spec"]
        elif "template" in one.get("spec", {}):
            out[name] = one["spec"]["template"]["spec"]
    return out
