"""What a step takes: a model of its seconds, learnt from the steps that ran, and how much of a prompt fits a target.

What decodes cost is learnt from steps without prompts only, what prompts cost from what the others took beyond that.
Learnt together they feed on each other: prompts are cut by what decodes are taken to cost, so whatever grows with
time looks like the decodes' growing contexts. Owns no clock: the loop tells how long each step took.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import mul

from branchline.engine.scheduler.batch import Row, Step

# Plain lists: for five terms an array's calls cost more than its arithmetic saves.
Vector = list[float]
Matrix = list[Vector]
TERMS = 5  # constant, decode tokens, their context, prompt tokens, their context
DECODE = 3  # so many of them are of decodes
# A little of each variance: terms that never varied apart share what they explain, contexts least of it.
RIDGE = [1e-4, 1e-4, 1e-2, 1e-4, 1e-4]
MEMORY = (0.97, 0.95)  # what a new sample leaves of the older ones: decodes alone, with prompts
SLACK = 2.0  # a step with prompts may take so many times the step of its decodes alone
LEAST_TOKENS = 4  # of prompts in a step, however slow: prompts always get on
CRUMB = 16  # fewer are not worth a second prompt in a step
UNKNOWN_TOKENS = 64  # of prompts beside decodes while nothing has been learnt
WARM, SPARSE = 64, 4  # after so many samples, what was learnt is only looked at for every fourth
PROBE = 32  # after so many steps with prompts one goes without, to see what decodes cost now
GROWTH = 2  # prompts take at most so many times what they could take in the step before: a bold guess costs little
TINY = 1e-14  # of a term's own square: what rounding may leave of it
_CONTEXT = 1e-3  # contexts are counted in thousands, so that all terms are of like size


@dataclass(frozen=True, slots=True)
class Work:
    """What decides a step's time. Contexts are summed over the tokens that read them."""

    decodes: int = 0
    decode_context: int = 0
    prompts: int = 0
    prompt_context: float = 0.0

    @staticmethod
    def of(step: Step) -> Work:
        """The work of a packed step."""
        context = tokens = 0
        for row in step.rows[: step.decodes]:
            context += row.start
            tokens += row.count
        prompts, over = 0, 0.0
        for row in step.rows[step.decodes :]:
            prompts += row.count
            over += row.count * (row.start + row.count / 2)
        return Work(tokens, context, prompts, over)

    def terms(self) -> tuple[float, ...]:
        """The model's variables."""
        return (
            1.0,
            float(self.decodes),
            self.decode_context * _CONTEXT,
            float(self.prompts),
            self.prompt_context * _CONTEXT,
        )


class StepCost:
    """Seconds of a step as a non-negative linear function of its work, fitted by relative error.

    Relative, so that one step held up by another process weighs no more than any other.
    """

    def __init__(self) -> None:
        self._gram = [_zeros(), _zeros()]  # lower halves
        self._right = [[0.0] * TERMS, [0.0] * TERMS]
        self._rates = (0.0,) * TERMS
        self._new = 0  # samples that the rates do not know yet
        self.samples = [0, 0]
        self._streak = [0, 0]  # latest samples of one kind in a row
        self.granted = UNKNOWN_TOKENS  # what the latest step beside decodes had room for

    def learn(self, work: Work, seconds: float) -> None:
        """Take in one step. One that took no time, as under a still clock, says nothing."""
        if not 0.0 < seconds < math.inf:
            return
        kind = 1 if work.prompts else 0
        self.samples[kind] += 1
        self._streak = [0, self._streak[1] + 1] if kind else [self._streak[0] + 1, 0]
        if self._streak[0] > WARM and self._streak[0] % SPARSE:
            return  # decodes alone are much alike: a few of them tell enough
        row = [term / seconds for term in work.terms()]
        memory, gram, right = MEMORY[kind], self._gram[kind], self._right[kind]
        for term in range(TERMS if kind else DECODE):
            value, line = row[term], gram[term]
            right[term] = right[term] * memory + value
            for other in range(term + 1):
                line[other] = line[other] * memory + value * row[other]
        self._new += 1

    def rates(self) -> tuple[float, ...]:
        """Seconds a unit of each term."""
        if self._new >= (SPARSE if sum(self.samples) > WARM else 1):
            self._fit()
        return self._rates

    def seconds(self, work: Work) -> float:
        """What a step of this work is expected to take; 0 before anything was learnt."""
        return sum(rate * term for rate, term in zip(self.rates(), work.terms(), strict=True))

    def probe(self) -> bool:
        """Whether the next step is to have no prompts beside its decodes; true once in a streak."""
        due = self._streak[1] >= PROBE
        if due:
            self._streak[1] = 0
        return due

    def _fit(self) -> None:
        self._new = 0
        (quiet, mixed), (alone, right) = self._gram, self._right
        if not self.samples[0]:
            self._rates = tuple(_solve(mixed, right, RIDGE))
            return
        decode = _solve(quiet, alone[:DECODE], RIDGE[:DECODE])
        beyond = [
            right[term] - sum(mixed[term][known] * rate for known, rate in enumerate(decode))
            for term in range(DECODE, TERMS)
        ]
        prompts = _solve([line[DECODE:] for line in mixed[DECODE:]], beyond, RIDGE[DECODE:])
        self._rates = (*decode, *prompts)


