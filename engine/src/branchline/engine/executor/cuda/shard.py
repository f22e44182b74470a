"""One rank's share of a model: its heads, its part of each MLP, its rows of the head.

A share is a checkpoint of its own, with smaller sizes in its spec and cut tensors under the same names, so that loading
and quantising know nothing of ranks. Rows of q, k, v, gate and up and columns of o and down are cut.
"""

from __future__ import annotations

import dataclasses

import torch

from branchline.engine.errors import LoadError
from branchline.engine.executor.cuda.group import Group
from branchline.engine.executor.weights import DecoderWeights
from branchline.engine.model.source import LoadedModel, StoredTensor, TensorSource
from branchline.engine.model.spec import ModelSpec

ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
COLUMNS = ("o_proj.weight", "down_proj.weight")


def share_of(model: LoadedModel, group: Group) -> LoadedModel:
    """The rank's share; the model itself if there is one rank. Raises LoadError if sizes can't be divided."""
    if group.size == 1:
        return model
    spec = model.spec
    changes: dict[str, object] = {
        name: _part(name, getattr(spec, name), group.size) for name in ("heads", "kv_heads", "intermediate")
    }
    if spec.experts is not None:
        inner = _part("experts' intermediate", spec.experts.intermediate, group.size)
        changes["experts"] = dataclasses.replace(spec.experts, intermediate=inner)
    cut = CutTensors(model.tensors, group.rank, group.size)
    return dataclasses.replace(model, spec=dataclasses.replace(spec, **changes), tensors=cut)  # type: ignore[arg-type]


def _part(name: str, count: int, size: int) -> int:
    if count % size:
        raise LoadError(
            f"the model's {name} {count} can't be divided among {size} ranks: give another tensor-parallel-size",
            field="tensor_parallel_size",
        )
    return count // size


class CutTensors:
    """TensorSource of one rank."""

    def __init__(self, source: TensorSource, rank: int, size: int) -> None:
        self._source = source
        self._rank = rank
        self._size = size

    def names(self) -> set[str]:
        """All names."""
        return self._source.names()

    def in_file_order(self) -> list[str]:
        """As they lie."""
        return self._source.in_file_order()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the rank's part."""
        shape, axis = self._source.shape(name), _axis(name)
        if axis is None or len(shape) <= axis or shape[axis] % self._size:
            return shape  # what does not fit is refused by whoever expects a part
        return (*shape[:axis], shape[axis] // self._size, *shape[axis + 1 :])

    def read(self, name: str) -> torch.Tensor:
        """The rank's part. A bias that is added to a sum of parts is the first rank's alone."""
        whole, axis = self._source.read(name), _axis(name)
        if axis is not None:
            return whole.chunk(self._size, dim=axis)[self._rank]
        return torch.zeros_like(whole) if name.endswith("o_proj.bias") and self._rank else whole

    def stored(self, name: str) -> StoredTensor:
        """Not for parts: stored forms are the native executor's."""
        raise NotImplementedError("a rank's part has no stored form")


def _axis(name: str) -> int | None:
    """Which dimension is cut."""
    if name.endswith(COLUMNS):
        return 1
    return 0 if name.rsplit(".", 2)[-2] in ROWS else None


def split_head(weights: DecoderWeights, group: Group) -> DecoderWeights:
    """With this rank's rows of the head, the last ranks' filled up with zeros. Quantised heads stay whole."""
    head = weights.head
    if group.size == 1 or not isinstance(head, torch.Tensor):
        return weights
    each = -(-head.shape[0] // group.size)
    part = head.new_zeros((each, head.shape[1]))
    own = head[group.rank * each : (group.rank + 1) * each]
    part[: len(own)].copy_(own)
    return dataclasses.replace(weights, head=part)


def window_of(spec: ModelSpec) -> int | None:
    """The attention window, unless no sequence can be longer than it."""
    window = spec.sliding_window
    return window if window is not None and window < spec.context_length else None
