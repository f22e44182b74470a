"""Overrides of our own: the constant table and a provider."""

from __future__ import annotations

from collections.abc import Mapping

from branchline.engine.overrides.base import ModelFacts

CONSTANTS: Mapping[str, Mapping[str, object]] = {}
"""Architecture → values that hold for every checkpoint of it."""

LONGEST_CONTEXT = 131_072


class BoundedContext:
    """Checkpoints that promise more are served with this context unless asked otherwise: pools are planned by it."""

    api_version = 1
    architectures: tuple[str, ...] = ()

    def applies(self, facts: ModelFacts) -> bool:
        """Whether the checkpoint promises more."""
        return facts.context_length > LONGEST_CONTEXT

    def options(self, facts: ModelFacts) -> Mapping[str, object]:
        """The bound."""
        return {"context_length": LONGEST_CONTEXT}
