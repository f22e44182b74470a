"""The blocks a program is written in: text, gen, select, roles, images. Values only; nothing here runs anything."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

from branchline.lang.errors import ArgumentError

ROLES = ("system", "user", "assistant")
SELECT_METHODS = (
    "exact",
    "token_length_normalized",
    "greedy_token_selection",
    "unconditional_likelihood_normalized",
)
# What each dtype may look like. Numbers and words end at a blank or at the end of a line.
DTYPE_REGEX: dict[type, str] = {
    int: r"[-+]?[0-9]{1,18}",
    float: r"[-+]?[0-9]{1,18}(\.[0-9]{1,18})?",
    bool: r"(True|False)",
    str: r"[\w\d\s\.,;:!?'()\-]{0,512}",
}


class Expr:
    """Anything that `s += …` takes."""

    __slots__ = ()

    def __add__(self, other: Appendable) -> Seq:
        return Seq((*flatten(self), *flatten(other)))

    def __radd__(self, other: Appendable) -> Seq:
        return Seq((*flatten(other), *flatten(self)))


@dataclass(frozen=True, slots=True)
class Text(Expr):
    """Literal text."""

    value: str


@dataclass(frozen=True, slots=True)
class Seq(Expr):
    """Blocks one after the other."""

    items: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class RoleBegin(Expr):
    """Opens a message."""

    role: str


@dataclass(frozen=True, slots=True)
class RoleEnd(Expr):
    """Closes the open message."""

    role: str


@dataclass(frozen=True, slots=True)
class VarBegin(Expr):
    """What is appended until the matching end also becomes a variable."""

    name: str


@dataclass(frozen=True, slots=True)
class VarEnd(Expr):
    """Ends a variable's scope."""

    name: str


@dataclass(frozen=True, slots=True)
class Image(Expr):
    """A picture of the open message: a path, an http(s) or data URL, or encoded bytes."""

    source: str | bytes


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling options of one call; None takes the program's, then the server's default."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    stop_regex: tuple[str, ...] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None

    def over(self, base: Sampling) -> Sampling:
        """These options where given, those of `base` elsewhere."""
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        return replace(base, **{name: value for name, value in given.items() if value is not None})

    def given(self) -> dict[str, Any]:
        """Options that were given, by name."""
        return {item.name: value for item in fields(self) if (value := getattr(self, item.name)) is not None}


@dataclass(frozen=True, slots=True)
class Gen(Expr):
    """A generated value. At most one of regex, json_schema and ebnf is set; `parse` turns the text into the value."""

    name: str | None
    sampling: Sampling
    regex: str | None = None
    json_schema: str | None = None
    ebnf: str | None = None
    target: Any = None  # the type the value is parsed into
    timeout_s: float | None = None
    retries: int | None = None


@dataclass(frozen=True, slots=True)
class Select(Expr):
    """One of several texts, chosen by the model's probabilities."""

    name: str | None
    choices: tuple[str, ...]
    method: str = "token_length_normalized"
    temperature: float = 0.0
    seed: int | None = None
    timeout_s: float | None = None
    target: Any = None  # the Literal or Enum that the picked text stands for


@dataclass(frozen=True, slots=True)
class SeparateReasoning(Expr):
    """Blocks whose generated values are split into reasoning (`NAME_reasoning_content`) and answer (`NAME`)."""

    body: tuple[Expr, ...]
    model_type: str


Appendable: TypeAlias = str | Expr | None


def flatten(item: Appendable) -> tuple[Expr, ...]:
    """The plain blocks of whatever `s += …` may be given."""
    if item is None:
        return ()
    if isinstance(item, str):
        return (Text(item),) if item else ()
    if isinstance(item, Seq):
        return tuple(block for part in item.items for block in flatten(part))
    if isinstance(item, Expr):
        return (item,)
    raise ArgumentError(
        f"cannot append {type(item).__name__} {item!r:.60}: give text, gen(…), select(…), a role, or str(…) of it"
    )


def texts(name: str, value: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """One string or several, as an own tuple: a caller's list is never kept."""
    if value is None:
        return None
    values = (value,) if isinstance(value, str) else tuple(value)
    if any(not isinstance(item, str) or not item for item in values):
        raise ArgumentError(f"{name} is {value!r}: give non-empty strings")
    return values


def schema_text(schema: str | Mapping[str, Any] | type) -> tuple[str, Any]:
    """JSON text of a schema, and the type its values parse into (None: plain Python values)."""
    if isinstance(schema, str):
        try:
            json.loads(schema)
        except ValueError as error:
            raise ArgumentError(f"json_schema is not JSON: {error}") from None
        return schema, None
    if isinstance(schema, Mapping):
        return json.dumps(schema), None
    if hasattr(schema, "model_json_schema"):
        return json.dumps(closed(schema.model_json_schema())), schema
    raise ArgumentError(f"json_schema is {schema!r:.60}: give JSON text, a dict or a pydantic model")


def closed(schema: Any) -> Any:
    """A type's schema without properties that the type does not have: its values would only lose them."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: closed(value) for name, value in schema.items()}
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        made.setdefault("additionalProperties", False)
    return made


def check_seconds(name: str, value: float | None) -> None:
    """A typed error for what is no span of time."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0):
        raise ArgumentError(f"{name} is {value!r}: give seconds, 0 or more")


def check_regex(name: str, value: str | None) -> None:
    """A typed error for what Python's own compiler refuses."""
    if value is None:
        return
    try:
        re.compile(value)
    except re.error as error:
        raise ArgumentError(f"{name} {value!r} is not a regular expression: {error}") from None


@dataclass(frozen=True, slots=True)
class Hints:
    """What `@function(hints=…)` says ahead: branches, and tokens a call, which also are its default max_tokens.

    Sent as headers, which the gateway does not read; it does read which program (session) a call is of.
    """

    fork_width: int | None = None
    expected_tokens: int | None = None
