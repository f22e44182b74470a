"""Sources of constraints → one text for llguidance. Runs in the compiling child: may be slow, must be exact.

A source is refused with GrammarInvalid or GrammarUnsupported; nothing is weakened. JSON schemas have a compiler of
their own (schema/), expressions a reader of their own (pattern/), so that one meaning holds for every backend.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from branchline.engine.grammar.pattern import Quoting, parse, write
from branchline.engine.grammar.pattern.write import literal
from branchline.engine.grammar.refusal import GrammarInvalid
from branchline.engine.grammar.schema import SchemaOptions, compile_schema

MAX_BYTES = 1 << 20
_RULE = re.compile(r"^[ \t]*([A-Za-z_][\w-]*)[ \t]*::=", re.M)  # where a rule of GBNF begins
_LONG = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:U([0-9A-Fa-f]{8})|u([0-9A-Fa-f]{4}))")
MAX_CHOICES = 20_000


def of_json(text: str, options: SchemaOptions | None = None) -> str:
    """Values of a JSON schema, canonically spelled."""
    check_size(text, "the schema")
    return compile_schema(text, options or SchemaOptions()).lark


def of_regex(text: str) -> str:
    """Texts that the expression matches as a whole."""
    terms = write(parse(text).root, Quoting.PLAIN, whole=True)
    lines, names = [], []
    for number, term in enumerate(terms):
        parts = [f"P{number}X{place}" for place in range(len(term.all_of) + len(term.none_of))]
        expressions = (*term.all_of, *term.none_of)
        lines += [f"{name}: /{one or '(?:)'}/" for name, one in zip(parts, expressions, strict=True)]
        shown = parts[: len(term.all_of)] + ["~" + name for name in parts[len(term.all_of) :]]
        names.append(f"T{number}")
        lines.append(f"T{number}: " + " & ".join(shown))
    if len(names) > 1:  # one terminal: lexemes of their own would compete
        lines.append("ALL: " + " | ".join(names))
        names = ["ALL"]
    return "\n".join([f"start: {names[0]}", *lines]) + "\n"


def of_choice(text: str) -> str:
    """One of a JSON array's strings."""
    check_size(text, "the choice")
    choices = choices_of(text)
    return "start: ALL\nALL: /" + "|".join(literal(one, Quoting.PLAIN) or "(?:)" for one in choices) + "/\n"


def choices_of(text: str) -> list[str]:
    """The strings of a choice, each once, in order."""
    value = read_json(text, "the choice")
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise GrammarInvalid("the choice is no JSON array of strings: give one or more strings")
    if not value:
        raise GrammarInvalid("the choice has no string: give one or more")
    if len(value) > MAX_CHOICES:
        raise GrammarInvalid(f"the choice has {len(value)} strings: at most {MAX_CHOICES} are allowed")
    for one in value:
        if any(0xD800 <= ord(char) <= 0xDFFF for char in one):
            raise GrammarInvalid("the choice holds a lone surrogate: write whole characters")
    return list(dict.fromkeys(value))


def of_ebnf(text: str) -> str:
    """Texts of a grammar in GBNF's or Lark's notation."""
    check_size(text, "the grammar")
    if not text.strip():
        raise GrammarInvalid("the grammar is empty: give a rule named root")
    from llguidance.gbnf_to_lark import any_to_lark

    counted = Counter(_RULE.findall(text))  # the reader keeps the last one without a word
    if twice := [name for name, count in counted.items() if count > 1]:
        raise GrammarInvalid(f"the grammar has more than one rule named {twice[0]!r}: join them with |")
    try:
        return str(any_to_lark(_LONG.sub(_spelled, text) if counted else text))
    except Exception as error:  # its reader raises whatever it stumbles over
        raise GrammarInvalid(f"the grammar can't be read: {error}"[:400]) from None


def _spelled(found: re.Match[str]) -> str:
    """A character behind \\U or \\u, which the reader does not know, or whose leading zeros it drops.

    Raises GrammarInvalid where there is no character of that number.
    """
    code = int(found[2] or found[3], 16)
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise GrammarInvalid(f"the grammar holds {found[0].lstrip(chr(92))!r}, which is no character's number")
    return found[1] + (chr(code) if code >= 0x80 else f"\\x{code:02x}")


def read_json(text: str, what: str) -> Any:
    """The value of a JSON text. Raises GrammarInvalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarInvalid(f"{what} is no JSON: {error}") from None


def check_size(text: str, what: str) -> None:
    """Refuse what is too long to be looked at."""
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        raise GrammarInvalid(f"{what} has {size} bytes: at most {MAX_BYTES} are allowed")
