"""Object clauses as rules: named members in the schema's order, then free ones, then what must exist somewhere.

A name stands at most once for every named member. Free names may repeat in the text; readers keep the last, so
whatever depends on free names being different is refused or placed where repeats can't undo it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from branchline.engine.grammar.refusal import GrammarUnsupported
from branchline.engine.grammar.schema import strings
from branchline.engine.grammar.schema.atoms import Clause, Literal

if TYPE_CHECKING:
    from branchline.engine.grammar.schema.build import Builder, Symbol

MAX_PATTERNS = 5
MAX_COUNT = 64


@dataclass(frozen=True, slots=True)
class Exists:
    """Some member whose name is outside these, matches, and whose value fits."""

    names: tuple[str, ...]
    patterns: tuple[str, ...]
    pattern: str | None
    name: Literal | None
    value: Literal | None


@dataclass(slots=True)
class Objects:
    """What is asked of an object."""

    values: dict[str, list[Literal]] = field(default_factory=dict)  # by name, in order
    required: set[str] = field(default_factory=set)
    forbidden: set[str] = field(default_factory=set)
    by_pattern: list[tuple[str, Literal]] = field(default_factory=list)
    others: list[tuple[tuple[str, ...], tuple[str, ...], Literal]] = field(default_factory=list)
    names: list[Literal] = field(default_factory=list)
    exists: list[Exists] = field(default_factory=list)
    least: int = 0
    most: int | None = None


def gather(clause: Clause) -> Objects:  # noqa: C901 - one case an atom
    """The atoms of an object clause as one demand."""
    found = Objects()
    for atom in clause:
        match atom:
            case ("prop", name, literal):
                found.values.setdefault(name, []).append(literal)
            case ("req", name):
                found.values.setdefault(name, [])
                found.required.add(name)
            case ("forbid", name):
                found.values.setdefault(name, [])
                found.forbidden.add(name)
            case ("patprop", pattern, literal):
                found.by_pattern.append((pattern, literal))
            case ("additional", names, patterns, literal):
                found.others.append((names, patterns, literal))
            case ("names", literal):
                found.names.append(literal)
            case ("somekey", names, patterns, pattern, literal):
                found.exists.append(Exists(names, patterns, pattern, None, literal))
            case ("badname", literal):
                found.exists.append(Exists((), (), None, literal, None))
            case ("minprops", count):
                found.least = max(found.least, count)
            case ("maxprops", count):
                found.most = count if found.most is None else min(found.most, count)
    for names, *_ in found.others:
        for name in names:
            found.values.setdefault(name, [])
    for one in found.exists:
        for name in one.names:
            found.values.setdefault(name, [])
    found.exists = list(dict.fromkeys(found.exists))
    return found


@dataclass(slots=True)
class _Free:
    """Names outside the named ones that behave alike."""

    key: str  # terminal
    inside: frozenset[str]  # patterns that they match
    value: frozenset[Literal]


def rules(build: Builder, clause: Clause) -> list[list[Symbol]]:
    """The alternatives of an object that fits the clause."""
    demand = gather(clause)
    complete(build, demand)
    return _placed(build, demand, list(demand.exists))


def _placed(build: Builder, demand: Objects, open_: list[Exists]) -> list[list[Symbol]]:
    """Each thing that must exist is a named member or the last free one."""
    if not open_ or len(open_) == 1:
        free = _Layout(build, demand, open_[0] if open_ else None).alternatives()
        if not open_:
            return free
    else:
        free = []
        if _free(build, demand):
            raise GrammarUnsupported("not", "several members with free names that must exist are not enforced")
    made = free
    first, *rest = open_
    for name in demand.values:
        if name in demand.forbidden or name in first.names:
            continue
        if first.pattern is not None and not strings.matches(build, first.pattern, "", name):
            continue
        if any(strings.matches(build, pattern, "", name) for pattern in first.patterns):
            continue
        if first.name is not None and not _names(build, frozenset({first.name}), name):
            continue
        more = [first.value] if first.value else []
        chosen = Objects(
            {key: [*one, *(more if key == name else [])] for key, one in demand.values.items()},
            demand.required | {name}, set(demand.forbidden), demand.by_pattern, demand.others, demand.names, rest,
            demand.least, demand.most,
        )  # fmt: skip
        made += _placed(build, chosen, rest)
    return made


def _names(build: Builder, literals: frozenset[Literal], name: str) -> bool:
    return strings.fits(build, name, build.logic.conjunction(literals, "string"))


def complete(build: Builder, demand: Objects) -> None:
    """Give named members what patterns and the rest ask of them; a name or value that nothing fits is forbidden."""
    for name, literals in demand.values.items():
        for pattern, literal in demand.by_pattern:
            if strings.matches(build, pattern, "", name):
                literals.append(literal)
        for names, patterns, literal in demand.others:
            if name not in names and not any(strings.matches(build, one, "", name) for one in patterns):
                literals.append(literal)
        if build.is_dead(frozenset(literals)) or (demand.names and not _names(build, frozenset(demand.names), name)):
            demand.forbidden.add(name)


def _free(build: Builder, demand: Objects, exists: Exists | None = None) -> list[_Free]:
    """The classes of free names, by the patterns they match."""
    patterns = [pattern for pattern, _ in demand.by_pattern]
    patterns += [one for _, some, _ in demand.others for one in some]
    if exists is not None:
        patterns += [*exists.patterns, *([exists.pattern] if exists.pattern is not None else [])]
    patterns = list(dict.fromkeys(patterns))
    if len(patterns) > MAX_PATTERNS:
        raise GrammarUnsupported("patternProperties", f"more than {MAX_PATTERNS} patterns on one object")
    taken = tuple(demand.values)
    found = []
    for chosen in itertools.product((True, False), repeat=len(patterns)):
        inside = frozenset(one for one, holds in zip(patterns, chosen, strict=True) if holds)
        value = {literal for pattern, literal in demand.by_pattern if pattern in inside}
        value |= {literal for _, some, literal in demand.others if not inside.intersection(some)}
        if build.is_dead(frozenset(value)):
            continue
        parts = tuple(("pattern", one, one in inside, "") for one in patterns)
        literals = set(demand.names)
        if exists is not None and exists.name is not None:
            literals.add(exists.name)
        for clause in build.logic.conjunction(frozenset(literals), "string"):
            key = strings.terminal(build, (*clause, *parts, *([("notin", taken)] if taken else [])))
            if key is not None:
                found.append(_Free(key, inside, frozenset(value)))
    return found


class _Layout:
    """Right-linear rules over (next named member, members so far)."""

    def __init__(self, build: Builder, demand: Objects, exists: Exists | None) -> None:
        self.build = build
        self.demand = demand
        self.named = [name for name in demand.values if name not in demand.forbidden]
        self.free = _merged(build, _free(build, demand))
        self.last = self._last(exists)
        self.exists = exists
        self.colon = build.colon
        required = len(demand.required)
        self.dead = bool(demand.required & demand.forbidden)
        if exists is not None:
            required += 1
        self.least = demand.least if demand.least > required else 0
        self.most = demand.most
        if self.most is not None and self.most >= len(self.named) and not self.free and exists is None:
            self.most = None
        if self.free and demand.least - required >= 2:
            raise GrammarUnsupported(
                "minProperties", "free names can't be kept from repeating, so they can't be counted"
            )
        if max(self.least, self.most or 0) > MAX_COUNT:
            keyword = "minProperties" if self.least > MAX_COUNT else "maxProperties"
            raise GrammarUnsupported(keyword, f"counts above {MAX_COUNT} are not worked with")
        self._rules: dict[tuple[int, int], Symbol] = {}

    def _last(self, exists: Exists | None) -> list[list[Symbol]]:
        if exists is None:
            return []
        found: list[list[Symbol]] = []
        for one in _free(self.build, self.demand, exists):
            if exists.pattern is not None and exists.pattern not in one.inside:
                continue
            if one.inside.intersection(exists.patterns):
                continue
            value = one.value | ({exists.value} if exists.value else set())
            if not self.build.is_dead(frozenset(value)):
                found.append([one.key, self.build.colon, self.build.state(frozenset(value))])
        return found

    def alternatives(self) -> list[list[Symbol]]:
        if self.dead or (self.exists is not None and not self.last):
            return []
        if self.most is not None and len(self.demand.required) + (self.exists is not None) > self.most:
            return []
        build = self.build
        open_, close = build.terminal('"{"'), build.terminal('"}"')
        return [[open_, *one, close] for one in self._first()]

    @property
    def _cap(self) -> int:
        """Members are counted up to here; without counts only whether there is one."""
        return max(1, self.least, self.most or 0)

    def _entry(self, name: str) -> list[Symbol]:
        build = self.build
        literals = frozenset(self.demand.values[name])
        return [build.terminal("/" + strings._quoted(name) + "/"), self.colon, build.state(literals)]

    def _first(self) -> list[list[Symbol]]:
        """The inside of the braces."""
        found: list[list[Symbol]] = []
        for index, name in enumerate(self.named):
            found.append([*self._entry(name), self._after(index + 1, 1)])
            if name in self.demand.required:
                return found
        for entry in self.free:
            found.append([*entry, self._tail(1, True)])
        if self.exists is None:
            if self.least == 0:
                found.append([])
        else:
            found += self.last if self.least <= 1 else []
        return [one for one in found if not (self.most == 0 and one)]

    def _after(self, index: int, count: int) -> Symbol:
        """What may follow when the named members before `index` are done and `count` members stand."""
        key = (index, min(count, self._cap))
        if key not in self._rules:
            made = self._rules[key] = self.build.reserve()
            self.build.later(lambda: self.build.define(made, self._follow(*key)))
        return self._rules[key]

    def _follow(self, index: int, count: int) -> list[list[Symbol]]:
        full = self.most is not None and count >= self.most
        if index == len(self.named):
            return [[self._tail(count, False)]]
        name = self.named[index]
        found: list[list[Symbol]] = []
        if not full:
            found.append([self.build.comma, *self._entry(name), self._after(index + 1, count + 1)])
        if name not in self.demand.required:
            found.append([self._after(index + 1, count)])
        return found

    def _tail(self, count: int, used: bool) -> Symbol:
        """Free members, then the one that must exist, then the end. One free member counts towards the least."""
        key = (len(self.named) + 1 + used, min(count, self._cap))
        if key in self._rules:
            return self._rules[key]
        made = self._rules[key] = self.build.reserve()
        count = key[1]
        comma = self.build.comma
        found: list[list[Symbol]] = []
        full = self.most is not None and count >= self.most
        if not full:
            counts = count + 1 if not used or self.most is not None else count
            for entry in self.free:
                found.append([comma, *entry, self._tail(counts, True)])
            if self.exists is not None and count + (not used) >= self.least:
                found += [[comma, *one] for one in self.last]
        if self.exists is None and count >= self.least:
            found.append([])
        self.build.define(made, found)
        return made


def _merged(build: Builder, classes: list[_Free]) -> list[list[Symbol]]:
    """Entries of the free classes, those of one value as one."""
    by_value: dict[frozenset[Literal], list[str]] = {}
    for one in classes:
        by_value.setdefault(one.value, []).append(one.key)
    return [
        [build.terminal(" | ".join(keys)) if len(keys) > 1 else keys[0], build.colon, build.state(value)]
        for value, keys in by_value.items()
    ]
