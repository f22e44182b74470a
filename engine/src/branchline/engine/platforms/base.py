"""What a platform is: where a model can run, with which executor and dtype by default, and how much memory is there."""

from __future__ import annotations

from typing import Protocol


class Platform(Protocol):
    """Made without arguments whenever the plan of an engine is made.

    `executors` are the ones that run on it, the first is what `auto` means here. `rank`: of several platforms that
    are found, `auto` takes the highest. `device` and `dtype` are what executors are given unless the user says more;
    `device` is torch's name of it for the torch executor.
    """

    api_version: int
    rank: int
    device: str
    dtype: str
    executors: tuple[str, ...]

    def devices(self) -> list[str]:
        """Names of what is there and usable; empty if there is none. Must not raise, nor take seconds without one."""

    def room(self, weights: int) -> float:
        """Bytes for the KV pool beside `weights` bytes of weights."""
