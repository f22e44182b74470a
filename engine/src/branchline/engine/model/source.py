"""What every kind of checkpoint offers to the loader: a spec, its files and tensors under canonical names.

Canonical names are those of Hugging Face checkpoints (`model.layers.0.self_attn.q_proj.weight`). Readers
check everything that can be checked before the first tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from branchline.engine.model.spec import ModelSpec

Progress = Callable[[str, int, int], None]  # (stage, done, total); called from the loading thread


def no_progress(stage: str, done: int, total: int) -> None:
    """The Progress that says nothing."""


class TensorSource(Protocol):
    """Tensors of one checkpoint. `read` may be called in any order and does not keep what it returns."""

    def names(self) -> set[str]:
        """Canonical names present."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape without reading the data."""

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, in the file's float dtype (float32 where it was quantised).

        It may be a view of mapped memory: callers copy and never write to it.
        """


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checked checkpoint, ready for an executor to build from.

    `reference` is what the operator gave, `path` where its files are, `fingerprint` a hash of the weights,
    `stored_dtype` the dtype most weights have on disk.
    """

    reference: str
    path: Path
    spec: ModelSpec
    tensors: TensorSource
    fingerprint: str
    stored_dtype: str
    progress: Progress = no_progress
