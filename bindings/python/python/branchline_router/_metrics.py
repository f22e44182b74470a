"""A snapshot of the router's metrics, read from its own exposition text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_LINE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class Sample:
    """One series at one moment."""

    name: str
    value: float
    labels: dict[str, str] = field(default_factory=dict)


def parse(text: str) -> list[Sample]:
    """All samples of an exposition text."""
    samples = []
    for line in text.splitlines():
        found = None if line.startswith("#") else _LINE.match(line)
        if found is not None:
            labels = {name: _plain(value) for name, value in _LABEL.findall(found["labels"] or "")}
            samples.append(Sample(found["name"], float(found["value"]), labels))
    return samples


def _plain(value: str) -> str:
    return _ESCAPE.sub(lambda match: "\n" if match[1] == "n" else match[1], value)
