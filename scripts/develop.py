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


def register(folder: str) -> dict[str, str]:
    """Metadata of one distribution; its console scripts."""
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    name: str = project["name"]
    info = SITE / f"{name.replace('-', '_')}-{VERSION}.dist-info"
    scripts: dict[str, str] = project.get("scripts", {})
    write(info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {VERSION}\n")
    write(info / "INSTALLER", "develop\n")
    write(info / "RECORD", "")
    lines = "".join(f"{script} = {target}\n" for script, target in scripts.items())
    write(info / "entry_points.txt", f"[console_scripts]\n{lines}")
    return scripts


def main() -> None:
    """Registers both packages; the router's command is its binary."""
    write(SITE / "branchline-source.pth", f"{ROOT / 'engine' / 'src'}\n{ROOT / 'bindings' / 'python' / 'python'}\n")
    register("bindings/python")
    for script, target in register("engine").items():
        module, function = target.split(":")
        body = f"#!{sys.executable}\nimport sys\n\nfrom {module} import {function}\n\nsys.exit({function}())\n"
        write(BIN / script, body, executable=True)
    router = BIN / "branchline-router"
    binary = ROOT / "target" / "release" / "branchline-router"
    if not router.is_symlink() or router.readlink() != binary:
        router.unlink(missing_ok=True)
        router.symlink_to(binary)


main()
