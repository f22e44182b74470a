"""`branchline plugins`: lists every registered implementation, and failures with their tracebacks; `new` writes one."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

from branchline import registry
from branchline.cli import extensions, scaffold

_COLUMNS = ("kind", "name", "api_version", "version", "distribution", "state", "file")


def run(argv: Sequence[str]) -> int:
    """Print the list; 1 if something failed to load."""
    if argv and argv[0] == "new":
        return scaffold.run(argv[1:])
    parser = argparse.ArgumentParser(prog="branchline plugins", description=__doc__)
    parser.add_argument("--plugin", action="append", help="module, or module:function, to import first")
    parser.add_argument(
        "--check",
        "--import",
        dest="load",
        action="store_true",
        help="import every implementation and compare it with its kind's members; exit code 1 if one fails",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(list(argv))
    loaded = extensions.load_or_report(argv, dict(os.environ))
    if given.load:
        _import_all()
    rows = table()
    failures = [(failure.name, failure.trace) for failure in registry.plugins.failures]
    failures += [(f"{row['kind']} {row['name']}", str(row["traceback"])) for row in rows if row["traceback"]]
    if given.json:
        print(
            json.dumps({"registered": rows, "failures": [{"name": n, "traceback": t} for n, t in failures]}, indent=2)
        )
    else:
        print(render(rows))
        for name, trace in failures:
            print(f"\nfailed: {name}\n{trace.rstrip()}")
    return 0 if loaded and not failures else 1


def table() -> list[dict[str, object]]:
    """One row an implementation."""
    return [
        {
            "kind": one.kind,
            "name": entry.name,
            "version": entry.origin.version,
            "distribution": entry.origin.package,
            "state": entry.state + (f", overrides {entry.replaced}" if entry.replaced else ""),
            "file": entry.origin.file,
            "api_version": entry.api_version,
            "traceback": entry.failure,
        }
        for one in registry.all_registries()
        for entry in one.entries()
    ]


def render(rows: Sequence[dict[str, object]]) -> str:
    """The rows as aligned columns."""
    cells = [list(_COLUMNS), *([str(row[column]) for column in _COLUMNS] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def _import_all() -> None:
    for one in registry.all_registries():
        for entry in one.entries():
            try:
                one.get(entry.name)
            except registry.RegistryError as error:
                entry.failure = entry.failure or str(error)  # it imports, but lacks a member
