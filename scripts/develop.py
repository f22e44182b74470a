"""Registers the source tree in the running environment, as an editable install would.

Writes one .pth file, the distribution's metadata (name, version, entry points) and the console scripts.
The wheels themselves are built and tested by tests/wheels.
"""

from __future__ import annotations

import stat
import sys
import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SITE = Path(sysconfig.get_paths()["purelib"])
BIN = Path(sys.executable).parent
VERSION = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]


def write(path: Path, text: str, executable: bool = False) -> None:
    """Writes only what differs, so that a second run changes nothing."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if executable:
        path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


def register_engine() -> None:
    """Metadata and console scripts of the `branchline` distribution."""
    project = tomllib.loads((ROOT / "engine" / "pyproject.toml").read_text())["project"]
    info = SITE / f"branchline-{VERSION}.dist-info"
    scripts: dict[str, str] = project.get("scripts", {})
    write(info / "METADATA", f"Metadata-Version: 2.1\nName: branchline\nVersion: {VERSION}\n")
    write(info / "INSTALLER", "develop\n")
    write(info / "RECORD", "")
    lines = "".join(f"{script} = {target}\n" for script, target in scripts.items())
    write(info / "entry_points.txt", f"[console_scripts]\n{lines}")
    for script, target in scripts.items():
        module, function = target.split(":")
        body = f"#!{sys.executable}\nimport sys\n\nfrom {module} import {function}\n\nsys.exit({function}())\n"
        write(BIN / script, body, executable=True)


def main() -> None:
    """Registers the engine and links the router binary beside the interpreter."""
    write(SITE / "branchline-source.pth", f"{ROOT / 'engine' / 'src'}\n")
    register_engine()
    router = BIN / "branchline-router"
    binary = ROOT / "target" / "release" / "branchline-router"
    if not router.is_symlink() or router.readlink() != binary:
        router.unlink(missing_ok=True)
        router.symlink_to(binary)


main()
