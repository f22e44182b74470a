"""Drives an EngineLoop by hand, step by step, and collects what it says. No threads, no sleeping."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

from branchline._native import Vocabulary
from branchline.engine.cache import CacheContext, build_cache
from branchline.engine.config import SpeculativeOptions
from branchline.engine.errors import EngineError
from branchline.engine.grammar.manager import Manager
from branchline.engine.loop import EngineLoop, LoopOptions
from branchline.engine.scheduler import SchedulerOptions
from branchline.engine.speculative import DraftContext, Drafter
from branchline.engine.types import (
    Delta,
    Finish,
    GrammarAsk,
    LogprobParams,
    PositionLogprobs,
    Request,
    SamplingParams,
)
from tiny import VOCAB, TinyExecutor

EOS = VOCAB - 1  # "</s>", the only special id


@cache
def vocabulary() -> Vocabulary:
    """VOCAB ids: 0..94 are the printable ASCII characters from space on, EOS is special."""
    return Vocabulary.from_tokenizer_json(tokenizer_json())


def tokenizer_json() -> bytes:
    """The tokenizer of `vocabulary`."""
    pieces = {_byte_level(chr(32 + number)): number for number in range(VOCAB - 1)}
    added = {"id": EOS, "content": "</s>", "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [{**added, **flags}],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": pieces, "merges": []},
        }
    ).encode()


def _byte_level(character: str) -> str:
    return "Ġ" if character == " " else character


def text_of(token_ids: Iterable[int]) -> str:
    """What ids below EOS spell."""
    return "".join(chr(32 + token) for token in token_ids)


@dataclass
class Answer:
    """All that was said about one sequence."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: Finish | None = None
    deltas: int = 0
    input: PositionLogprobs = field(default_factory=PositionLogprobs)
    output: PositionLogprobs = field(default_factory=PositionLogprobs)


@dataclass
class Clock:
    """Time that moves when told."""

    now: float = 100.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now


class Engine:
    """A loop over the tiny executor, and the answers it gave. Use `step`, `finish` or `loop.start`."""

    def __init__(
        self,
        pages: int = 64,
        page_size: int = 4,
        backend: str = "native",
        seed: int = 7,
        drafter: Callable[[DraftContext], Drafter] | None = None,
        host: int = 0,
        eviction: str = "lru",
        grammars: Manager | None = None,
        **limits: object,
    ) -> None:
        self.executor = TinyExecutor(pages, page_size)
        self.executor.reserve_host(host)
        self.cache = build_cache(backend, CacheContext(pages, page_size, eviction, host))
        self.clock = Clock()
        self.answers: dict[tuple[str, int], Answer] = {}
        self.errors: dict[str, EngineError] = {}
        self.prompts: dict[str, tuple[int, int]] = {}
        self.frames: list[tuple[int, list[Delta]]] = []
        self.options = LoopOptions(SchedulerOptions(**limits), eos_token_ids=(EOS,), audit_when_idle=True)  # type: ignore[arg-type]
        self.seed = seed
        self.make_drafter = drafter
        self.drafter: Drafter | None = None
        self.grammars = grammars
        self.rebuild()

    def rebuild(self) -> None:
        """Make the loop of the executor and the cache that are set now."""
        if self.make_drafter is not None:
            size, pages = self.executor.page_size, self.executor.num_pages
            context = DraftContext(SpeculativeOptions("test", 8), size, pages, VOCAB, self.cache.block_hashes)
            self.drafter = self.make_drafter(context)
        self.loop = EngineLoop(
            self.executor,
            self.cache,
            vocabulary(),
            self.options,
            clock=self.clock,
            draw_seed=lambda: self.seed,
            epoch=5,
            drafter=self.drafter,
            grammars=self.grammars,
        )

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        namespace: bytes = b"",
        logprobs: LogprobParams = LogprobParams(),  # noqa: B008
        deadline_s: float | None = None,
        priority: int = 0,
        grammar: GrammarAsk | None = None,
        **sampling: object,
    ) -> None:
        """Greedy unless told otherwise."""
        params = SamplingParams(**{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
        request = Request(
            request_id, tuple(prompt), params, logprobs, namespace, deadline_s, priority=priority, grammar=grammar
        )
        self.loop.submit(request, self.take)

    def take(self, step: int, deltas: list[Delta]) -> None:
        """The sink."""
        self.frames.append((step, deltas))
        for delta in deltas:
            assert delta.request_id not in self.errors, "news after an error"
            if delta.error is not None:
                assert isinstance(delta.error, EngineError)
                self.errors[delta.request_id] = delta.error
                continue
            if delta.prompt is not None:
                assert delta.request_id not in self.prompts, "two prompt reports"
                self.prompts[delta.request_id] = delta.prompt
            assert delta.request_id in self.prompts, "the prompt report comes with the first delta"
            self._add(self.answers.setdefault((delta.request_id, delta.index), Answer()), delta)

    @staticmethod
    def _add(answer: Answer, delta: Delta) -> None:
        assert answer.finish is None, "news after the end"
        answer.deltas += 1
        answer.token_ids += delta.token_ids
        answer.text += delta.text
        answer.finish = delta.finish
        for columns, news in ((answer.input, delta.input_logprobs), (answer.output, delta.logprobs)):
            if news is None:
                continue
            if not columns.token_ids:
                columns.start = news.start
            elif columns is answer.input:
                assert news.start == columns.start + len(columns.token_ids), "input logprobs have a gap"
            columns.token_ids += news.token_ids
            columns.logprobs += news.logprobs
            columns.top += news.top
            columns.chosen += news.chosen

    def step(self, times: int = 1) -> None:
        """Turn the loop; the ledger must balance after every turn."""
        for _ in range(times):
            self.loop.step()
            assert sum(self.cache.counters()) == self.executor.num_pages

    def finish(self, limit: int = 20_000) -> None:
        """Turn until nothing is left, then audit."""
        for _ in range(limit):
            self.step()
            if not self.loop.busy:
                break
        else:
            raise AssertionError("the loop does not come to an end")
        self.loop.audit()
        _, _, protected, private = self.cache.counters()
        assert (protected, private) == (0, 0), "pages are still held"

    def run(self, request_id: str, prompt: Sequence[int], **options: object) -> Answer:
        """Submit one request and finish."""
        self.submit(request_id, prompt, **options)  # type: ignore[arg-type]
        self.finish()
        if request_id in self.errors:
            raise self.errors[request_id]
        return self.answers[request_id, 0]

    def counters(self) -> dict[str, int]:
        """Pages by state."""
        return dict(zip(("free", "evictable", "protected", "private"), self.cache.counters(), strict=True))
