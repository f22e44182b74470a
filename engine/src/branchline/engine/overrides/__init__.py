"""Model overrides: options that a checkpoint wants otherwise than the defaults say. Declared, never mutated.

Writers come in this order: the constant table by architecture, exact providers (those that name architectures),
predicate providers; within a class in the order of registration. Each returns {option: value}; the last writer
wins, and whatever the user gave (file, environment, flags) wins over all of them. Imports no torch.
"""

from __future__ import annotations

from branchline import registry
from branchline.engine.overrides.apply import Writer, apply, explain
from branchline.engine.overrides.base import ModelFacts, ModelOverride, facts_of

__all__ = ["ModelFacts", "ModelOverride", "Writer", "apply", "explain", "facts_of"]

registry.model_overrides.register_lazy(
    "bounded_context", "branchline.engine.overrides.builtin:BoundedContext", api_version=1
)
