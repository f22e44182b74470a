"""The platform `cpu`: the machine's own processor and memory."""

from __future__ import annotations

from branchline.engine.platforms.memory import free_memory

SHARE = 0.25  # of what weights leave; taken only as it is used


class Cpu:
    """Always there."""

    api_version = 1
    rank = 0
    device = "cpu"
    dtype = "float32"
    executors = ("native", "torch", "torch-cuda", "transformers")

    def devices(self) -> list[str]:
        """One."""
        return ["cpu"]

    def room(self, weights: int) -> float:
        """A share, since others live here too."""
        return max(0.0, free_memory() - weights) * SHARE
