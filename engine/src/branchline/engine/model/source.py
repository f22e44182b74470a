"""What every kind of checkpoint offers to the loader: a spec, its files and tensors under canonical names.

Canonical names are those of Hugging Face checkpoints (`model.layers.0.self_attn.q_proj.weight`). Readers
check everything that can be checked before the first tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from branchline.engine.model.spec import ModelSpec

if TYPE_CHECKING:
    import torch

Progress = Callable[[str, int, int], None]  # (stage, done, total); called from the loading thread


def no_progress(stage: str, done: int, total: int) -> None:
    """The Progress that says nothing."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's bytes as the file has them, row after row; a view of the mapped file where there is one.

    `type_name` is a type of GGUF (F32, F16, BF16, Q8_0 …). `interleaved_heads` is the number of heads whose rows
    a converter reordered for pairwise rotation; 0 if rows are in the canonical order.
    """

    type_name: str
    shape: tuple[int, ...]
    data: bytes | memoryview
    interleaved_heads: int = 0


class TensorSource(Protocol):
    """Tensors of one checkpoint. `read` may be called in any order and does not keep what it returns."""

    def names(self) -> set[str]:
        """Canonical names present."""

    def in_file_order(self) -> list[str]:
        """Canonical names in the order in which their bytes lie, so that a mapped file is read from front to end."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape without reading the data."""

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, in the file's float dtype (float32 where it was quantised).

        It may be a view of mapped memory: callers copy and never write to it.
        """

    def stored(self, name: str) -> StoredTensor:
        """The tensor's bytes without any conversion; needs no torch."""


@runtime_checkable
class RawSource(Protocol):
    """A source that also gives tensors which are no weights by themselves, such as packed words."""

    def names(self) -> set[str]:
        """Names present."""

    def raw(self, name: str, dtype: str = "") -> npt.NDArray[np.generic]:
        """The stored values, BF16 as float32. Raises LoadError if it is missing or has another type than `dtype`."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checked checkpoint, ready for an executor to build from.

    `reference` is what the operator gave, `path` where its files are, `fingerprint` a hash of the weights,
    `stored_dtype` the dtype most weights have on disk, `quantization` the checkpoint's own settings of a quantisation
    that its tensors still have to be read through.
    """

    reference: str
    path: Path
    spec: ModelSpec
    tensors: TensorSource
    fingerprint: str
    stored_dtype: str
    progress: Progress = no_progress
    quantization: Mapping[str, Any] = field(default_factory=dict)
