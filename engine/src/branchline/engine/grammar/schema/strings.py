"""Strings as terminals: length, patterns, formats and values, intersected exactly over JSON's canonical spelling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from branchline.engine.grammar.pattern import Quoting, parse, write
from branchline.engine.grammar.pattern.tree import ANY
from branchline.engine.grammar.pattern.write import chars, literal
from branchline.engine.grammar.refusal import GrammarInvalid, GrammarUnsupported
from branchline.engine.grammar.schema.atoms import Clause
from branchline.engine.grammar.schema.formats import FORMATS

if TYPE_CHECKING:
    from branchline.engine.grammar.schema.build import Builder

CHARACTER = chars(ANY, Quoting.JSON)
STRING = rf"\x22(?:{CHARACTER})*\x22"


def terminal(build: Builder, clause: Clause) -> str | None:
    """The terminal of the strings that fit all atoms, quotes included; None if there are none."""
    least, most = 0, None
    wanted: list[str] = []
    banned: list[str] = []
    listed: list[tuple[str, ...]] = []
    for atom in clause:
        match atom:
            case ("minlen", count):
                least = max(least, count)
            case ("maxlen", count):
                most = count if most is None else min(most, count)
            case ("pattern", text, positive, pointer):
                (wanted if positive else banned).append(pattern(build, text, pointer))
            case ("format", name, _) if build.options.formats and name in FORMATS:
                wanted.append(pattern(build, FORMATS[name], atom[2]))
            case ("in", values):
                listed.append(values)
            case ("notin", values):
                banned.extend(build.terminal("/" + _quoted(value) + "/") for value in values)
    if most is not None and least > most:
        return None
    if listed:
        values = [one for one in listed[0] if all(one in other for other in listed[1:])]
        return _listed(build, [one for one in values if _fits(build, one, clause)])
    if least == 0 and most is None:
        base = build.terminal(f"/{STRING}/")
    else:
        bounds = f"{{{least},{'' if most is None else most}}}"
        base = build.terminal(rf"/\x22(?:{CHARACTER}){bounds}\x22/")
    if not wanted and not banned:
        return base
    parts = [*([base] if least or most is not None or not wanted else []), *wanted]
    made = build.terminal(" & ".join([*parts, *(f"~{one}" for one in banned)]))
    return made if build.probe.is_nonempty(made, build.terminals) else None


def pattern(build: Builder, text: str, pointer: str) -> str:
    """The terminal of the quoted strings that the pattern finds something in."""
    try:
        terms = write(parse(text).root, Quoting.JSON, whole=False)
    except GrammarInvalid as error:
        raise GrammarInvalid(error.message, pointer=pointer) from None
    except GrammarUnsupported as error:
        raise GrammarUnsupported("pattern", error.message.partition("exactly: ")[2], pointer=pointer) from None
    names = []
    for term in terms:
        parts = [build.terminal(rf"/\x22(?:{one})\x22/") for one in term.all_of]
        parts += ["~" + build.terminal(rf"/\x22(?:{one})\x22/") for one in term.none_of]
        names.append(parts[0] if len(parts) == 1 else build.terminal(" & ".join(parts)))
    return names[0] if len(names) == 1 else build.terminal(" | ".join(names))


def fits(build: Builder, value: str, clauses: list[Clause]) -> bool:
    """Whether the string fits one of the clauses."""
    return any(_fits(build, value, clause) for clause in clauses)


def matches(build: Builder, text: str, pointer: str, value: str) -> bool:
    """Whether the pattern finds something in the string."""
    return build.probe.accepts(pattern(build, text, pointer), build.terminals, quoted(value))


def quoted(value: str) -> str:
    """The canonical JSON spelling of a string."""
    made = []
    for char in value:
        code = ord(char)
        short = {8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r", 34: '\\"', 92: "\\\\"}.get(code)
        made.append(short or (f"\\u{code:04x}" if code < 32 else char))
    return f'"{"".join(made)}"'


def _quoted(value: str) -> str:
    return rf"\x22{literal(value, Quoting.JSON)}\x22"


def _listed(build: Builder, values: list[str]) -> str | None:
    if not values:
        return None
    return build.terminal("/" + "|".join(_quoted(value) for value in values) + "/")


def _fits(build: Builder, value: str, clause: Clause) -> bool:
    if any(0xD800 <= ord(char) <= 0xDFFF for char in value):
        return False
    for atom in clause:
        match atom:
            case ("minlen", count):
                good = len(value) >= count
            case ("maxlen", count):
                good = len(value) <= count
            case ("pattern", text, positive, pointer):
                good = matches(build, text, pointer, value) is positive
            case ("format", name, pointer):
                good = not (build.options.formats and name in FORMATS) or matches(build, FORMATS[name], pointer, value)
            case ("in", values):
                good = value in values
            case ("notin", values):
                good = value not in values
            case _:
                good = True
        if not good:
            return False
    return True
