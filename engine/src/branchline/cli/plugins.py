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
    parser.add_argument("--plugins-disable", action="append", help="installed plugin to leave out; all: every one")
    parser.add_argument(
        "--check",
        "--import",
        dest="load",
        action="store_true",
        help="import every implementation and compare it with its kind's members; exit code 1 if one fails",
    )
    parser.add_argument("--metrics-url", help="metrics of a running engine, to show what its hooks have cost")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(list(argv))
    loaded = extensions.load_or_report(argv, dict(os.environ))
    if given.load:
        _import_all()
    rows = table()
    placed, fault = _hooks(given.metrics_url)
    failures = [(failure.name, failure.trace) for failure in registry.plugins.failures]
    failures += [("hooks", fault)] if fault else []
    failures += [(f"{row['kind']} {row['name']}", str(row["traceback"])) for row in rows if row["traceback"]]
    if given.json:
        print(
            json.dumps(
                {
                    "registered": rows,
                    "hooks": placed,
                    "failures": [{"name": n, "traceback": t} for n, t in failures],
                },
                indent=2,
            )
        )
    else:
        print(render(rows, _COLUMNS))
        if placed:
            print("\nhooks, in the order in which they run at each point")
            print(render(placed, tuple(placed[0])))
        for name, trace in failures:
            print(f"\nfailed: {name}\n{trace.rstrip()}")
    return 0 if loaded and not failures else 1


def table() -> list[dict[str, object]]:
    """One row an implementation, then one an entry point that was left out."""
    rows: list[dict[str, object]] = [
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
    rows += [
        {
            "kind": one.group.removeprefix("branchline."),
            "name": one.name,
            "version": one.origin.version,
            "distribution": one.origin.package,
            "state": "disabled",
            "file": one.origin.file,
            "api_version": "-",
            "traceback": "",
        }
        for one in registry.plugins.disabled
    ]
    return rows


def render(rows: Sequence[dict[str, object]], columns: Sequence[str]) -> str:
    """The rows as aligned columns."""
    cells = [list(columns), *([str(row.get(column, "-")) for column in columns] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def _hooks(metrics_url: str | None) -> tuple[list[dict[str, object]], str]:
    if not registry.hooks.entries():
        return [], ""
    from branchline.cli import hooks

    return hooks.rows(metrics_url)


def _import_all() -> None:
    for one in registry.all_registries():
        for entry in one.entries():
            try:
                one.get(entry.name)
            except registry.RegistryError as error:
                entry.failure = entry.failure or str(error)  # it imports, but lacks a member
