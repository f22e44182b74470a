"""The way of a schema: text → document → logic → rules → the grammar's text. Runs in a child process with limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from branchline.engine.grammar.schema.build import Builder, Repeat, SchemaOptions, Symbol
from branchline.engine.grammar.schema.document import Document, load
from branchline.engine.grammar.schema.probe import Probe

__all__ = ["Compiled", "SchemaOptions", "compile_schema"]


DEFAULT = SchemaOptions()


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar in llguidance's Lark dialect that accepts exactly the schema's values, canonically spelled."""

    lark: str
    rules: int
    terminals: int


def compile_schema(schema: str | dict[str, Any] | bool, options: SchemaOptions = DEFAULT) -> Compiled:
    """The grammar of a schema. Raises GrammarInvalid or GrammarUnsupported, with keyword and pointer."""
    value = load(schema) if isinstance(schema, str) else schema
    document = Document(value, options.dialect)
    build = Builder(document, options, Probe())
    start = build.state(frozenset({(document.root.number, True)}))
    rules = build.finish(start)
    lines = [f"start: {start}"]
    used: set[str] = set()
    for name, alternatives in rules.items():
        lines.append(f"{name}: " + " | ".join(_sequence(one, used) for one in alternatives))
    lines += [f"{name}: {text}" for text, name in build.probe.inline.items() if name in used]
    todo = [name for name in used if name in build.terminals]
    known = set(todo)
    while todo:
        name = todo.pop()
        definition = build.terminals[name]
        lines.append(f"{name}: {definition}")
        if not definition.startswith(("/", '"')):
            for part in definition.replace("&", " ").replace("|", " ").replace("~", " ").split():
                if part not in known:
                    known.add(part)
                    todo.append(part)
    return Compiled("\n".join(lines) + "\n", len(rules), len(known))


def _sequence(alternative: list[Symbol], used: set[str]) -> str:
    parts = []
    for symbol in alternative:
        if isinstance(symbol, Repeat):
            high = "" if symbol.most is None else str(symbol.most)
            parts.append(f"{symbol.name}{{{symbol.least},{high}}}")
        else:
            used.add(symbol)
            parts.append(symbol)
    return " ".join(parts) if parts else '""'
