"""A deterministic model that fits in a page of code: a real Executor whose answers betray any wrong page.

The "KV" of a token is a hash of (token, position, everything before it); a row's state is the sum of its
context's KV as read back through the page table, and its logits are hashes of the state. So a wrong table,
a page shared under another prefix, or one overwritten too early changes every later token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from branchline.engine.types import ForwardBatch, PageMove, RowPlan, RowResult, SamplingParams

MASK = (1 << 64) - 1
VOCAB = 96


def mix(*values: int) -> int:
    """64-bit hash of integers (splitmix64 finaliser, chained)."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state ^ (value & MASK)) * 0xBF58476D1CE4E5B9 & MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & MASK
        state ^= state >> 31
    return state


def logits_of(state: int, vocab_size: int) -> npt.NDArray[np.float64]:
    """[vocab_size] pseudo-random logits in [0, 8)."""
    ids = np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = (ids ^ np.uint64(state)) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (bits >> np.uint64(40)).astype(np.float64) / (1 << 24) * 8.0


@dataclass
class Counts:
    """Penalty state: how often each id occurs."""

    prompt: frozenset[int]
    output: dict[int, int] = field(default_factory=dict)


class TinyExecutor:
    """Executor over a [slots] array of hashes. `faults` maps a step number to what `run` raises then."""

    api_version = 1
    numerics_id = "tiny-1"

    def __init__(self, num_pages: int, page_size: int, vocab_size: int = VOCAB) -> None:
        self.vocab_size = vocab_size
        self.num_pages = num_pages
        self.page_size = page_size
        self.kv = np.zeros(num_pages * page_size, dtype=np.uint64)
        self.steps = 0
        self.computed_tokens = 0
        self.widest = 0  # most tokens in one step
        self.faults: dict[int, Exception] = {}
        self.poison: set[int] = set()  # a step with one of these tokens raises, whoever else is in it
        self.lost = False  # every step raises
        self.broken_tokens: set[int] = set()  # rows of contexts that end in these have NaN logits
        self.closed = False
        self.host = np.zeros((0, page_size), dtype=np.uint64)
        self.adapters: set[int] = set()

    def run(self, batch: ForwardBatch) -> list[npt.NDArray[np.float64]]:
        """See Executor."""
        self.steps += 1
        fault = self.faults.pop(self.steps, None)
        if fault is not None:
            self.kv[batch.slots] = 0xDEAD
            raise fault
        if self.lost or self.poison.intersection(batch.token_ids.tolist()):
            self.kv[batch.slots] = 0xDEAD
            raise RuntimeError("device lost" if self.lost else "poisoned kernel")
        self.computed_tokens += len(batch.token_ids)
        self.widest = max(self.widest, len(batch.token_ids))
        assert len(set(batch.slots.tolist())) == len(batch.slots), "two tokens in one slot"
        states: list[int] = []
        offset = 0
        numbers = batch.adapters or [0] * len(batch.page_tables)
        assert self.adapters.issuperset({*numbers} - {0}), "a row names an adapter that is not loaded"
        for count, length, table, number in zip(
            batch.query_lens.tolist(), batch.context_lens.tolist(), batch.page_tables, numbers, strict=True
        ):
            states.extend(self._sequence(batch, offset, count, length, table, number))
            offset += count
        wanted = batch.logit_rows.tolist()
        assert wanted == sorted(set(wanted)), "logit rows must rise"
        rows = [logits_of(states[at], self.vocab_size) for at in wanted]
        for row, at in zip(rows, wanted, strict=True):
            if int(batch.token_ids[at]) in self.broken_tokens:
                row[:] = np.nan
        return rows

    def _sequence(
        self, batch: ForwardBatch, offset: int, count: int, length: int, table: list[int], adapter: int
    ) -> list[int]:
        size = self.page_size
        assert length <= len(table) * size, "the page table is too short"
        place = [table[at // size] * size + at % size for at in range(length)]
        start = length - count
        assert batch.positions[offset : offset + count].tolist() == list(range(start, length))
        assert batch.slots[offset : offset + count].tolist() == place[start:]
        state = int(np.add.reduce(self.kv[place[:start]])) & MASK if start else 0
        states = []
        for at in range(count):
            value = mix(int(batch.token_ids[offset + at]), start + at, state, *([adapter] if adapter else []))
            self.kv[place[start + at]] = value
            state = (state + value) & MASK
            states.append(state)
        return states

    def sample(self, logits: list[npt.NDArray[np.float64]], plans: list[RowPlan]) -> list[RowResult]:
        """See Executor."""
        return [self._answer(logits[plan.row], plan) for plan in plans]

    def _answer(self, raw: npt.NDArray[np.float64], plan: RowPlan) -> RowResult:
        if np.isnan(raw).any():
            return RowResult(0, error="the logits hold NaN")
        logprobs = raw - (raw.max() + np.log(np.exp(raw - raw.max()).sum()))
        token = plan.target if plan.target is not None else self._choose(raw.copy(), plan)
        top = np.argsort(-logprobs, kind="stable")[: plan.top_k].tolist()
        return RowResult(
            token,
            float(logprobs[token]) if plan.want_logprob else None,
            [(item, float(logprobs[item])) for item in top] if plan.top_k else None,
            [(item, float(logprobs[item])) for item in plan.chosen_ids] if plan.chosen_ids else None,
        )

    def _choose(self, scores: npt.NDArray[np.float64], plan: RowPlan) -> int:
        params = plan.params
        if isinstance(plan.penalties, Counts):
            counts = dict(plan.penalties.output)
            for token in plan.ahead:
                counts[token] = counts.get(token, 0) + 1
            for token, count in counts.items():
                scores[token] -= params.presence_penalty + params.frequency_penalty * count
        for token, bias in params.logit_bias:
            scores[token] += bias
        scores[list(plan.banned)] = -np.inf
        if plan.mask is not None:
            bits = np.unpackbits(plan.mask.view(np.uint8), bitorder="little")[: self.vocab_size]
            scores[bits == 0] = -np.inf
        if params.temperature > 0:
            noise = logits_of(mix(plan.seed, plan.position), self.vocab_size) / 8.0
            scores = scores / params.temperature - np.log(-np.log(noise * 0.999998 + 1e-6))
        return int(scores.argmax())

    def penalty_state(self, prompt: tuple[int, ...], params: SamplingParams) -> Counts | None:
        """See Executor."""
        if params.frequency_penalty or params.presence_penalty:
            return Counts(frozenset(prompt))
        return None

    def observe(self, state: object, token_id: int) -> None:
        """See Executor."""
        assert isinstance(state, Counts)
        state.output[token_id] = state.output.get(token_id, 0) + 1

    def load_adapter(self, number: int, adapter: object) -> None:
        """See AdapterExecutor. Its weights are its number."""
        self.adapters.add(number)

    def unload_adapter(self, number: int) -> None:
        """See AdapterExecutor."""
        self.adapters.discard(number)

    @property
    def page_bytes(self) -> int:
        """See HostExecutor."""
        return 8 * self.page_size

    def reserve_host(self, slots: int) -> None:
        """See HostExecutor."""
        self.host = np.zeros((slots, self.page_size), dtype=np.uint64)

    def move_pages(self, moves: Sequence[PageMove]) -> None:
        """See HostExecutor. A device page that was copied out is spoilt, so that nobody lives off it."""
        for store, page, slot in moves:
            there = slice(page * self.page_size, (page + 1) * self.page_size)
            if store:
                self.host[slot] = self.kv[there]
                self.kv[there] = 0xBAD
            else:
                self.kv[there] = self.host[slot]
                self.host[slot] = 0xBAD

    def read_pages(self, pages: Sequence[int]) -> bytes:
        """See PageExecutor."""
        size = self.page_size
        return b"".join(self.kv[page * size : (page + 1) * size].tobytes() for page in pages)

    def write_pages(self, pages: Sequence[int], data: bytes | memoryview) -> None:
        """See PageExecutor."""
        size = self.page_size
        values = np.frombuffer(data, dtype=np.uint64).reshape(len(pages), size)
        for page, row in zip(pages, values, strict=True):
            self.kv[page * size : (page + 1) * size] = row

    def close(self) -> None:
        """See Executor."""
        self.closed = True


def expected(prompt: list[int], count: int, vocab_size: int = VOCAB) -> list[int]:
    """Greedy continuation of a prompt, computed without pages, steps or cache."""
    state, tokens = 0, list(prompt)
    for position in range(len(prompt) + count - 1):
        state = (state + mix(tokens[position], position, state)) & MASK
        if position >= len(prompt) - 1:
            tokens.append(int(logits_of(state, vocab_size).argmax()))
    return tokens[len(prompt) :]
