"""Grammar rules from conjunctions of schema literals. One rule a conjunction, so recursion ends.

Rules that derive nothing are cut, so that no prefix of the grammar leads into a dead end. Terminals are expressions
of llguidance's Lark dialect; whether one is empty is asked of its automata.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from branchline.engine.grammar.refusal import GrammarInvalid, GrammarUnsupported
from branchline.engine.grammar.schema import arrays, numbers, objects, strings
from branchline.engine.grammar.schema.atoms import KINDS, Clause, Literal
from branchline.engine.grammar.schema.document import Document
from branchline.engine.grammar.schema.logic import Cyclic, Logic
from branchline.engine.grammar.schema.probe import Probe

MAX_RULES = 20_000
MAX_TERMINALS = 10_000
MAX_STEP = 4096  # of multipleOf


@dataclass(frozen=True, slots=True)
class Repeat:
    """A rule repeated `least` to `most` times."""

    name: str
    least: int
    most: int | None


Symbol = str | Repeat


@dataclass(frozen=True, slots=True)
class SchemaOptions:
    """How a schema is read: its dialect if it names none, and whether known formats are enforced."""

    dialect: str = "2020-12"
    formats: bool = True


class Builder:
    """Rules and terminals under construction."""

    def __init__(self, document: Document, options: SchemaOptions, probe: Probe) -> None:
        self.options = options
        self.probe = probe
        self.document = document
        self.logic = Logic(document)
        self.logic.disjoint = self._disjoint
        self.rules: dict[str, list[list[Symbol]]] = {}
        self.terminals: dict[str, str] = {}  # name → definition
        self._names: dict[str, str] = {}
        self._states: dict[frozenset[Literal], str] = {}
        self._todo: list[Callable[[], None]] = []
        self._disjoint_known: dict[tuple[int, int, str], bool] = {}
        self._numbers = 0
        self.comma = self.terminal("/, ?/")
        self.colon = self.terminal("/: ?/")

    # ---- pieces -----------------------------------------------------------------------------

    def terminal(self, definition: str) -> str:
        """The name of a terminal with this definition."""
        if definition.startswith("/"):
            inner = definition[1:-1].replace("/", r"\x{2F}")
            definition = f"/{inner}/"
        name = self._names.get(definition)
        if name is None:
            name = self._names[definition] = f"T{len(self._names)}"
            self.terminals[name] = definition
            if len(self._names) > MAX_TERMINALS:
                raise GrammarUnsupported("schema", f"it needs more than {MAX_TERMINALS} terminals")
        return name

    def reserve(self) -> str:
        """A rule to be defined later."""
        self._numbers += 1
        if self._numbers > MAX_RULES:
            raise GrammarUnsupported("schema", f"it needs more than {MAX_RULES} rules")
        return f"r{self._numbers}"

    def define(self, name: Symbol, alternatives: list[list[Symbol]]) -> None:
        """Give a reserved rule its alternatives."""
        assert isinstance(name, str), "repetitions are not defined"
        self.rules[name] = alternatives

    def rule(self, alternatives: list[list[Symbol]]) -> str:
        """A new rule."""
        name = self.reserve()
        self.rules[name] = alternatives
        return name

    def repeat(self, name: str, least: int, most: int | None) -> Symbol:
        """A rule repeated."""
        return Repeat(name, least, most)

    def later(self, work: Callable[[], None]) -> None:
        """Do something before the grammar is done, without nesting calls."""
        self._todo.append(work)

    def constant(self, value: Any) -> str:
        """The terminal or rule of exactly this value."""
        return self.state(frozenset({(self.document.constant(value, "").number, True)}))

    # ---- states -----------------------------------------------------------------------------

    def state(self, literals: frozenset[Literal]) -> str:
        """The rule of the values that fit all literals."""
        literals = self._needed(literals)
        name = self._states.get(literals)
        if name is None:
            name = self._states[literals] = self.reserve()
            made = name
            self.later(lambda: self.define(made, self._alternatives(literals)))
        return name

    def is_dead(self, literals: frozenset[Literal]) -> bool:
        """Whether the literals obviously exclude each other. False says nothing."""
        nodes = self.document.nodes
        return any(
            nodes[number].verdict is (not positive)
            for number, positive in literals
            if nodes[number].verdict is not None
        ) or any((number, not positive) in literals for number, positive in literals)

    def _needed(self, literals: frozenset[Literal]) -> frozenset[Literal]:
        return frozenset(one for one in literals if self.document.nodes[one[0]].verdict is not one[1])

    def _alternatives(self, literals: frozenset[Literal]) -> list[list[Symbol]]:
        if self.is_dead(literals):
            return []
        made: list[list[Symbol]] = []
        for kind in KINDS:
            for clause in self.logic.conjunction(literals, kind):
                made += self._value(kind, clause)
        return made

    def _value(self, kind: str, clause: Clause) -> list[list[Symbol]]:
        if kind == "null":
            listed = [atom for atom in clause if atom[0] == "notin"]
            return [] if listed else [[self.terminal('"null"')]]
        if kind == "boolean":
            return [[self.terminal(f'"{json.dumps(value)}"')] for value in self._booleans(clause)]
        if kind == "number":
            made = self._number(clause)
            return [] if made is None else [[made]]
        if kind == "string":
            text = strings.terminal(self, clause)
            return [] if text is None else [[text]]
        return arrays.rules(self, clause) if kind == "array" else objects.rules(self, clause)

    def _booleans(self, clause: Clause) -> list[bool]:
        found = [True, False]
        for atom in clause:
            found = [one for one in found if (one in atom[1]) is (atom[0] == "in")]
        return found

    def _number(self, clause: Clause) -> Symbol | None:
        demand = numbers.gather(clause)
        if demand.is_empty:
            return None
        plain = demand.step is None or demand.step == numbers.INTEGRAL
        if demand.values is None and not plain:
            return self._multiple(demand)
        wanted, banned = numbers.expressions(demand)
        parts = [self.terminal(f"/{one}/") for one in wanted] + ["~" + self.terminal(f"/{one}/") for one in banned]
        made = self.terminal(" & ".join(parts)) if len(parts) > 1 else parts[0]
        if len(parts) > 1 and not self.probe.is_nonempty(made, self.terminals):
            return None
        return made

    def _multiple(self, demand: numbers.Numbers) -> Symbol | None:
        """llguidance has multiples of its own, for JSON numbers."""
        if demand.not_values or demand.not_steps or demand.whole is False:
            raise GrammarUnsupported("multipleOf", "together with excluded values it is not enforced")
        assert demand.step is not None, "the caller looked"
        whole = demand.step.denominator == 1
        if demand.step.numerator > MAX_STEP or demand.step.denominator > MAX_STEP**2:
            raise GrammarUnsupported("multipleOf", f"a step of {_plain(demand.step)} needs too large an automaton")
        schema: dict[str, Any] = {"type": "integer" if whole else "number", "multipleOf": _plain(demand.step)}
        if demand.low is not None:
            schema["exclusiveMinimum" if demand.low_open else "minimum"] = _plain(demand.low)
        if demand.high is not None:
            schema["exclusiveMaximum" if demand.high_open else "maximum"] = _plain(demand.high)
        name = f"json{len(self.probe.inline)}"
        text = f"%json {json.dumps(schema)}"
        name = self.probe.inline.setdefault(text, name)
        if not self.probe.compiles(text):
            raise GrammarUnsupported("multipleOf", f"a step of {_plain(demand.step)} with these bounds is not enforced")
        return name

    # ---- what is known of states ------------------------------------------------------------

    def listed(self, literals: frozenset[Literal], most: int = 16) -> list[Any] | None:
        """All values that fit, if they are few and simple; else None."""
        found: list[Any] = []
        for kind in KINDS:
            for clause in self.logic.conjunction(self._needed(literals), kind):
                if kind == "null":
                    values: list[Any] = [None]
                elif kind == "boolean":
                    values = list(self._booleans(clause))
                elif kind == "number":
                    demand = numbers.gather(clause)
                    if demand.values is None:
                        return None
                    values = [int(one) if one.denominator == 1 else float(one) for one in demand.values]
                elif kind == "string" and any(atom[0] == "in" for atom in clause):
                    chosen = next(atom[1] for atom in clause if atom[0] == "in")
                    values = [one for one in chosen if strings.fits(self, one, [clause])]
                else:
                    return None
                found += [one for one in values if not any(_same(one, other) for other in found)]
        return found if len(found) <= most else None

    def _disjoint(self, left: Any, right: Any, kind: str) -> bool:
        low, high = sorted((left.number, right.number))
        key = (low, high, kind)
        if key not in self._disjoint_known:
            self._disjoint_known[key] = False  # while it is being found out
            try:
                literals = frozenset({(left.number, True), (right.number, True)})
                self._disjoint_known[key] = self._surely_empty(literals, kind, 3)
            except (Cyclic, GrammarUnsupported):
                pass
        return self._disjoint_known[key]

    def _surely_empty(self, literals: frozenset[Literal], kind: str, depth: int) -> bool:
        return all(self._is_clause_dead(kind, clause, depth) for clause in self.logic.conjunction(literals, kind))

    def _is_clause_dead(self, kind: str, clause: Clause, depth: int) -> bool:
        if kind == "number":
            return numbers.gather(clause).is_empty
        if kind == "string":
            return strings.terminal(self, clause) is None
        if kind == "boolean":
            return not self._booleans(clause)
        if depth == 0 or kind in ("null", "array"):
            return False
        demand = objects.gather(clause)
        objects.complete(self, demand)
        if demand.required & demand.forbidden:
            return True
        return any(
            all(self._surely_empty(self._needed(frozenset(demand.values[name])), inner, depth - 1) for inner in KINDS)
            for name in demand.required
            if demand.values[name]
        )

    # ---- the whole --------------------------------------------------------------------------

    def finish(self, start: str) -> dict[str, list[list[Symbol]]]:
        """All rules that `start` needs and that derive something. Raises GrammarInvalid if `start` derives nothing."""
        while self._todo:
            self._todo.pop()()
        alive = self._alive()
        if start not in alive:
            raise GrammarInvalid("no value fits the schema: loosen it", pointer="")
        cut = {name: [self._kept(one, alive) for one in self.rules[name] if self._lives(one, alive)] for name in alive}
        needed: dict[str, list[list[Symbol]]] = {}
        todo = [start]
        while todo:
            name = todo.pop()
            if name in needed:
                continue
            needed[name] = cut[name]
            for alternative in cut[name]:
                for symbol in alternative:
                    inner = symbol.name if isinstance(symbol, Repeat) else symbol
                    if inner in cut and inner not in needed:
                        todo.append(inner)
        return needed

    def _alive(self) -> set[str]:
        """Rules that derive some text, by a worklist over who waits for whom."""
        alive: set[str] = set()
        waits: dict[str, list[tuple[str, int]]] = {}
        left: dict[tuple[str, int], int] = {}
        todo: list[str] = []
        for name, alternatives in self.rules.items():
            for number, alternative in enumerate(alternatives):
                inner = {_needs(symbol) for symbol in alternative} - {None}
                pending = [one for one in inner if one in self.rules]
                left[name, number] = len(pending)
                for one in pending:
                    waits.setdefault(one, []).append((name, number))
                if not pending and name not in alive:
                    alive.add(name)
                    todo.append(name)
        while todo:
            for name, number in waits.get(todo.pop(), ()):
                left[name, number] -= 1
                if left[name, number] == 0 and name not in alive:
                    alive.add(name)
                    todo.append(name)
        return alive

    def _lives(self, alternative: list[Symbol], alive: set[str]) -> bool:
        return all(needed is None or needed not in self.rules or needed in alive for needed in map(_needs, alternative))

    def _kept(self, alternative: list[Symbol], alive: set[str]) -> list[Symbol]:
        return [one for one in alternative if not (isinstance(one, Repeat) and one.name not in alive)]


def _needs(symbol: Symbol) -> str | None:
    if isinstance(symbol, Repeat):
        return symbol.name if symbol.least else None
    return symbol


def _plain(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)


def _same(left: Any, right: Any) -> bool:
    return type(left) is type(right) and bool(left == right)
