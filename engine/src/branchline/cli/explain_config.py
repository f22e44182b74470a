"""`branchline explain-config MODEL`: every option's value for a checkpoint, who wrote it and who was overruled."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence

from branchline.cli import extensions
from branchline.cli.engine import report
from branchline.engine import options
from branchline.engine.config import EngineConfig
from branchline.engine.errors import EngineError
from branchline.engine.overrides.apply import Writer

PROG = "branchline explain-config"


def run(argv: Sequence[str]) -> int:
    """Print the table; 2 if an option is wrong, 1 if the checkpoint can't be read."""
    env = dict(os.environ)
    if not extensions.load_or_report(argv, env):
        return 2
    parser = options.parser(EngineConfig, PROG, "Shows where each option's value comes from, for one checkpoint.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--all", action="store_true", help="also options that are at their default")
    flags, faults = options.flags_of(EngineConfig, parser, argv)
    as_json, everything = bool(flags.pop("json", False)), bool(flags.pop("all", False))
    try:
        config = options.resolve(EngineConfig, flags=flags, env=env, faults=faults)
    except options.ConfigError as error:
        report(PROG, error.faults)
        return 2
    from branchline.engine.model.load import inspect_model
    from branchline.engine.overrides import apply, explain, facts_of

    try:
        model = inspect_model(config.model)
        facts = facts_of(model)
        user = options.sources(EngineConfig, flags=flags, env=env)
        writers = explain(facts, {name: [Writer(*pair) for pair in pairs] for name, pairs in user.items()})
        apply(config, facts, user)  # refuses what would be refused at the start
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    shown = {name: found for name, found in writers.items() if everything or len(found) > 1}
    print(json.dumps(_document(shown), indent=2, default=str) if as_json else render(shown, facts.architecture))
    return 0


def _secret(name: str) -> bool:
    return any(row.name == name and row.rules.secret for row in options.table(EngineConfig))


def _shown(name: str, value: object) -> str:
    if _secret(name):
        return "set" if value else "unset"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _document(writers: Mapping[str, Sequence[Writer]]) -> dict[str, object]:
    return {
        name: {
            "value": _shown(name, found[-1].value) if _secret(name) else found[-1].value,
            "source": found[-1].source,
            "writers": [
                {"source": one.source, "value": _shown(name, one.value) if _secret(name) else one.value}
                for one in found
            ],
        }
        for name, found in writers.items()
    }


def render(writers: Mapping[str, Sequence[Writer]], architecture: str) -> str:
    """One block an option: the winner first, then those it overruled."""
    lines = [f"architecture {architecture}"]
    if not writers:
        lines.append("every option is at its default (--all lists them)")
    for name, found in writers.items():
        lines.append(f"{name.replace('_', '-')} = {_shown(name, found[-1].value)}   from {found[-1].source}")
        lines += [f"    overrules {_shown(name, one.value)} from {one.source}" for one in reversed(found[:-1])]
    return "\n".join(lines)
