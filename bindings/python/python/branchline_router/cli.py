"""The console script `branchline-router`: the same command line as the binary, and plugins written in Python.

`--plugin module` (or BRANCHLINE_PLUGINS) and `--plugins-disable` are read here, before any option; `plugins` lists what
is registered; `mini-lb` is a debugging balancer of its own (see mini_lb).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from branchline_router import registry
from branchline_router._native import run_cli

EARLY = {"--plugin": "BRANCHLINE_PLUGINS", "--plugins-disable": "BRANCHLINE_PLUGINS_DISABLE"}


def split(argv: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], list[str], list[str]]:
    """Plugins named and plugins left out, each by flags, else by the environment; and the other arguments."""
    given: dict[str, list[str]] = {flag: [] for flag in EARLY}
    rest: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if flag in EARLY:
            given[flag].append(value if equals else next(arguments, ""))
        else:
            rest.append(argument)
    for flag, name in EARLY.items():
        if not given[flag]:
            given[flag] = [part.strip() for part in env.get(name, "").split(",") if part.strip()]
    return given["--plugin"], given["--plugins-disable"], rest


def listing() -> str:
    """Every registered name with where it comes from, then what could not be loaded."""
    lines: list[str] = []
    for one in registry.all_registries():
        lines.append(f"{one.kind}:")
        for entry in one.entries():
            replaced = f", in the place of {entry.replaced}" if entry.replaced else ""
            lines.append(f"  {entry.name}  {entry.state}  {entry.origin}{replaced}")
            lines += [f"    {line}" for line in entry.failure.splitlines()]
    lines += [f"disabled: {one.group} {one.name} of {one.origin}" for one in registry.plugins.disabled]
    for failure in registry.plugins.failures:
        lines.append(f"failed: {failure.name} of {failure.origin}")
        lines += [f"  {line}" for line in failure.trace.splitlines()]
    return "\n".join(lines)


def main() -> int:
    """Runs `sys.argv`; returns the exit code."""
    if sys.argv[1:2] == ["mini-lb"]:
        from branchline_router import mini_lb

        return mini_lb.run(sys.argv[2:])
    named, disabled, rest = split(sys.argv[1:], os.environ)
    try:
        registry.plugins.load(named, disabled)
    except registry.RegistryError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if rest[:1] == ["plugins"]:
        print(listing())
        return 1 if registry.plugins.failures else 0
    return run_cli(rest)


if __name__ == "__main__":
    sys.exit(main())
