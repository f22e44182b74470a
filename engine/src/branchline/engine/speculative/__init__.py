"""Speculative decoding: algorithms that guess the next tokens, and the controller that decides how many are checked.

A guess changes when tokens are computed, never which: every one is sampled as it would have been without it.
Importing this package registers `ngram` and `draft`, imported when asked for. Imports no torch.
"""

from __future__ import annotations

from branchline import registry
from branchline.engine.speculative.base import (
    Ask,
    DraftContext,
    Drafted,
    Proposal,
    SpeculativeAlgorithm,
)
from branchline.engine.speculative.controller import Drafter

__all__ = [
    "Ask",
    "DraftContext",
    "Drafted",
    "Drafter",
    "Proposal",
    "SpeculativeAlgorithm",
    "build_drafter",
]

registry.speculative_algorithms.register_lazy("ngram", "branchline.engine.speculative.ngram:NgramDrafts", api_version=1)
registry.speculative_algorithms.register_lazy(
    "draft", "branchline.engine.speculative.draft_model:ModelDrafts", api_version=1
)


def build_drafter(name: str, context: DraftContext) -> Drafter:
    """The controller over the algorithm registered under `name`. Raises RegistryError if it does not conform."""
    factory = registry.speculative_algorithms.get(name)
    algorithm = factory(context)
    registry.speculative_algorithms.verify(name, algorithm)
    return Drafter(algorithm, context.options)  # type: ignore[arg-type]
