"""What programs may add to the router: parsers of tool calls and of reasoning, by name.

The rules and their messages are those of the engine's registry (`_registry.py` is written from it). A parser that is
registered before options are built can be chosen by `--tool-call-parser` and `--reasoning-parser` like our own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from branchline_router import _native
from branchline_router._registry import API_VERSION, Entry, Origin, Registry, RegistryError, plugins

__all__ = [
    "API_VERSION",
    "Entry",
    "Origin",
    "ReasoningEvent",
    "ReasoningParser",
    "Registry",
    "RegistryError",
    "ToolEvent",
    "ToolParser",
    "all_registries",
    "plugins",
    "reasoning_parsers",
    "tool_parsers",
]

ToolEvent = tuple[Literal["text", "call", "arguments"], str]
"""("text", answer), ("call", name) once and whole for each call, ("arguments", JSON text of the last call)."""
ReasoningEvent = tuple[Literal["reasoning", "text"], str]
"""("reasoning", thought) before ("text", answer)."""


class ToolParser(Protocol):
    """Finds tool calls in one sequence's text; made anew for each by the registered class or factory.

    It is called with the request's tools, a list of definitions in OpenAI's chat form. A class attribute
    `special_tokens = True` keeps special tokens in the text. Events must not depend on how the text was cut.
    """

    def push(self, text: str) -> Sequence[ToolEvent]:
        """Take the next piece of text, of any length."""

    def finish(self) -> Sequence[ToolEvent]:
        """The text has ended: release what was held back."""


class ReasoningParser(Protocol):
    """Tells reasoning and answer of one sequence apart; made anew for each by the registered class or factory.

    It is called with two flags: whether the prompt ends within the reasoning, and whether it has closed it.
    """

    def push(self, text: str) -> Sequence[ReasoningEvent]:
        """Take the next piece of text, of any length."""

    def finish(self) -> Sequence[ReasoningEvent]:
        """The text has ended: release what was held back."""


class _Maker:
    """Makes parsers of one registered name, as the native router asks for them."""

    def __init__(self, registry: Registry[Callable[..., object]], name: str) -> None:
        self._registry = registry
        self._name = name

    def special(self) -> bool:
        """Whether the marks are special tokens."""
        return bool(getattr(self._registry.get(self._name), "special_tokens", False))

    def tools(self, definitions: str) -> object:
        """A parser of tool calls; the definitions are JSON text."""
        return self._checked(self._registry.get(self._name)(json.loads(definitions)))

    def reasoning(self, opened: bool, closed: bool) -> object:
        """A parser of reasoning."""
        return self._checked(self._registry.get(self._name)(opened, closed))

    def _checked(self, parser: object) -> object:
        self._registry.verify(self._name, parser)
        return parser


class _Parsers(Registry[Callable[..., object]]):
    """A registry whose entries the native router can choose."""

    def _add(self, entry: Entry[Callable[..., object]], override: bool) -> None:
        super()._add(entry, override)
        if not entry.origin.builtin:
            _native.add_parser(self.kind, entry.name, _Maker(self, entry.name))


def _tool_parser(name: str) -> Callable[..., object]:
    def make(tools: Sequence[dict[str, Any]] = ()) -> object:
        return _native.NativeToolParser(name, json.dumps(list(tools)))

    return make


def _reasoning_parser(name: str) -> Callable[..., object]:
    def make(opened: bool = False, closed: bool = False) -> object:
        return _native.NativeReasoningParser(name, opened, closed)

    return make


tool_parsers: Registry[Callable[..., object]] = _Parsers("tool_parsers", "tool parser", ToolParser)
reasoning_parsers: Registry[Callable[..., object]] = _Parsers("reasoning_parsers", "reasoning parser", ReasoningParser)
for _name in _native.parser_names("tool_parsers"):
    tool_parsers.register(_name)(_tool_parser(_name))
for _name in _native.parser_names("reasoning_parsers"):
    reasoning_parsers.register(_name)(_reasoning_parser(_name))
plugins.kinds.extend([tool_parsers, reasoning_parsers])


def all_registries() -> tuple[Registry[Callable[..., object]], ...]:
    """Every registry, in the order in which `branchline-router plugins` lists them."""
    return (tool_parsers, reasoning_parsers)
