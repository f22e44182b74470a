"""The `branchline` wheel: built, installed into an empty environment, imported, and run from there."""

from __future__ import annotations

import importlib.metadata
import json
import re
import zipfile
from pathlib import Path

import branchline
import pytest

from tests.wheels.building import VERSION, build, check_stub, install, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("engine/native", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def environment(wheel: Path) -> Path:
    """The `bin` folder of an environment with the wheel and its dependencies, without torch."""
    return install(wheel, wheel.parent / "env")


def test_wheel_is_abi3_for_311_and_carries_its_parts_and_notices(wheel: Path) -> None:
    assert wheel.name.startswith(f"branchline-{VERSION}-cp311-abi3-")
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
    # `branchline.testing` is for plugins' own tests; ours stay out.
    assert not [name for name in names if re.search(r"(^|/)(tests/|test_|conftest)|\.pyc$", name)]
    assert "branchline/testing/__init__.py" in names


def test_one_version_holds_for_workspace_package_and_wheel(environment: Path) -> None:
    (site,) = environment.parent.glob("lib/python3*/site-packages")
    assert importlib.metadata.Distribution.at(site / f"branchline-{VERSION}.dist-info").version == VERSION
    assert branchline.__version__ == VERSION
    shown = run(environment / "branchline", "--version", cwd=environment, LANG="C")
    assert shown.stdout == f"branchline {VERSION}\n"


def test_native_module_works_from_the_wheel_and_needs_no_libpython(environment: Path) -> None:
    code = "from branchline import _native; print(_native.PageCache(4, 2).counters(), _native.__file__)"
    shown = run(environment / "python", "-c", code, cwd=environment, LANG="C").stdout.split()
    assert shown[:-1] == ["(4,", "0,", "0,", "0)"]
    assert "libpython" not in run("/usr/bin/ldd", shown[-1]).stdout


def test_commands_run_without_torch_and_with_the_declared_dependencies_alone(environment: Path, tmp_path: Path) -> None:
    tool = environment / "branchline"
    assert "radix_cache_backends" in run(tool, "plugins", cwd=tmp_path, LANG="C").stdout
    assert "--max-total-tokens" in run(tool, "engine", "--help", cwd=tmp_path, LANG="C").stdout
    report = json.loads(run(tool, "doctor", "--json", cwd=tmp_path, code=1, LANG="C").stdout)
    assert report["packages"]["torch"] is None
    assert any("branchline-router is not installed" in problem for problem in report["use"]["problems"])


def test_torch_executor_without_torch_says_what_to_install(environment: Path, tmp_path: Path) -> None:
    command = (environment / "branchline", "engine", "m.gguf", "--executor", "torch")
    assert "pip install 'branchline[torch]'" in run(*command, cwd=tmp_path, code=2, LANG="C").stderr


def test_stub_of_the_native_module_says_what_was_built(environment: Path) -> None:
    (site,) = environment.parent.glob("lib/python3*/site-packages")
    check_stub("branchline._native", site)
