"""Numbers as expressions: bounds, whole numbers, values, over decimal spelling without exponent.

Each bound is one expression; several are intersected by the caller. Exponents are written only where nothing is
asked of the number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

from branchline.engine.grammar.refusal import GrammarUnsupported
from branchline.engine.grammar.schema.atoms import Clause

NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?(?:0?[0-9]{1,2}|[12][0-9][0-9]|30[0-7]))?"
DECIMAL = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?"
WHOLE = r"-?(?:0|[1-9][0-9]*)"  # never 1.0: many readers take that for no integer
BROKEN = r"-?(?:0|[1-9][0-9]*)\.[0-9]*[1-9][0-9]*"
_FRACTION = r"(?:\.[0-9]+)?"
_ANY = r"(?:0|[1-9][0-9]*)(?:\.[0-9]+)?"
MAX_LISTED = 64
INTEGRAL = Fraction(1)


@dataclass(slots=True)
class Numbers:
    """What is asked of a number, put together. `values` None: not listed."""

    low: Fraction | None = None
    low_open: bool = False
    high: Fraction | None = None
    high_open: bool = False
    whole: bool | None = None
    step: Fraction | None = None
    not_steps: list[Fraction] = field(default_factory=list)
    values: list[Fraction] | None = None
    not_values: set[Fraction] = field(default_factory=set)

    def fits(self, value: Fraction) -> bool:
        """Whether all of it holds for the value."""
        return (
            (self.low is None or value > self.low or (value == self.low and not self.low_open))
            and (self.high is None or value < self.high or (value == self.high and not self.high_open))
            and (self.whole is None or (value.denominator == 1) is self.whole)
            and (self.step is None or (value / self.step).denominator == 1)
            and all((value / step).denominator != 1 for step in self.not_steps)
            and value not in self.not_values
        )

    @property
    def is_empty(self) -> bool:
        """Whether the bounds leave nothing."""
        if self.values is not None:
            return not self.values
        if self.low is None or self.high is None:
            return False
        if self.step is not None:
            first = math.ceil(self.low / self.step) * self.step
            if first == self.low and self.low_open:
                first += self.step
            return first > self.high or (first == self.high and self.high_open)
        return self.low > self.high or (self.low == self.high and (self.low_open or self.high_open))


def gather(clause: Clause) -> Numbers:  # noqa: C901 - one case an atom
    """The atoms of a number clause as one demand; listed if that is finite and short."""
    found = Numbers()
    listed: list[tuple[Fraction, ...]] = []
    wholes: set[bool] = set()
    for atom in clause:
        match atom:
            case ("min", bound, is_open):
                if found.low is None or bound > found.low or (bound == found.low and is_open):
                    found.low, found.low_open = bound, is_open
            case ("max", bound, is_open):
                if found.high is None or bound < found.high or (bound == found.high and is_open):
                    found.high, found.high_open = bound, is_open
            case ("int", whole):
                wholes.add(whole)
            case ("mult", step, True):
                found.step = step if found.step is None else _common(found.step, step)
            case ("mult", step, False):
                if step == INTEGRAL:
                    wholes.add(False)
                else:
                    found.not_steps.append(step)
            case ("in", values):
                listed.append(values)
            case ("notin", values):
                found.not_values.update(values)
    if found.step is not None and found.step.denominator == 1:
        wholes.add(True)
    if len(wholes) == 2:  # whole and not whole: nothing is
        found.values = []
        return found
    found.whole = next(iter(wholes), None)
    if found.whole:
        found.step = INTEGRAL if found.step is None else _common(found.step, INTEGRAL)
    if listed:
        found.values = [value for value in listed[0] if found.fits(value) and all(value in one for one in listed)]
    elif found.step is not None and found.low is not None and found.high is not None:
        first = math.ceil(found.low / found.step)
        last = math.floor(found.high / found.step)
        # Plain ranges of whole numbers have a short expression of their own.
        plain = found.step == INTEGRAL and not found.not_steps
        if last - first < MAX_LISTED and not plain:
            found.values = [value for at in range(first, last + 1) if found.fits(value := at * found.step)]
    return found


def expressions(demand: Numbers, pointer: str = "") -> tuple[list[str], list[str]]:
    """(all of these, none of these), each to match as a whole. For demands without steps other than 1."""
    if demand.not_steps:
        raise GrammarUnsupported("multipleOf", "its negation is not enforced", pointer=pointer or None)
    if demand.values is not None:
        return ["|".join(equal(value, whole=bool(demand.whole)) for value in demand.values)], []
    bounded = demand.low is not None or demand.high is not None or bool(demand.not_values)
    if demand.whole:
        base = WHOLE
    elif demand.whole is False:
        base = BROKEN
    else:
        base = DECIMAL if bounded else NUMBER
    wanted = [base]
    if demand.low is not None:
        wanted.append(at_least(demand.low, demand.low_open))
    if demand.high is not None:
        wanted.append(at_most(demand.high, demand.high_open))
    return wanted, [equal(value, every=True) for value in sorted(demand.not_values)]


def equal(value: Fraction, *, every: bool = False, whole: bool = False) -> str:
    """The spellings of one number: without exponent and, if `every`, with any number of final zeros.

    Where the schema asks for a `whole` one, without a point: many readers take 1.0 for no integer.
    """
    units, digits = _digits(abs(value))
    sign = "-" if value < 0 else "-?" if value == 0 and every else ""
    if digits:
        text = rf"{sign}{units}\.{digits}" + ("0*" if every else "")
    else:
        text = rf"{sign}{units}" + ("" if whole else r"(?:\.0+)?" if every else r"(?:\.0)?")
    if not every and not whole and len(units) > 16:
        spelled = repr(float(value))
        if "e" in spelled and Fraction(spelled) == value:
            text += "|" + spelled.replace("+", "[+]?").replace(".", r"\.")
    return f"(?:{text})"


def at_least(bound: Fraction, is_open: bool) -> str:
    """Decimals from the bound on."""
    if bound < 0:
        return f"(?:{_ANY}|-{_below(-bound, is_open)})"
    return _above(bound, is_open)


def at_most(bound: Fraction, is_open: bool) -> str:
    """Decimals up to the bound."""
    if bound < 0:
        return f"-{_above(-bound, is_open)}"
    if bound == 0 and is_open:
        return f"-{_above(Fraction(0), True)}"
    return f"(?:{_below(bound, is_open)}|-{_ANY})"


def _common(left: Fraction, right: Fraction) -> Fraction:
    return Fraction(math.lcm(left.numerator, right.numerator), math.gcd(left.denominator, right.denominator))


def _digits(value: Fraction) -> tuple[str, str]:
    """The digits before and after the point; JSON numbers always end."""
    whole, rest = divmod(value, 1)
    digits = ""
    while rest:
        digit, rest = divmod(rest * 10, 1)
        digits += str(digit)
        if len(digits) > 400:
            raise GrammarUnsupported("multipleOf", "a bound has more than 400 digits after the point")
    return str(whole), digits


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"[{low}-{high}]"


def _above(bound: Fraction, is_open: bool) -> str:
    """Magnitudes from the bound on."""
    whole, digits = _digits(bound)
    branches = [f"[1-9][0-9]{{{len(whole)},}}{_FRACTION}" if whole != "0" else f"[1-9][0-9]*{_FRACTION}"]
    if whole != "0":
        for at, char in enumerate(whole):
            if char != "9":
                branches.append(f"{whole[:at]}{_span(int(char) + 1, 9)}[0-9]{{{len(whole) - at - 1}}}{_FRACTION}")
    if not digits:
        branches.append(whole + (r"\.[0-9]*[1-9][0-9]*" if is_open else _FRACTION))
    for at, char in enumerate(digits):
        if char != "9":
            branches.append(rf"{whole}\.{digits[:at]}{_span(int(char) + 1, 9)}[0-9]*")
    if digits:
        branches.append(rf"{whole}\.{digits}" + ("[0-9]*[1-9][0-9]*" if is_open else "[0-9]*"))
    return f"(?:{'|'.join(branches)})"


def _below(bound: Fraction, is_open: bool) -> str:
    """Magnitudes up to the bound. For an open bound of 0 nothing is left."""
    whole, digits = _digits(bound)
    branches = []
    if len(whole) > 1:
        branches.append(f"(?:0|[1-9][0-9]{{0,{len(whole) - 2}}}){_FRACTION}")
    for at, char in enumerate(whole):
        least = 1 if at == 0 and len(whole) > 1 else 0
        if int(char) > least:
            branches.append(f"{whole[:at]}{_span(least, int(char) - 1)}[0-9]{{{len(whole) - at - 1}}}{_FRACTION}")
    if not digits:
        if not is_open:
            branches.append(rf"{whole}(?:\.0+)?")
    else:
        tails = [f"{digits[:at]}0*" for at in range(1, len(digits))] + ["0+"]
        tails += [f"{digits[:at]}{_span(0, int(char) - 1)}[0-9]*" for at, char in enumerate(digits) if char != "0"]
        if not is_open:
            tails.append(f"{digits}0*")
        branches.append(rf"{whole}(?:\.(?:{'|'.join(tails)}))?")
    return f"(?:{'|'.join(branches)})" if branches else "[a&&b]"
