"""Values that cross the engine's inner borders: service → loop → scheduler → executor → loop.

Plain data only: no torch, no gRPC. The service makes `Request`s from proto messages, the scheduler
turns them into `ForwardBatch`es and `RowPlan`s, the executor answers with `RowResult`s, and the loop
answers the service with `Delta`s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


class FinishReason(StrEnum):
    """Why a sequence ended; see FinishReason in engine.proto."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Resolved sampling options of one request; ranges as in engine.proto, already validated."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class LogprobParams:
    """Which logprobs are wanted; `input_start` None means no prompt logprobs."""

    output: bool = False
    top_k: int = 0
    input_start: int | None = None
    token_ids: tuple[int, ...] = ()


class LeaseState(StrEnum):
    """How a request found its lease; see LeaseState in engine.proto."""

    HELD = "held"
    LOST = "lost"
    UNMATCHED = "unmatched"


@dataclass(frozen=True, slots=True)
class LeaseAsk:
    """A lease to take (`ttl_ms` set) or to hit (`lease_id`); `tenant` is whose it is."""

    tenant: str = ""
    lease_id: str = ""
    ttl_ms: int | None = None


class GrammarKind(StrEnum):
    """Forms of a constraint; see Grammar in engine.proto."""

    JSON = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class ReasoningAsk:
    """The block of reasoning before a constrained text: its marks, whether an output begins inside it unless its
    prompt has closed it, and the most tokens it may have, marks included."""

    begin: str
    end: str
    implicit: bool = False
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class GrammarAsk:
    """A constraint as asked for: its form, its source, and a backend's name or empty for the worker's choice.

    `tenant` is whose budget of compiled constraints it counts against. With `best_effort` what can't be enforced
    exactly is checked afterwards; with `report` the finish tells how it was enforced.
    """

    kind: GrammarKind
    text: str
    backend: str = ""
    tenant: str = ""
    reasoning: ReasoningAsk | None = None
    best_effort: bool = False
    report: bool = False


@dataclass(frozen=True, slots=True)
class LeaseReport:
    """What became of a request's lease; the other fields are set if it was acquired by this request."""

    state: LeaseState
    lease_id: str = ""
    tokens: int = 0
    pages: int = 0
    ttl_ms: int = 0


@dataclass(frozen=True, slots=True)
class Resume:
    """A sequence that another worker began: its output so far, and bytes of text that its reader has."""

    token_ids: tuple[int, ...]
    text_bytes: int
    index: int  # which of the request's n sequences: the seed of its child is drawn from


@dataclass(frozen=True, slots=True)
class HandoverAsk:
    """One half of a request whose prompt and output are computed by two workers; see Disaggregation in engine.proto."""

    prefill: bool  # else the half that pulls and decodes
    room: int
    host: str = ""  # of the prefill half, for the other one
    port: int = 0


class AdapterUse(Protocol):
    """A loaded adapter as a request has it: it stays loaded while it is held. Any thread."""

    @property
    def number(self) -> int:
        """What the executor knows it by; above 0."""

    def hold(self) -> None:
        """A request begins to live. Raises NotFound if it was freed meanwhile."""

    def let_go(self) -> None:
        """It has ended."""


