"""The `branchline` command. Each subcommand is one module with `run(argv) -> exit code`, imported when asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from branchline import __version__

COMMANDS = {
    "serve": "gateway and engines on this machine, ready for clients",
    "engine": "one engine worker, for a gateway elsewhere",
    "explain-config": "where each option's value comes from, for one checkpoint",
    "bench": "measure any OpenAI-compatible server from outside",
    "doctor": "what this machine has and what would be used",
    "plugins": "every registered implementation and every plugin that failed",
}


def usage() -> str:
    """The top-level help."""
    lines = [f"branchline {__version__}: serves language models along the prefixes their requests share", ""]
    lines += ["usage: branchline COMMAND [OPTIONS]", ""]
    lines += [f"  {name:<14} {words}" for name, words in COMMANDS.items()]
    lines += ["", "branchline COMMAND --help lists its options; branchline --version prints the version.", ""]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. 2 for wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    match arguments:
        case ["--version" | "-V", *_]:
            print(f"branchline {__version__}")
            return 0
        case ["--help" | "-h" | "help", *_]:
            print(usage(), end="")
            return 0
        case []:
            print(usage(), end="", file=sys.stderr)
            return 2
        case [name, *rest] if name in COMMANDS:
            run = importlib.import_module(f"branchline.cli.{name.replace('-', '_')}").run
            return int(run(rest))
        case [name, *_]:
            print(f"error: unknown command {name!r}: choose one of {', '.join(COMMANDS)}", file=sys.stderr)
            return 2
    return 2
