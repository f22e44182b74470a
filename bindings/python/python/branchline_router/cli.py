"""The console script `branchline-router`: the same command line as the binary."""

from __future__ import annotations

import sys

from branchline_router._native import run_cli


def main() -> int:
    """Runs `sys.argv`; returns the exit code."""
    return run_cli(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