def _zeros() -> Matrix:
    return [[0.0] * TERMS for _ in range(TERMS)]


def _solve(gram: Matrix, right: Vector, ridge: Vector) -> Vector:
    """Non-negative least squares by its normal equations, the most negative term taken out until none is.

    `gram` is symmetric; its lower half is read.
    """
    rates = [0.0] * len(right)
    active = [term for term in range(len(right)) if gram[term][term] > 0]
    while active:
        found = _cholesky(gram, right, ridge, active)
        least = min(found)
        if least >= 0:
            for term, rate in zip(active, found, strict=True):
                rates[term] = rate
            break
        del active[found.index(least)]
    return rates


def _cholesky(gram: Matrix, right: Vector, ridge: Vector, active: list[int]) -> Vector:
    """The solution for some terms; positive definite by their ridges."""
    lower: Matrix = []
    halfway: Vector = []
    for at, term in enumerate(active):
        line: Vector = []
        for before, other in enumerate(active[:at]):
            known = lower[before]
            line.append((gram[term][other] - _dot(line, known)) / known[before])
        rest = gram[term][term] * (1.0 + ridge[term]) - _dot(line, line)
        line.append(math.sqrt(max(rest, gram[term][term] * TINY)))
        lower.append(line)
        halfway.append((right[term] - _dot(line, halfway)) / line[at])
    found = [0.0] * len(active)
    for at in range(len(active) - 1, -1, -1):
        after = sum(lower[later][at] * found[later] for later in range(at + 1, len(active)))
        found[at] = (halfway[at] - after) / lower[at][at]
    return found


def _dot(one: Vector, other: Vector) -> float:
    total: float = sum(map(mul, one, other))
    return total


class Allowance:
    """What is left of one step for prompts: tokens, and seconds where others decode."""

    def __init__(self, tokens: int, seconds: float | None = None, cost: StepCost | None = None) -> None:
        self.tokens = tokens
        self._seconds = seconds
        self._cost = cost
        rates = () if cost is None else cost.rates()
        self._token, self._context = (rates[3], rates[4] * _CONTEXT) if rates else (0.0, 0.0)
        self._begun = False

    def room(self, start: int) -> int:
        """Tokens that one prompt may compute now from position `start` on; 0 if the step is full."""
        if self._seconds is None or self.tokens <= 0:
            return max(self.tokens, 0)
        fits = self._fits(start)
        if self._cost is not None and not self._begun:
            fits = self._cost.granted = min(fits, GROWTH * max(self._cost.granted, LEAST_TOKENS))
            self.tokens = min(self.tokens, max(fits, LEAST_TOKENS))
            self._cost = None  # once a step
        if self._begun:
            fits = 0 if fits < CRUMB else fits
        return min(fits if self._begun else max(fits, LEAST_TOKENS), self.tokens)

    def take(self, start: int, count: int) -> None:
        """A prompt computes `count` tokens from `start` on."""
        self.tokens -= count
        self._begun = True
        if self._seconds is not None:
            self._seconds -= count * (self._token + self._context * (start + count / 2))

    def _fits(self, start: int) -> int:
        """The largest count whose seconds are left: the positive root of its cost, which is quadratic."""
        assert self._seconds is not None, "only asked for where seconds count"
        linear = self._token + self._context * start
        half = self._context / 2
        if self._seconds <= 0:
            return 0
        if half * self._seconds < 1e-12 * linear * linear:
            return self.tokens if linear <= 0 else min(int(self._seconds / linear), self.tokens)
        root = (math.sqrt(linear * linear + 4 * half * self._seconds) - linear) / (2 * half)
        return min(int(root), self.tokens)


def allowance(cost: StepCost, rows: list[Row], tokens: int, target_s: float | None) -> Allowance:
    """What prompts may take beside the decoding `rows`. `target_s` None: SLACK times a step without prompts;
    infinite: no bound but `tokens`."""
    if not rows or target_s == math.inf:
        return Allowance(tokens)
    if cost.probe():
        return Allowance(0)
    rates = cost.rates()
    if rates[3] <= 0 and rates[4] <= 0:
        return Allowance(min(tokens, UNKNOWN_TOKENS))
    counts, starts = sum([row.count for row in rows]), sum([row.start for row in rows])
    alone = rates[0] + rates[1] * counts + rates[2] * starts * _CONTEXT
    limit = SLACK * alone if target_s is None else target_s
    return Allowance(tokens, max(limit - alone, 0.0), cost)
