"""`branchline engine MODEL`: one worker in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from branchline.cli import extensions, parent
from branchline.engine import options
from branchline.engine.config import EngineConfig

PROG = "branchline engine"


def run(argv: Sequence[str]) -> int:
    """Resolve options, then serve; 2 if they are wrong."""
    env = dict(os.environ)
    if not extensions.load_or_report(argv, env):
        return 2
    parser = options.parser(EngineConfig, PROG, "Runs one engine worker, which a gateway reaches over gRPC.")
    flags, faults = options.flags_of(EngineConfig, parser, argv)
    try:
        config = options.resolve(EngineConfig, flags=flags, env=env, faults=faults)
    except options.ConfigError as error:
        report(PROG, error.faults)
        return 2
    if config.parent_pid is not None:
        parent.follow(config.parent_pid)
    # gRPC's fork handlers cost latency and this process never forks; must be set before grpc is imported.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    # Threads of the torch executor that wait by spinning stall each other on busy cores: 8 times slower beside one
    # other process. Must be set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from branchline.engine.service import main

    return main.run(config, given=frozenset(options.sources(EngineConfig, flags=flags, env=env)))


def report(prog: str, faults: Sequence[str]) -> None:
    """Every fault on its own line."""
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    print(f"{prog}: {len(faults)} fault{'s' if len(faults) > 1 else ''}; see {prog} --help", file=sys.stderr)
