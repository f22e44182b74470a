"""LoRA adapters beside the weights of a torch decoder: y += B (A x) for the rows that name an adapter.

Rows are grouped by adapter once a step, so that a step costs two small products a group and projection, whatever the
number of sequences. Rows of the base model are never written: their bits are those of a step without adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import linear

from branchline.engine.errors import LoadError
from branchline.engine.model.adapter import FIELD, Adapter, base_shapes
from branchline.engine.model.spec import ModelSpec
from branchline.engine.types import ForwardBatch

# The decoder's projections, of which some are several of the checkpoint's under one another.
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}


@dataclass(frozen=True, slots=True)
class Factors:
    """One projection's pair: `down` [ranks, in], `up` [out, ranks] with the scaling in it.

    Of fused projections `down` has their ranks under one another and `up` a block for each, zero elsewhere.
    """

    down: torch.Tensor
    up: torch.Tensor


Layers = tuple[Mapping[str, Factors], ...]  # by layer, then by projection


@dataclass(frozen=True, slots=True)
class Share:
    """The tokens of one adapter in a step: their places among its T tokens, None if they are all of them."""

    rows: torch.Tensor | None  # int64 on the decoder's device
    layers: Layers


class LoraBank:
    """Adapters by number, in the decoder's dtype and on its device. `load` and `unload` may run on any thread."""

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        self._spec = spec
        self._device = device
        self._dtype = dtype
        self._layers: dict[int, Layers] = {}

    def load(self, number: int, adapter: Adapter) -> None:
        """Convert an adapter's weights. Raises LoadError for values that are not finite, or if there is no memory."""
        try:
            with torch.inference_mode():
                self._layers[number] = tuple(self._layer(adapter, layer) for layer in range(self._spec.layers))
        except (RuntimeError, MemoryError) as error:
            raise LoadError(
                f"adapter {adapter.path} does not fit on {self._device}: unload another one", field=FIELD
            ) from error

    def unload(self, number: int) -> None:
        """Free it; unknown numbers are no error."""
        self._layers.pop(number, None)

    def shares(self, batch: ForwardBatch) -> tuple[Share, ...]:
        """The batch's tokens by adapter; empty if it has only the base model's."""
        if batch.adapters is None:
            return ()
        numbers = np.repeat(np.asarray(batch.adapters, dtype=np.int64), batch.query_lens)
        found = []
        for number in sorted({*batch.adapters} - {0}):
            rows = np.flatnonzero(numbers == number)
            places = None if len(rows) == len(numbers) else torch.from_numpy(rows).to(self._device, non_blocking=True)
            found.append(Share(places, self._layers[number]))
        return tuple(found)

    def _layer(self, adapter: Adapter, layer: int) -> Mapping[str, Factors]:
        shapes = base_shapes(self._spec)
        made: dict[str, Factors] = {}
        for fused, names in FUSED.items():
            present = [name for name in names if (layer, name) in adapter.parts]
            if not present:
                continue
            parts = [adapter.parts[layer, name] for name in present]
            downs = [self._read(adapter, part.down) for part in parts]
            ups = {name: self._read(adapter, part.up) * part.scaling for name, part in zip(present, parts, strict=True)}
            sizes = [shapes[layer, name][1] for name in names]
            up = torch.zeros((sum(sizes), sum(part.rank for part in parts)), dtype=torch.float32)
            row = column = 0
            for name, size in zip(names, sizes, strict=True):
                if name in ups:
                    width = ups[name].shape[1]
                    up[row : row + size, column : column + width] = ups[name]
                    column += width
                row += size
            made[fused] = Factors(self._placed(torch.cat(downs)), self._placed(up))
        return made

    def _read(self, adapter: Adapter, name: str) -> torch.Tensor:
        found = adapter.tensors.read(name).float()
        if not bool(torch.isfinite(found).all()):
            raise LoadError(f"adapter {adapter.path}: tensor {name} holds values that are not finite", field=FIELD)
        return found

    def _placed(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(device=self._device, dtype=self._dtype).contiguous()


def adapt(out: torch.Tensor, x: torch.Tensor, shares: Sequence[Share], layer: int, projection: str) -> torch.Tensor:
    """`out` [T, out], what a projection made of `x` [T, in], with each share's part added in place."""
    for share in shares:
        factors = share.layers[layer].get(projection)
        if factors is None:
            continue
        if share.rows is None:
            out += linear(linear(x, factors.down), factors.up)
        else:
            own = linear(linear(x.index_select(0, share.rows), factors.down), factors.up)
            out.index_add_(0, share.rows, own)
    return out
