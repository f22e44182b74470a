"""`branchline plugins new` writes packages that install, register, pass their own test and are used."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from branchline import registry
from branchline.cli import extensions, scaffold

SOURCE = Path(__file__).resolve().parents[2] / "src"


def run(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command with the installed package importable."""
    path = os.pathsep.join((str(SOURCE), str(site)))
    return subprocess.run(
        [sys.executable, "-m", *words],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=240, check=False, cwd=site,
    )  # fmt: skip


def installed(folder: Path, site: Path) -> None:
    """What an installer does with a pure package: its modules, and its metadata with the entry points."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(points))
    (module,) = (folder / "src").iterdir()
    (info / "top_level.txt").write_text(module.name + "\n")
    (info / "RECORD").write_text("")
    module.rename(site / module.name)


@pytest.mark.parametrize("kind", scaffold.SKELETONS)
def test_a_new_plugin_registers_passes_its_test_and_is_a_choice(kind: str, tmp_path: Path) -> None:
    site = tmp_path / "site"
    assert scaffold.run([kind, "acme-two", "--into", str(tmp_path)]) == 0
    folder = tmp_path / "branchline-acme-two"
    assert "branchline plugins --check" in (folder / "README.md").read_text()
    installed(folder, site)
    listed = run(site, "branchline.cli", "plugins", "--check")
    assert listed.returncode == 0, listed.stdout + listed.stderr
    (row,) = [line.split() for line in listed.stdout.splitlines() if line.split()[:2] == [kind, "acme-two"]]
    assert row[:6] == [kind, "acme-two", "1", "0.1.0", "branchline-acme-two", "loaded"] and "branchline_acme" in row[6]
    tested = run(site, "pytest", "-q", "-p", "no:cacheprovider", str(folder / "tests"), "--rootdir", str(folder))
    assert tested.returncode == 0, tested.stdout + tested.stderr
    flag = {
        "radix_cache_backends": "--radix-cache-backend",
        "eviction_policies": "--eviction-policy",
        "speculative_algorithms": "--speculative-algorithm",
        "quantization_methods": "--quantization",
        "attention_backends": "--attention-backend",
        "executors": "--executor",
        "platforms": "--device",
    }.get(kind)
    if flag:
        accepted = run(site, "branchline.cli", "engine", "no-such-model.gguf", flag, "acme-two")
        assert "no-such-model.gguf" in accepted.stderr and "acme-two" not in accepted.stderr


def test_every_kind_has_a_skeleton_or_is_named_as_without() -> None:
    extensions.load([], {})
    assert set(scaffold.SKELETONS) <= {one.kind for one in registry.all_registries()}


def test_wrong_words_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind, name, words in (
        ("radix_cache_backends", "Not A Name", "small letters"),
        ("radix_cache_backends", "native", "registered already"),
    ):
        assert scaffold.run([kind, name, "--into", str(tmp_path)]) == 2
        assert words in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        scaffold.run(["nonsense", "acme"])
    assert stopped.value.code == 2
    (tmp_path / "branchline-acme").mkdir()
    assert scaffold.run(["executors", "acme", "--into", str(tmp_path)]) == 1
    assert "can't be written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["branchline-acme"]


def test_check_finds_what_imports_but_lacks_a_member(tmp_path: Path) -> None:
    (tmp_path / "lacking.py").write_text(
        "from branchline import registry\n"
        "registry.radix_cache_backends.register_lazy('lacking', 'lacking:Lacking')\n"
        "class Lacking:\n    pass\n"
    )
    plain = run(tmp_path, "branchline.cli", "plugins", "--plugin", "lacking")
    assert plain.returncode == 0 and "lacking" in plain.stdout
    checked = run(tmp_path, "branchline.cli", "plugins", "--plugin", "lacking", "--check")
    assert checked.returncode == 1 and "missing method 'match'" in checked.stdout
