"""The scheduler's options and the checks that need no request. Frozen; made once by the loop's builder."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Limits and weights of the step loop.

    `max_step_tokens` is the budget of one step, shared by decodes and prefill chunks. `prefill_chunk` bounds
    what one sequence may take of it; None for all. `aging_passes` and `aging_seconds` bound locality: after
    that many passes, or that long, a waiting sequence goes before any newcomer, whatever that one would hit.
    `share_wait_steps` bounds how often a sequence is put off because another computes its next page.
    """

    max_running_requests: int = 256
    max_queued_requests: int = 2048
    max_step_tokens: int = 512
    prefill_chunk: int | None = None
    context_length: int = 8192
    aging_passes: int = 256
    aging_seconds: float = 2.0
    locality_cap_tokens: int = 4096
    share_wait_steps: int = 64

    def __post_init__(self) -> None:
        """Refuse limits that contradict each other."""
        for name in ("max_running_requests", "max_queued_requests", "max_step_tokens", "context_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.prefill_chunk is not None and self.prefill_chunk < 1:
            raise ValueError(f"prefill_chunk is {self.prefill_chunk}; it must be at least 1")
        if self.max_running_requests > self.max_step_tokens:
            raise ValueError(
                f"max_running_requests {self.max_running_requests} exceeds max_step_tokens {self.max_step_tokens}; "
                "every running sequence needs one token a step: raise max_step_tokens"
            )
        if not 1 <= self.aging_passes <= 1000:
            raise ValueError(f"aging_passes is {self.aging_passes}; the bound is 1 to 1000 passes")

    @property
    def chunk(self) -> int:
        """Most tokens one sequence may compute in a step."""
        return min(self.prefill_chunk or self.max_step_tokens, self.max_step_tokens)
