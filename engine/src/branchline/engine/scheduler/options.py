"""The scheduler's options and the checks that need no request. Frozen; made once by the loop's builder."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Limits and weights of the step loop.

    `max_step_tokens` is the budget of one step, shared by decodes and prefill chunks. `prefill_chunk` bounds what
    one sequence may take of it; None for all. A step in which others decode takes only so many prompt tokens as
    are expected to keep it within `itl_target_s`: None for twice the step of those decodes alone, infinite for no
    such bound. `mixed_prefill_tokens` bounds them whatever they cost; None for no bound. `aging_passes` and
    `aging_seconds` bound locality: after that many passes, or that long, a waiting sequence goes before any
    newcomer of its priority, whatever that one would hit; `priority_aging_seconds` make up for one priority.
    With `preemption` a running sequence gives way to a waiting one of higher priority if there is no place or no
    page for both, at most `preemptions` times. `share_wait_steps` bounds how often a sequence is put off because
    another computes its next page. With `forced_tokens` what a constraint leaves no choice about is computed at once.
    Sampling waits `mask_patience_s` after the forward pass for the constraints' masks; None for as long as they take.
    """

    max_running_requests: int = 256
    max_queued_requests: int = 2048
    max_step_tokens: int = 512
    prefill_chunk: int | None = None
    mixed_prefill_tokens: int | None = None
    itl_target_s: float | None = None
    context_length: int = 8192
    aging_passes: int = 256
    aging_seconds: float = 2.0
    priority_aging_seconds: float = 30.0
    preemption: bool = True
    preemptions: int = 2
    locality_cap_tokens: int = 4096
    share_wait_steps: int = 256
    forced_tokens: bool = True
    mask_patience_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse limits that contradict each other."""
        for name in (
            "max_running_requests", "max_step_tokens", "prefill_chunk", "mixed_prefill_tokens", "context_length",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.max_queued_requests < 0:
            raise ValueError(f"max_queued_requests is {self.max_queued_requests}; it must be at least 0")
        if self.max_running_requests > self.max_step_tokens:
            raise ValueError(
                f"max_running_requests {self.max_running_requests} exceeds max_step_tokens {self.max_step_tokens}; "
                "every running sequence needs one token a step: raise max_step_tokens"
            )
        for name in ("itl_target_s", "aging_seconds", "priority_aging_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}; it must be above 0")
        if not 1 <= self.aging_passes <= 1000:
            raise ValueError(f"aging_passes is {self.aging_passes}; the bound is 1 to 1000 passes")

    @property
    def chunk(self) -> int:
        """Most tokens one sequence may compute in a step."""
        return min(self.prefill_chunk or self.max_step_tokens, self.max_step_tokens)


@dataclass(slots=True)
class Counters:
    """Sums since start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    lookups: int = 0
    hits: int = 0
    retractions: int = 0  # preemptions included
    preemptions: int = 0
