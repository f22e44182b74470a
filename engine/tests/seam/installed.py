"""Plugins as users install them: wheels, put by pip into a fresh virtual environment, without a network."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

LIMIT_S = 400


def wheel(folder: Path, name: str, points: Mapping[str, Mapping[str, str]], modules: Mapping[str, str]) -> Path:
    """A wheel of version 1.2.3 with these entry points (group → name → target) and modules (name → text)."""
    stem = name.replace("-", "_")
    info = f"{stem}-1.2.3.dist-info"
    groups = [
        f"[{group}]\n" + "".join(f"{entry} = {target}\n" for entry, target in entries.items())
        for group, entries in points.items()
    ]
    files = {f"{module}.py": text for module, text in modules.items()} | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2.3\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "\n".join(groups),
        f"{info}/top_level.txt": "".join(f"{module}\n" for module in modules),
    }
    record = "".join(f"{path},{_digest(text)},{len(text.encode())}\n" for path, text in files.items())
    path = folder / f"{stem}-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in files.items():
            archive.writestr(inside, text)
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return path


def _digest(text: str) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")


class Venv:
    """A fresh environment that sees this one's packages, Branchline among them, and has its own beside them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        _run([sys.executable, "-m", "venv", str(root)])
        self.python = str(root / "bin" / "python")
        (site,) = (root / "lib").glob("python3*/site-packages")
        base = [path for path in sys.path if path and Path(path).is_dir() and not path.endswith("lib-dynload")]
        ours = [path for path in base if "site-packages" in path or path.endswith(("/src", "/python"))]
        (site / "base.pth").write_text("\n".join(dict.fromkeys(ours)) + "\n")
        router = root / "bin" / "branchline-router"
        router.write_text(f'#!/bin/sh\nexec "{self.python}" -m branchline_router.cli "$@"\n')
        router.chmod(0o755)

    def install(self, *wheels: Path) -> None:
        """By pip, offline."""
        flags = ["--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check", "-q"]
        _run([self.python, "-I", "-m", "pip", "install", *flags, *map(str, wheels)])

    def branchline(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """A command of the environment's own."""
        command = [self.python, "-m", "branchline.cli", *words]
        return subprocess.run(
            command, env=self.env(**env), capture_output=True, text=True, timeout=LIMIT_S, check=False
        )

    def env(self, **more: str) -> dict[str, str]:
        """Without this process's own paths."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return {
            **kept,
            "OMP_NUM_THREADS": "1",
            "BRANCHLINE_ROUTER_BIN": str(self.root / "bin/branchline-router"),
            **more,
        }


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
