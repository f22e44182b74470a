"""What a step takes: a model of its seconds, learnt from the steps that ran, and how much of a prompt fits a target.

What decodes cost is learnt from steps without prompts only, what prompts cost from what the others took beyond that.
Learnt together they feed on each other: prompts are cut by what decodes are taken to cost, so whatever grows with
time looks like the decodes' growing contexts. Owns no clock: the loop tells how long each step took.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from branchline.engine.scheduler.batch import Row, Step

Rates = npt.NDArray[np.float64]
TERMS = 5  # constant, decode tokens, their context, prompt tokens, their context
DECODE = 3  # so many of them are of decodes
# A little of each variance: terms that never varied apart share what they explain, contexts least of it.
RIDGE = np.array([1e-4, 1e-4, 1e-2, 1e-4, 1e-4])
MEMORY = (0.97, 0.95)  # what a new sample leaves of the older ones: decodes alone, with prompts
SLACK = 2.0  # a step with prompts may take so many times the step of its decodes alone
LEAST_TOKENS = 4  # of prompts in a step, however slow: prompts always get on
CRUMB = 16  # fewer are not worth a second prompt in a step
UNKNOWN_TOKENS = 64  # of prompts beside decodes while nothing has been learnt
WARM, SPARSE = 64, 4  # after so many samples, what was learnt is only looked at for every fourth
PROBE = 32  # after so many steps with prompts one goes without, to see what decodes cost now
GROWTH = 2  # prompts take at most so many times what they could take in the step before: a bold guess costs little
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
        context = sum(row.start for row in step.rows[: step.decodes])
        tokens = sum(row.count for row in step.rows[: step.decodes])
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
        self._gram = [np.zeros((TERMS, TERMS)), np.zeros((TERMS, TERMS))]
        self._right = [np.zeros(TERMS), np.zeros(TERMS)]
        self._rates = np.zeros(TERMS)
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
        row = np.array(work.terms()) / seconds
        self._gram[kind] *= MEMORY[kind]
        self._gram[kind] += np.outer(row, row)
        self._right[kind] *= MEMORY[kind]
        self._right[kind] += row
        self._new += 1

    def rates(self) -> tuple[float, ...]:
        """Seconds a unit of each term."""
        if self._new >= (SPARSE if sum(self.samples) > WARM else 1):
            self._fit()
        return tuple(float(rate) for rate in self._rates)

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
            self._rates = _solve(mixed, right, RIDGE)
            return
        decode = _solve(quiet[:DECODE, :DECODE], alone[:DECODE], RIDGE[:DECODE])
        beyond = right[DECODE:] - mixed[DECODE:, :DECODE] @ decode
        prompts = _solve(mixed[DECODE:, DECODE:], beyond, RIDGE[DECODE:])
        self._rates = np.concatenate([decode, prompts])


def _solve(gram: Rates, right: Rates, ridge: Rates) -> Rates:
    """Non-negative least squares by its normal equations, the most negative term taken out until none is."""
    rates = np.zeros(len(right))
    active = [term for term in range(len(right)) if gram[term, term] > 0]
    while active:
        part = gram[np.ix_(active, active)]
        found = np.linalg.solve(part + np.diag(np.diag(part) * ridge[active]), right[active])
        if found.min() >= 0:
            rates[active] = found
            break
        del active[int(found.argmin())]
    return rates


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
    alone = cost.seconds(Work(sum(row.count for row in rows), sum(row.start for row in rows)))
    limit = SLACK * alone if target_s is None else target_s
    return Allowance(tokens, max(limit - alone, 0.0), cost)
