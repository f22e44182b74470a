"""Makes registries complete before options are built: our own implementations, entry points, named plugins."""

from __future__ import annotations

import argparse
import importlib
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from branchline import registry

# Packages that register lazily when imported; none of them imports torch.
BUILTIN = (
    "branchline.engine.model",
    "branchline.engine.executor",
    "branchline.engine.attention",
    "branchline.engine.cache",
    "branchline.engine.speculative",
    "branchline.engine.quantization",
    "branchline.engine.overrides",
    "branchline.engine.grammar",
    "branchline.engine.platforms",
    "branchline.cli.backends",
    "branchline.engine.handover",
)


def load(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Register ours, then discover and import plugins. Raises RegistryError if one named by the user fails."""
    for package in BUILTIN:
        importlib.import_module(package)
    registry.plugins.load(named(argv, env), disabled(argv, env))


def load_or_report(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    """The same; a failure is printed. Whether it went well."""
    try:
        load(argv, env)
    except registry.RegistryError as error:
        print(f"error: {error}", file=sys.stderr)
        return False
    return True


def named(argv: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Plugins named by flags, else by the environment, else by the options file."""
    return _early("plugin", "BRANCHLINE_PLUGINS", argv, env)


def disabled(argv: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Plugins left out, likewise."""
    return _early("plugins_disable", "BRANCHLINE_PLUGINS_DISABLE", argv, env)


def _early(name: str, variable: str, argv: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """An option with many values, read before there is a table of options."""
    scan = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    scan.add_argument("--" + name.replace("_", "-"), dest=name, action="append", default=[])
    scan.add_argument("--config", default=env.get("BRANCHLINE_CONFIG", ""))
    try:
        known, _ = scan.parse_known_args(list(argv))
    except argparse.ArgumentError:  # the real parser will say it
        return []
    given = getattr(known, name)
    if given:
        return list(given)
    if variable in env:
        return [part.strip() for part in env[variable].split(",") if part.strip()]
    return _of_file(known.config, name)


def _of_file(path: str, name: str) -> list[str]:
    try:
        content = tomllib.loads(Path(path).read_text("utf-8")) if path else {}
    except (OSError, ValueError):  # resolve reports it with all other faults
        return []
    value = content.get(name, content.get(name.replace("_", "-"), []))
    return [str(one) for one in value] if isinstance(value, list) else [str(value)]
