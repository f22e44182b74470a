"""The `branchline` wheel: built, installed into an empty environment, imported, and run from there."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from branchline import __version__

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run([str(one) for one in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A freshly built wheel; Rust parts come from the workspace's target folder if they are current."""
    out = tmp_path_factory.mktemp("wheel")
    maturin = Path(sys.executable).parent / "maturin"
    run(maturin, "build", "--release", "--locked", "-m", "engine/native/Cargo.toml", "--out", out)
    (found,) = out.glob("branchline-*.whl")
    return found


def test_wheel_is_abi3_for_311_and_carries_its_parts_and_notices(wheel: Path) -> None:
    assert wheel.name.startswith(f"branchline-{__version__}-cp311-abi3-")
    names = zipfile.ZipFile(wheel).namelist()
    for part in (
        "branchline/py.typed",
        "branchline/_native.pyi",
        "branchline/cli/serve.py",
        "branchline/engine/service/generated/engine_pb2.py",
        "licenses/LICENSE",
        "licenses/THIRD_PARTY_NOTICES.md",
    ):
        assert any(name.endswith(part) for name in names), f"{part} is not in the wheel"
    assert len([name for name in names if name.endswith(".so")]) == 1
    assert not [name for name in names if "test" in name or name.endswith(".pyc")]


def test_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "env"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    uv = Path(sys.executable).parent / "uv"
    run(uv, "pip", "install", "-q", "--python", python, wheel, cwd=tmp_path)
    assert run(home / "bin" / "branchline", "--version", cwd=tmp_path) == f"branchline {__version__}\n"
    code = "from branchline import _native; print(_native.PageCache(4, 2).counters())"
    assert run(python, "-c", code, cwd=tmp_path) == "(4, 0, 0, 0)\n"
    assert "radix_cache_backends" in run(home / "bin" / "branchline", "plugins", cwd=tmp_path)
    refused = subprocess.run(
        [home / "bin" / "branchline", "engine", "m.gguf"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2 and "pip install 'branchline[torch]'" in refused.stderr, refused.stderr
