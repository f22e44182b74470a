"""The console script `branchline-router`: the same command line as the binary, and plugins written in Python.

`--plugin module` (or BRANCHLINE_PLUGINS) is read here, before any option; `plugins` lists what is registered.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from branchline_router import registry
from branchline_router._native import run_cli

ENV = "BRANCHLINE_PLUGINS"


def split(argv: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Plugins named by flags, else by the environment; and the other arguments."""
    named: list[str] = []
    rest: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        if argument == "--plugin":
            named.append(next(arguments, ""))
        elif argument.startswith("--plugin="):
            named.append(argument.removeprefix("--plugin="))
        else:
            rest.append(argument)
    if not named:
        named = [part.strip() for part in env.get(ENV, "").split(",") if part.strip()]
    return named, rest


def listing() -> str:
    """Every registered name with where it comes from, then what could not be loaded."""
    lines: list[str] = []
    for one in registry.all_registries():
        lines.append(f"{one.kind}:")
        for entry in one.entries():
            replaced = f", in the place of {entry.replaced}" if entry.replaced else ""
            lines.append(f"  {entry.name}  {entry.state}  {entry.origin}{replaced}")
            lines += [f"    {line}" for line in entry.failure.splitlines()]
    for failure in registry.plugins.failures:
        lines.append(f"failed: {failure.name} of {failure.origin}")
        lines += [f"  {line}" for line in failure.trace.splitlines()]
    return "\n".join(lines)


def main() -> int:
    """Runs `sys.argv`; returns the exit code."""
    named, rest = split(sys.argv[1:], os.environ)
    try:
        registry.plugins.load(named)
    except registry.RegistryError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if rest[:1] == ["plugins"]:
        print(listing())
        return 1 if registry.plugins.failures else 0
    return run_cli(rest)


if __name__ == "__main__":
    sys.exit(main())
