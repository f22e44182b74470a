"""Rotary positions: frequencies of a spec and the cosine and sine tables made from them."""

from __future__ import annotations

import math

import torch

from branchline.engine.errors import LoadError
from branchline.engine.model.spec import ModelSpec, RopeScaling


def frequencies(spec: ModelSpec) -> torch.Tensor:
    """Radians a position for each rotated pair, float32 [head_dim / 2], scaling applied."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    base = 1.0 / (spec.rope_theta**exponents)
    scaling = spec.rope_scaling
    if scaling is None:
        return base
    if scaling.kind == "linear":
        return base / scaling.factor
    if scaling.kind == "factors":
        return base / torch.tensor(scaling.factors, dtype=torch.float32)
    if scaling.kind == "llama3":
        return _llama3(base, scaling)
    raise LoadError(f"rope scaling {scaling.kind!r} is not implemented", field="model.rope_scaling")


def _llama3(base: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1's rule: long wavelengths are stretched by `factor`, short ones kept, blended in between."""
    wavelength = 2 * math.pi / base
    longest = scaling.original_context / scaling.low_freq_factor
    shortest = scaling.original_context / scaling.high_freq_factor
    span = scaling.high_freq_factor - scaling.low_freq_factor
    blend = (scaling.original_context / wavelength - scaling.low_freq_factor) / span
    mixed = (1 - blend) * base / scaling.factor + blend * base
    scaled = torch.where(wavelength > longest, base / scaling.factor, mixed)
    return torch.where(wavelength < shortest, base, scaled)


class RotaryTable:
    """Cosines and signed sines by position, grown by doubling up to what positions ask for.

    Rows are laid out for `x * cos + swap(x) * sin`, where swap exchanges the halves of a head and the first
    half of `sin` is negated.
    """

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        self._frequencies = frequencies(spec).to(device)
        self._dtype = dtype
        self._limit = spec.context_length
        self._half = spec.head_dim // 2
        self._rows = 0
        self._grow(min(1024, self._limit))

    def _grow(self, rows: int) -> None:
        positions = torch.arange(rows, device=self._frequencies.device, dtype=torch.float32)
        angles = torch.outer(positions, self._frequencies)
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), dim=1).to(self._dtype)
        self._sin = torch.cat((-sin, sin), dim=1).to(self._dtype)
        self._rows = rows

    def at(self, positions: torch.Tensor, highest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines [T, 1, head_dim] of int64 positions [T], none above `highest`."""
        if highest >= self._rows:
            self._grow(max(highest + 1, min(2 * self._rows, self._limit)))
        return self._cos.index_select(0, positions).unsqueeze(1), self._sin.index_select(0, positions).unsqueeze(1)

    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines [context_length, head_dim] of every position, which stay where they are."""
        if self._rows < self._limit:
            self._grow(self._limit)
        return self._cos, self._sin

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotated copy of [T, heads, head_dim]."""
        swapped = torch.cat((heads[..., self._half :], heads[..., : self._half]), dim=-1)
        return torch.addcmul(heads * cos, swapped, sin)
