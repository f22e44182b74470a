"""Array clauses as rules: elements by position, counts, `contains` by counting states, uniqueness over few values."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from branchline.engine.grammar.refusal import GrammarUnsupported
from branchline.engine.grammar.schema.atoms import Clause, Literal

if TYPE_CHECKING:
    from branchline.engine.grammar.schema.build import Builder, Symbol

MAX_STATES = 2000
MAX_CONTAINS = 3
MAX_DISTINCT = 6
State = tuple[int, tuple[int, ...]]


@dataclass(slots=True)
class Arrays:
    """What is asked of an array."""

    items: dict[int, list[Literal]] = field(default_factory=dict)
    rests: list[tuple[int, Literal]] = field(default_factory=list)
    contains: list[tuple[int, Literal, int, int | None]] = field(default_factory=list)
    least: int = 0
    most: int | None = None
    unique: str | None = None

    def at(self, index: int) -> frozenset[Literal]:
        """What the element at `index` must fit."""
        return frozenset(self.items.get(index, [])) | {one for start, one in self.rests if start <= index}

    @property
    def settled(self) -> int:
        """From this index on all elements are alike."""
        starts = [index + 1 for index in self.items] + [start for start, _ in self.rests]
        starts += [start for start, *_ in self.contains]
        return max(starts, default=0)


def gather(clause: Clause) -> Arrays:
    """The atoms of an array clause as one demand."""
    found = Arrays()
    for atom in clause:
        match atom:
            case ("item", index, literal):
                found.items.setdefault(index, []).append(literal)
            case ("rest", start, literal):
                found.rests.append((start, literal))
            case ("contains", start, literal, least, most):
                found.contains.append((start, literal, least, most))
            case ("minitems", count):
                found.least = max(found.least, count)
            case ("maxitems", count):
                found.most = count if found.most is None else min(found.most, count)
            case ("unique", pointer):
                found.unique = pointer
            case ("repeats", pointer):
                raise GrammarUnsupported("uniqueItems", "its negation is not enforced", pointer=pointer)
    found.contains = list(dict.fromkeys(found.contains))
    return found


def rules(build: Builder, clause: Clause) -> list[list[Symbol]]:
    """The alternatives of an array that fits the clause."""
    demand = gather(clause)
    _cut(build, demand)
    if demand.most is not None and demand.least > demand.most:
        return []
    if demand.unique is not None and (demand.most is None or demand.most > 1):
        return _unique(build, demand)
    if demand.contains:
        return _counted(build, demand)
    return _plain(build, demand)


def _cut(build: Builder, demand: Arrays) -> None:
    """An element that nothing fits bounds the length."""
    for index in range(demand.settled + 1):
        if build.is_dead(demand.at(index)):
            demand.most = index if demand.most is None else min(demand.most, index)
            return


def _plain(build: Builder, demand: Arrays) -> list[list[Symbol]]:
    open_, close, comma = build.terminal('"["'), build.terminal('"]"'), build.comma
    settled = demand.settled if demand.most is None else min(demand.settled, demand.most)
    made: list[list[Symbol]] = []
    if demand.least == 0:
        made.append([open_, close])
    if demand.most == 0:
        return made
    chain: Symbol | None = None  # what may follow the first `settled` elements
    first = max(settled, 1)
    if demand.most is None or demand.most > first:
        tail = build.rule([[comma, build.state(demand.at(first))]])
        high = None if demand.most is None else demand.most - first
        chain = build.repeat(tail, max(demand.least - first, 0), high)
    follow = chain
    for index in range(first - 1, 0, -1):
        alternatives: list[list[Symbol]] = [[comma, build.state(demand.at(index)), *([follow] if follow else [])]]
        if index >= demand.least:
            alternatives.append([])
        follow = build.rule(alternatives)
    made.append([open_, build.state(demand.at(0)), *([follow] if follow else []), close])
    return made


def _counted(build: Builder, demand: Arrays) -> list[list[Symbol]]:  # noqa: C901 - three small steps in one place
    contains = demand.contains
    if len(contains) > MAX_CONTAINS:
        raise GrammarUnsupported("contains", f"more than {MAX_CONTAINS} counts at once are not worked with")
    bound = max(demand.settled, demand.least, demand.most or 0)
    caps = [least if most is None else most + 1 for _, _, least, most in contains]
    size = bound + 1
    for cap in caps:
        size *= cap + 1
    if size > MAX_STATES:
        raise GrammarUnsupported("contains", "its counts need more states than are worked with")
    comma, close = build.comma, build.terminal('"]"')
    names: dict[State, Symbol] = {}
    todo: list[State] = []

    def name(state: State) -> Symbol:
        if state not in names:
            names[state] = build.reserve()
            todo.append(state)
        return names[state]

    def steps(state: State) -> list[tuple[Symbol, State]]:
        index, counts = state
        if demand.most is not None and index >= demand.most:
            return []
        live = [number for number, (start, *_) in enumerate(contains) if start <= index]
        found: list[tuple[Symbol, State]] = []
        for chosen in itertools.product((True, False), repeat=len(live)):
            literals = set(demand.at(index))
            after = list(counts)
            for number, holds in zip(live, chosen, strict=True):
                _, (node, positive), _, most = contains[number]
                literals.add((node, positive is holds))
                after[number] = min(after[number] + holds, caps[number])
                if most is not None and after[number] > most:
                    break
            else:
                if not build.is_dead(frozenset(literals)):
                    found.append((build.state(frozenset(literals)), (min(index + 1, bound), tuple(after))))
        return found

    def ends(state: State) -> bool:
        index, counts = state
        return index >= demand.least and all(
            count >= least for count, (_, _, least, _) in zip(counts, contains, strict=True)
        )

    start: State = (0, (0,) * len(contains))
    made: list[list[Symbol]] = [[build.terminal('"["'), close]] if ends(start) else []
    for value, state in steps(start):
        made.append([build.terminal('"["'), value, name(state), close])
    while todo:
        state = todo.pop()
        alternatives: list[list[Symbol]] = [[comma, value, name(after)] for value, after in steps(state)]
        if ends(state):
            alternatives.append([])
        build.define(names[state], alternatives)
    return made


def _unique(build: Builder, demand: Arrays) -> list[list[Symbol]]:
    """Over a few values: which were used is part of the state."""
    refusal = GrammarUnsupported(
        "uniqueItems",
        f"only arrays of at most {MAX_DISTINCT} possible simple values are kept without repeats",
        pointer=demand.unique,
    )
    if demand.contains:
        raise refusal
    pools: list[list[Any]] = []
    for index in range(demand.settled + 1):
        pool = build.listed(demand.at(index))
        if pool is None:
            raise refusal
        pools.append(pool)
    values = _distinct(pools)
    if len(values) > MAX_DISTINCT:
        raise refusal
    comma, close = build.comma, build.terminal('"]"')
    names: dict[tuple[int, frozenset[int]], Symbol] = {}

    def name(index: int, used: frozenset[int]) -> Symbol:
        key = (index, used)
        if key not in names:
            made = names[key] = build.reserve()
            build.define(made, follow(index, used, [comma]))
        return names[key]

    def follow(index: int, used: frozenset[int], before: list[Symbol]) -> list[list[Symbol]]:
        found: list[list[Symbol]] = [[]] if index >= demand.least and before else []
        if demand.most is None or index < demand.most:
            pool = pools[min(index, demand.settled)]
            for number, value in enumerate(values):
                if number not in used and _among(value, pool):
                    found.append([*before, build.constant(value), name(index + 1, used | {number})])
        return found

    made: list[list[Symbol]] = [[build.terminal('"["'), close]] if demand.least == 0 else []
    made += [[build.terminal('"["'), *one, close] for one in follow(0, frozenset(), [])]
    return made


def _among(value: Any, pool: list[Any]) -> bool:
    """Membership as JSON has it: true is not 1."""
    return any(type(value) is type(one) and value == one for one in pool)


def _distinct(pools: list[list[Any]]) -> list[Any]:
    found: list[Any] = []
    for value in itertools.chain.from_iterable(pools):
        if not _among(value, found):
            found.append(value)
    return found
