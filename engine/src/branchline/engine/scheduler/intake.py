"""Turns a request into the state the scheduler works on, or refuses it with the numbers that do not fit.

`admit` may run on any thread; `prepare` touches the executor and runs on the loop's thread. Owns no queue.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

from branchline.engine.cache import RadixCacheBackend
from branchline.engine.errors import InvalidArgument
from branchline.engine.scheduler import scores
from branchline.engine.scheduler.options import SchedulerOptions
from branchline.engine.scheduler.sequence import Group, Sequence, Sink, TextAutomaton, child_seed
from branchline.engine.types import Executor, Request, Resume, RowPlan, SamplingParams

if TYPE_CHECKING:
    from branchline._native import Vocabulary


class Intake:
    """Makes groups. Numbers of sequences are never reused."""

    def __init__(
        self,
        executor: Executor,
        cache: RadixCacheBackend,
        vocabulary: Vocabulary,
        options: SchedulerOptions,
        eos_token_ids: tuple[int, ...],
        draw_seed: Callable[[], int],
    ) -> None:
        self._executor = executor
        self._cache = cache
        self._vocabulary = vocabulary
        self._options = options
        self._eos_token_ids = eos_token_ids
        self._draw_seed = draw_seed
        self._numbers = itertools.count(1)

    def admit(self, request: Request, sink: Sink, now: float) -> Group:
        """The request's group with its n sequences. Raises InvalidArgument if the prompt can never run."""
        self._check(request)
        ids = array("I", request.token_ids)
        hashes = self._cache.block_hashes(request.namespace, ids) if self._cache.shares else []
        group = Group(request, sink, request.arrival_s or now, hashes)
        seed = request.sampling.seed
        seed = self._draw_seed() if seed is None else seed
        resume = request.resume
        for index in range(request.sampling.n):
            child = index if resume is None else resume.index
            sequence = self._sequence(group, index, child_seed(seed, child), ids[:])
            if resume is not None:
                take_up(sequence, resume)
            group.sequences.append(sequence)
        group.live = len(group.sequences)
        return group

    def prepare(self, group: Group) -> None:
        """Give each sequence its own penalty state."""
        request = group.request
        for sequence in group.sequences:
            state = self._executor.penalty_state(request.token_ids, request.sampling)
            sequence.plan.penalties = state
            if request.resume is not None and state is not None:
                for token in request.resume.token_ids:
                    self._executor.observe(state, token)

    def _check(self, request: Request) -> None:
        tokens = request.token_ids
        if not tokens:
            raise InvalidArgument("token_ids is empty; give at least one token", field="token_ids")
        low, high, size = min(tokens), max(tokens), self._executor.vocab_size
        if low < 0 or high >= size:
            raise InvalidArgument(
                f"token_ids holds {low if low < 0 else high}; ids must be in [0, {size})", field="token_ids"
            )
        length = len(tokens) + (0 if request.resume is None else len(request.resume.token_ids))
        new = 0 if request.sampling.max_tokens == 0 else 1
        context, pool = self._options.context_length, self._executor.num_pages * self._executor.page_size
        if length + new > context:
            raise InvalidArgument(
                f"the prompt has {length} tokens and the context length is {context}; shorten the prompt so that it "
                f"and {new} new token fit",
                field="token_ids",
            )
        if length + new > pool:
            raise InvalidArgument(
                f"the prompt has {length} tokens and the KV pool holds {pool}; shorten the prompt so that it and "
                f"{new} new token fit, or start the worker with a larger pool",
                field="token_ids",
            )

    def _sequence(self, group: Group, index: int, seed: int, ids: array[int]) -> Sequence:
        request = group.request
        sampling, logprobs = request.sampling, request.logprobs
        prompt_len = len(request.token_ids)
        samples = sampling.max_tokens != 0
        room = self._options.context_length
        ends = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else frozenset(self._eos_token_ids)
        )
        sequence = Sequence(
            number=next(self._numbers),
            group=group,
            index=index,
            tokens=list(request.token_ids),
            ids=ids,
            prompt_len=prompt_len,
            max_len=room if sampling.max_tokens is None else min(prompt_len + sampling.max_tokens, room),
            samples=samples,
            text=text_stream(self._vocabulary, sampling),
            plan=RowPlan(
                row=0,
                params=sampling,
                seed=seed,
                want_logprob=logprobs.output,
                top_k=logprobs.top_k if logprobs.output else 0,
                chosen_ids=logprobs.token_ids if logprobs.output else (),
            ),
            ends=ends,
            banned=tuple(sorted(ends)),
            min_tokens=sampling.min_tokens,
            priority=request.priority,
            adapter=0 if request.adapter is None else request.adapter.number,
        )
        scores.begin(sequence, logprobs.input_start)
        return sequence


def take_up(sequence: Sequence, resume: Resume) -> None:
    """Put a sequence where another worker left it: its output counts as its own, its text as far as it was sent.

    Raises InvalidArgument if the output had ended, or if its reader has text that it does not give.
    """
    text = bytearray()
    for position, token in enumerate(resume.token_ids):
        piece, _, matched = sequence.text.push([token])
        text += piece.encode()
        ended = token in sequence.ends and position >= sequence.min_tokens
        if ended or matched is not None:
            raise InvalidArgument(
                f"emitted_token_ids[{position}] ends the sequence; resume only what is unfinished",
                field="resume.emitted_token_ids",
            )
    sequence.tokens.extend(resume.token_ids)
    if resume.text_bytes > len(text):
        raise InvalidArgument(
            f"emitted_text_bytes is {resume.text_bytes} and the emitted ids give {len(text)} bytes of text; send the "
            "bytes that went out with them",
            field="resume.emitted_text_bytes",
        )
    sequence.owed = text[resume.text_bytes :].decode(errors="replace")


def text_stream(vocabulary: Vocabulary, sampling: SamplingParams) -> TextAutomaton:
    """The text automaton of one sequence."""
    from branchline._native import TextStream

    return TextStream(
        vocabulary,
        sampling.stop,
        skip_special_tokens=sampling.skip_special_tokens,
        include_stop=sampling.include_stop,
        min_tokens=sampling.min_tokens,
    )
