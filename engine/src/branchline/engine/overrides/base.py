"""What a provider of model overrides is and what it may know of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from branchline.engine.model.source import LoadedModel


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A checkpoint as providers see it. `quantization` is the checkpoint's own method, empty if it has none."""

    reference: str
    architecture: str
    parameters: int
    context_length: int
    vocab_size: int
    stored_dtype: str
    quantization: str
    sliding_window: int | None


class ModelOverride(Protocol):
    """Values of options for some checkpoints.

    `architectures` names those that the provider is for; empty makes it a predicate provider, which `applies` alone
    decides on and which comes after all exact ones.
    """

    api_version: int
    architectures: tuple[str, ...]

    def applies(self, facts: ModelFacts) -> bool:
        """Whether this checkpoint is meant. Must not change anything."""

    def options(self, facts: ModelFacts) -> Mapping[str, object]:
        """Option names as in the option table, with their values."""


def facts_of(model: LoadedModel) -> ModelFacts:
    """What is known of a checkpoint without reading weights."""
    spec = model.spec
    own = str(model.quantization.get("quant_method", "")) if model.quantization else ""
    return ModelFacts(
        reference=model.reference,
        architecture=spec.architecture,
        parameters=spec.parameters(),
        context_length=spec.context_length,
        vocab_size=spec.vocab_size,
        stored_dtype=model.stored_dtype,
        quantization=own or ("gguf" if model.path.suffix == ".gguf" else ""),
        sliding_window=spec.sliding_window,
    )
