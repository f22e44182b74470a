"""What one keyword asks of a value of one JSON type, after negations are pushed down to it.

An atom is a tuple whose first member names it; a clause is a conjunction of atoms without repeats, in the schema's
order; clauses in a list are alternatives. A literal is (number of a schema node, whether it must hold).
"""

from __future__ import annotations

from typing import Any

KINDS = ("null", "boolean", "number", "string", "array", "object")

Literal = tuple[int, bool]
Atom = tuple[Any, ...]
Clause = tuple[Atom, ...]
Clauses = list[Clause]

TRUE: Clauses = [()]
FALSE: Clauses = []
MAX_CLAUSES = 512


class TooMany(Exception):
    """More alternatives than are worked with."""


def kind_of(value: Any) -> str:
    """The JSON type of a parsed value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def both(left: Clauses, right: Clauses) -> Clauses:
    """The conjunction of two sets of alternatives."""
    if left == TRUE:
        return right
    if right == TRUE:
        return left
    found: dict[Clause, None] = {}
    for one in left:
        for other in right:
            joined = tuple(dict.fromkeys((*one, *other)))
            if not clashes(joined):
                found[joined] = None
        if len(found) > MAX_CLAUSES:
            raise TooMany
    return _reduced(list(found))


def either(parts: list[Clauses]) -> Clauses:
    """The union of several sets of alternatives."""
    found = list(dict.fromkeys(clause for part in parts for clause in part))
    if len(found) > MAX_CLAUSES:
        raise TooMany
    return _reduced(found)


def clashes(clause: Clause) -> bool:
    """Whether two atoms obviously exclude each other."""
    required = {atom[1] for atom in clause if atom[0] == "req"}
    if required and any(atom[0] == "forbid" and atom[1] in required for atom in clause):
        return True
    sets = [set(atom[1]) for atom in clause if atom[0] == "in"]
    if len(sets) > 1 and not set.intersection(*sets):
        return True
    integers = {atom[1] for atom in clause if atom[0] == "int"}
    return len(integers) > 1


def _reduced(clauses: Clauses) -> Clauses:
    """Without alternatives that another one implies."""
    if () in clauses:
        return TRUE
    if len(clauses) < 2 or len(clauses) > 128:
        return clauses
    sets = [frozenset(clause) for clause in clauses]
    return [
        clause
        for at, clause in enumerate(clauses)
        if not any(other < sets[at] or (other == sets[at] and index < at) for index, other in enumerate(sets))
    ]