@dataclass(frozen=True, slots=True)
class Request:
    """One accepted prompt.

    `namespace` is an injective encoding of salt, extra key, adapter and weight version: requests share
    cached pages only if it is equal. `deadline_s` is on `time.monotonic()`'s scale. Of `priority` higher goes first.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    logprobs: LogprobParams = LogprobParams()
    namespace: bytes = b""
    deadline_s: float | None = None
    arrival_s: float = 0.0
    lease: LeaseAsk | None = None
    resume: Resume | None = None
    priority: int = 0
    traceparent: str = ""
    grammar: GrammarAsk | None = None
    handover: HandoverAsk | None = None
    adapter: AdapterUse | None = None


@dataclass(slots=True)
class ForwardBatch:
    """One step's rows, flattened. T new tokens in B sequences; decode rows are sequences with one new token.

    Sequences are independent: row order carries no meaning. KV of every new token is written before
    attention reads it, so token i of a sequence attends to positions 0..position(i).
    """

    token_ids: I32  # [T]
    positions: I32  # [T] absolute position of each new token in its sequence
    slots: I64  # [T] page * page_size + offset: where its KV goes
    query_lens: I32  # [B] new tokens of each sequence, ≥ 1, in the order of token_ids
    context_lens: I32  # [B] KV length of each sequence after this step
    page_tables: list[list[int]]  # B lists of at least ceil(context_len / page_size) page numbers
    logit_rows: I64  # [R] indices into [0, T) whose logits are wanted, ascending
    ahead: I32 | None = None  # [T] plan of the step before whose token this is, not known to the host; −1: token_ids
    adapters: list[int] | None = None  # B numbers of loaded adapters, 0 for the base model; None: all of them 0


@dataclass(slots=True)
class RowPlan:
    """What to do with one wanted logits row: sample the next token, or score a known one.

    `row` indexes ForwardBatch.logit_rows. For a sampled row `position` is the absolute position the new
    token will take: random numbers are keyed by (seed, position) only. `penalties` is the sequence's
    own state object made by the executor (see Executor.penalty_state); None if no penalty applies.
    `ahead` are guessed tokens before this row that the penalties have not observed yet: they count as generated.
    `banned` ids get −inf (end ids before min_tokens), and so does what `mask` forbids: int32 [ceil(vocab / 32)], bit
    t % 32 of word t // 32 set where token t is allowed. For a scored row `target` is the known next token.
    """

    row: int
    params: SamplingParams
    seed: int = 0
    position: int = 0
    penalties: object | None = None
    banned: tuple[int, ...] = ()
    target: int | None = None
    want_logprob: bool = False
    top_k: int = 0
    chosen_ids: tuple[int, ...] = ()
    ahead: tuple[int, ...] = ()
    mask: I32 | None = None


@dataclass(slots=True)
class RowResult:
    """Outcome of one RowPlan. Logprobs are of the raw distribution (temperature 1, no penalties, no bias).

    `error` is set when the row could not be used (NaN logits): only its own request fails.
    """

    token_id: int
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None
    chosen: list[tuple[int, float]] | None = None
    error: str | None = None


class Executor(Protocol):
    """Runs the model. One thread calls it; `run` may keep buffers until the next `run`.

    `logits` is opaque to callers and valid until the next `run`.
    """

    api_version: int
    vocab_size: int
    num_pages: int
    page_size: int
    numerics_id: str

    def run(self, batch: ForwardBatch) -> object:
        """Write KV of all new tokens and return the logits of `batch.logit_rows`."""

    def sample(self, logits: object, plans: list[RowPlan]) -> list[RowResult]:
        """Answer each plan, in order. Never raises for the fault of one row: RowResult.error instead."""

    def penalty_state(self, prompt: tuple[int, ...], params: SamplingParams) -> object | None:
        """State for a sequence's penalties, or None if `params` has none."""

    def observe(self, state: object, token_id: int) -> None:
        """Count one generated token in a penalty state."""

    def close(self) -> None:
        """Release memory and threads; idempotent."""


PageMove: TypeAlias = tuple[bool, int, int]
"""(True, page, slot): keys and values of a page go to a host slot; (False, page, slot): they come back."""


@runtime_checkable
class HostExecutor(Protocol):
    """What an executor offers besides `Executor` if it has a host-memory tier. Called by the same thread."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page's keys and values, all layers together."""

    def reserve_host(self, slots: int) -> None:
        """Reserve host memory for so many pages. Called once, before any run. Raises LoadError."""

    def move_pages(self, moves: Sequence[PageMove]) -> None:
        """Copy in this order, so that the next `run` sees it done."""


@runtime_checkable
class QueueExecutor(Executor, Protocol):
    """What an executor offers besides `Executor` if a step can be queued before the one before is done.

    Steps are done in the order of `launch`, and whatever else the executor does in between takes its place among them.
    At most two are in flight. `batch.ahead` names tokens of the step launched just before, guesses apart.
    """

    def launch(self, batch: ForwardBatch, plans: list[RowPlan]) -> object:
        """Queue `run` and `sample` of a step, and wait for nothing."""

    def collect(self, flight: object) -> list[RowResult]:
        """Wait for a launched step; what `sample` would have answered. In the order of launches, once each."""


@runtime_checkable
class PageExecutor(Executor, Protocol):
    """What an executor offers besides `Executor` if its pages can go to another process. Called by the same thread."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page's keys and values, all layers together."""

    def read_pages(self, pages: Sequence[int]) -> bytes:
        """The bytes of these pages, one after the other, as the latest `run` left them."""

    def write_pages(self, pages: Sequence[int], data: bytes | memoryview) -> None:
        """Fill these pages from what `read_pages` of an executor of the same `numerics_id` and page size gave."""


@dataclass(slots=True)
class PositionLogprobs:
    """Logprobs of consecutive positions in columns; NaN where none exists."""

    start: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    chosen: list[list[tuple[int, float]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class GrammarReport:
    """How a constraint was enforced: see the contract's message of this name."""

    backend: str
    reason: str
    compile_ms: float
    mask_p99_ms: float
    constrained_tokens: int
    forced_tokens: int
    complete: bool
    enforced: bool = True
    valid: bool | None = None


@dataclass(slots=True)
class Finish:
    """The end of one sequence."""

    reason: FinishReason
    completion_tokens: int
    matched_token_id: int | None = None
    matched_stop: str | None = None
    retractions: int = 0
    message: str = ""
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    detokenise_ms: float = 0.0
    drafted: int = 0  # guessed tokens that were checked
    accepted: int = 0  # those of them that were right
    grammar: GrammarReport | None = None


@dataclass(slots=True)
class Delta:
    """News of one sequence after one step. `error` ends the whole request; `finish` ends the sequence."""

    request_id: str
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: PositionLogprobs | None = None
    prompt: tuple[int, int] | None = None  # (prompt_tokens, cached_tokens), once per request
    input_logprobs: PositionLogprobs | None = None
    finish: Finish | None = None
    error: Exception | None = None  # an EngineError
    lease: LeaseReport | None = None  # once per request that has one
