"""What is learnt while running: how often guesses are right, and what a step of so many tokens costs.

Pure arithmetic on what it is told; reads no clock.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

PRIOR_WEIGHT = 2.0  # how many guesses the common rate counts in one sequence's
MEMORY = 0.9  # what an older guess keeps of its weight, a sequence
COMMON_MEMORY = 0.99
FIRST_RATE = 0.5
MARGINAL = 0.12  # of a step of one token, what each further one is taken to cost until it is measured
TRUSTED = 3  # samples from which a measured cost stands by itself
REVISIT = 256  # steps after which costs that were not seen again lose half their weight
EXACT = 64  # token counts up to here are told apart


@dataclass(slots=True)
class Rate:
    """Share of guesses that were right, as decaying counts."""

    right: float = 0.0
    wrong: float = 0.0

    def add(self, right: int, wrong: bool, memory: float) -> None:
        """`right` guesses in a row, then perhaps a wrong one."""
        self.right = self.right * memory + right
        self.wrong = self.wrong * memory + wrong

    def value(self, prior: float, weight: float = PRIOR_WEIGHT) -> float:
        """The rate, pulled to `prior`; below 1."""
        return min((self.right + weight * prior) / (self.right + self.wrong + weight), 0.995)


@dataclass(slots=True)
class Rates:
    """Rates of one sequence by kind of guess, over those common to all sequences."""

    common: dict[str, Rate]
    own: dict[str, Rate] = field(default_factory=dict)

    def of(self, kind: str) -> float:
        """Probability that the next guess of this kind is right."""
        shared = self.common.get(kind)
        prior = FIRST_RATE if shared is None else shared.value(FIRST_RATE)
        mine = self.own.get(kind)
        return prior if mine is None else mine.value(prior)

    def add(self, kind: str, right: int, wrong: bool) -> None:
        """Count what a proposal came to."""
        self.own.setdefault(kind, Rate()).add(right, wrong, MEMORY)
        self.common.setdefault(kind, Rate()).add(right, wrong, COMMON_MEMORY)


@dataclass(slots=True)
class _Sample:
    ms: float
    count: float
    seen: int


class StepCosts:
    """Milliseconds of a step by its number of tokens, learnt from steps that only decode."""

    def __init__(self) -> None:
        self._samples: dict[int, _Sample] = {}
        self._keys: list[int] = []
        self._steps = 0
        self._cache: dict[int, float] = {}

    def observe(self, tokens: int, ms: float) -> None:
        """One step took so long. Stalls of the machine count at most three times the expected."""
        self._steps += 1
        key = _bucket(tokens)
        sample = self._samples.get(key)
        if sample is None:
            self._samples[key] = _Sample(ms, 1.0, self._steps)
            self._keys = sorted(self._samples)
        else:
            ms = min(ms, 3.0 * sample.ms)
            weight = max(1.0 / (sample.count + 1.0), 0.1)
            sample.ms += (ms - sample.ms) * weight
            sample.count += 1.0
            sample.seen = self._steps
        if self._steps % REVISIT == 0:
            for other in self._samples.values():
                if self._steps - other.seen >= REVISIT:
                    other.count *= 0.5
        self._cache.clear()

    @property
    def known(self) -> bool:
        """Whether any step was measured."""
        return bool(self._samples)

    def at(self, tokens: int) -> float:
        """Expected milliseconds of a step of so many tokens; 0 before the first measurement."""
        known = self._cache.get(tokens)
        if known is None:
            known = self._cache[tokens] = self._expected(tokens)
        return known

    def _expected(self, tokens: int) -> float:
        if not self._keys:
            return 0.0
        key = _bucket(tokens)
        sample = self._samples.get(key)
        if sample is None:
            return self._between(tokens, key)
        if sample.count >= TRUSTED or len(self._keys) == 1:
            return sample.ms
        share = sample.count / TRUSTED
        return sample.ms * share + self._between(tokens, key) * (1.0 - share)

    def _between(self, tokens: int, key: int) -> float:
        """From the nearest measured counts on both sides, else one side's by the assumed shape."""
        place = bisect_left(self._keys, key)
        below = self._keys[place - 1] if place else None
        after = place + 1 if place < len(self._keys) and self._keys[place] == key else place
        above = self._keys[after] if after < len(self._keys) else None
        if below is not None and above is not None:
            low, high = self._samples[below].ms, self._samples[above].ms
            return low + (high - low) * (key - below) / (above - below)
        near = below if below is not None else above
        assert near is not None, "there is a measured count"
        return self._samples[near].ms * _shape(tokens) / _shape(near)


def _bucket(tokens: int) -> int:
    return tokens if tokens <= EXACT else -(-tokens // 16) * 16


def _shape(tokens: int) -> float:
    return 1.0 + MARGINAL * (tokens - 1)
