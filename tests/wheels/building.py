"""Builds wheels and empty environments for the tests of this folder; reaches no network.

What a wheel depends on is linked, distribution by distribution, from the environment that runs the tests: only what
its metadata names, so that a forgotten dependency shows.
"""

from __future__ import annotations

import compileall
import importlib.metadata
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSION: str = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
TOOLS = Path(sys.executable).parent


def run(*command: str | Path, cwd: Path = ROOT, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    """A command that must end with `code`; `env` is all of its environment but PATH."""
    words = [str(one) for one in command]
    environment = {"PATH": "/usr/bin:/bin", **env} if env else None
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def build(package: str, out: Path) -> Path:
    """The wheel of the package in this folder; its Rust parts come from the workspace's target folder if current.

    As somebody builds it who has run the code before: what Python compiled lies beside the sources.
    """
    sources = {"engine/native": "engine/src", "bindings/python": "bindings/python/python"}
    compileall.compile_dir(ROOT / sources[package], quiet=1)
    run(TOOLS / "maturin", "build", "--release", "--locked", "-m", f"{package}/Cargo.toml", "--out", out)
    (wheel,) = out.glob("*.whl")
    return wheel


def install(wheel: Path, home: Path) -> Path:
    """The `bin` folder of a new environment with the wheel and the dependencies that it declares."""
    venv.create(home, with_pip=False)
    binaries = home / "bin"
    command = ("pip", "install", "-q", "--offline", "--no-index", "--no-deps", "--python", binaries / "python")
    run(TOOLS / "uv", *command, wheel, cwd=home)
    (site,) = home.glob("lib/python3*/site-packages")
    name = wheel.name.split("-")[0]
    (info,) = site.glob(f"{name}-*.dist-info")
    for dependency in closure(importlib.metadata.Distribution.at(info)):
        link(dependency, site)
    return binaries


def closure(root: importlib.metadata.Distribution) -> list[importlib.metadata.Distribution]:
    """Installed distributions that `root` needs, without those of extras and of other systems."""
    found: dict[str, importlib.metadata.Distribution] = {}
    queue = list(root.requires or ())
    while queue:
        requirement, _, marker = queue.pop().partition(";")
        match = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
        if match is None or match[0] in found or re.search(r"extra|win32|Windows|darwin|python_version *<", marker):
            continue
        distribution = importlib.metadata.distribution(match[0])
        found[match[0]] = distribution
        queue += distribution.requires or ()
    return list(found.values())


def link(distribution: importlib.metadata.Distribution, site: Path) -> None:
    """Make its modules importable from `site`; namespace packages are merged one folder down."""
    for file in distribution.files or ():
        if file.parts[0] in ("..", "__pycache__"):
            continue
        depth = 2 if file.parts[0] == "google" else 1
        target = site.joinpath(*file.parts[:depth])
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            target.symlink_to(Path(str(distribution.locate_file(""))).joinpath(*file.parts[:depth]))


def check_stub(module: str, site: Path) -> None:
    """The module's stub in `site` names what the built module has, with the same parameters."""
    package = module.partition(".")[0]
    alone = site.parent / "stub"  # other packages of `site` would shadow mypy's own
    alone.mkdir()
    (alone / package).symlink_to(site / package)
    run(TOOLS / "python", "-P", "-m", "mypy.stubtest", module, cwd=alone, PYTHONPATH=str(alone), MYPYPATH=str(alone))
