"""The suites as a pytest plugin: by factory in a test file, by name without one, and what is said of wrong words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from branchline.testing import grammar, plugin

SOURCE = Path(__file__).resolve().parents[2] / "src"
OWN = """
from branchline.engine.grammar.guidance import GuidanceBackend, GuidanceObject
from branchline.engine.grammar import mask, small

pytest_plugins = ["branchline.testing.plugin"]

class LooseObject(GuidanceObject):
    def _fill(self, words):
        super()._fill(words)
        mask.set_bits(words, [small.PIECES.index("}")], True)

class Loose(GuidanceBackend):
    def load(self, kind, compiled):
        made = super().load(kind, compiled)
        return LooseObject(made._matcher, made.vocab_size, made._own_ends)

class TestRight:
    conformance_of = ("grammar_backends", GuidanceBackend)

    def test_conformance(self, conformance_check):
        conformance_check()

conformance_of = [("grammar_backends", Loose), ("eviction_policies", "lru")]

def test_conformance(conformance_check):
    conformance_check()
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """pytest, in a folder that knows nothing of this repository's settings."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "--rootdir", "."]
    return subprocess.run(
        [*command, *words],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=170, check=False, cwd=folder,
    )  # fmt: skip


def test_a_test_file_names_factories_and_a_wrong_one_is_told_from_a_right_one(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(OWN)
    done = run(tmp_path, "-rA", "test_own.py")
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    failed = [line for line in lines if line.startswith("FAILED")]
    passed = [line for line in lines if line.startswith("PASSED")]
    assert failed and all("::test_conformance[grammar_backends=Loose-" in line for line in failed), done.stdout
    assert any("masks_are_exact" in line for line in failed)
    assert sum("TestRight" in line for line in passed) == len(grammar.CHECKS)
    assert any("eviction_policies=lru-is_registered" in line for line in passed)
    assert "the mask allows {10}" in done.stdout, "what is wrong is told in words"


def test_a_registered_name_needs_no_test_file(tmp_path: Path) -> None:
    suite = ("-p", "branchline.testing.plugin", "--pyargs", "branchline.testing.suite")
    done = run(tmp_path, *suite, "--conformance", "grammar_backends=outlines")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(grammar.CHECKS) + 1} passed" in done.stdout
    wrong = run(tmp_path, *suite, "--conformance", "grammar_backends=outline")
    assert wrong.returncode != 0 and "did you mean 'outlines'?" in wrong.stdout, wrong.stdout


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("acme", "is not KIND=NAME"),
        ("grammar_backends=", "is not KIND=NAME"),
        ("grammar_backends=no_such_module_xyz:Backend", "is not to be had"),
        ("grammar_backends=json:Backend", "give MODULE:FACTORY"),
        ("grammar_backends=:Backend", "give MODULE:FACTORY"),
    ],
)
def test_a_wrong_value_of_the_option_is_refused_by_name(given: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        plugin._parsed(given)
    assert repr(given) in str(refused.value)


def test_what_the_option_names_is_looked_up() -> None:
    assert plugin._parsed("grammar_backends=json:loads")[1].__name__ == "loads"  # type: ignore[union-attr]
    assert plugin._known("grammar_backends", "outlines") == "outlines"
    with pytest.raises(ValueError, match="no kind 'grammars'"):
        plugin._known("grammars", "outlines")
