"""Finds the gateway's console script and learns its flags, so that `serve` can pass them through.

The engine never imports the router: it runs it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

NAME = "branchline-router"
ENV = "BRANCHLINE_ROUTER_BIN"
OWNED = ("--host", "--port", "--worker-urls", "--worker-token", "--config")  # set by serve itself


class RouterMissing(Exception):
    """There is no gateway to start."""


@dataclass(frozen=True, slots=True)
class Router:
    """The script, and which of its flags take a value."""

    path: str
    flags: Mapping[str, bool]


def find(env: Mapping[str, str]) -> Router:
    """BRANCHLINE_ROUTER_BIN, else beside this Python, else on PATH. Raises RouterMissing."""
    named = env.get(ENV)
    beside = Path(sys.executable).parent / NAME
    path = named or (str(beside) if beside.exists() else shutil.which(NAME, path=env.get("PATH")))
    if path is None:
        raise RouterMissing(f"{NAME} is not installed: run pip install {NAME}, or name it in {ENV}")
    try:
        shown = subprocess.run(
            [path, "--help"], capture_output=True, text=True, timeout=120, check=True, env=clean(env)
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise RouterMissing(f"{path} can't be run: {error}: run pip install --force-reinstall {NAME}") from None
    return Router(path, flags_of(shown.stdout))


def clean(env: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variable that is ours: the router refuses names that it does not know."""
    return {key: value for key, value in env.items() if key != ENV}


def flags_of(help_text: str) -> dict[str, bool]:
    """Flags of a help page and whether each takes a value."""
    # `--insecure[=<BOOL>]` takes no word after it, `--port <NUMBER>` does.
    pattern = re.compile(r"^\s+(?:-\w, )?(--[a-z][a-z0-9-]*)( <)?", re.MULTILINE)
    return {match[1]: bool(match[2]) for match in pattern.finditer(help_text)}


def split(argv: Sequence[str], router: Mapping[str, bool], ours: Sequence[str]) -> tuple[list[str], list[str]]:
    """(arguments that are not the router's, the router's flags with their values). `ours` win over its names."""
    rest: list[str] = []
    theirs: list[str] = []
    words = iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in router or name in ours or name in OWNED or name in ("--help", "--version"):
            rest.append(word)
            continue
        theirs.append(word)
        if router[name] and not equals:
            theirs += [value for value in (next(words, None),) if value is not None]
    return rest, theirs
