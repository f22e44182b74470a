"""The packaged model in other weight formats, the same bytes every time: for fixtures and the tests that use them.

Needs numpy and the gguf package only. K formats are written here (the gguf package reads them but can't write them)
by plain rounding, without the search for better scales that llama.cpp's quantiser makes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from branchline.engine.model.source import LoadedModel, StoredTensor
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

F32 = npt.NDArray[np.float32]
BYTES = npt.NDArray[np.uint8]
FORMATS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
INT8 = "int8"  # what `--weight-dtype int8` makes of F32, in blocks of Q8_0


@dataclass(frozen=True, slots=True)
class Recast:
    """TensorSource over another, with tensors replaced."""

    tensors: Mapping[str, StoredTensor]

    def names(self) -> set[str]:
        """Canonical names."""
        return set(self.tensors)

    def in_file_order(self) -> list[str]:
        """Canonical names, as they were given."""
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self.tensors[name].shape

    def read(self, name: str) -> object:
        """Not offered: there is no torch here."""
        raise NotImplementedError(name)

    def stored(self, name: str) -> StoredTensor:
        """The tensor's bytes."""
        return self.tensors[name]


def values_of(tensor: StoredTensor) -> F32:
    """What stored bytes mean according to the gguf package, rows as they are stored."""
    raw = np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape[0], -1)
    values: F32 = dequantize(raw, GGMLQuantizationType[tensor.type_name]).reshape(tensor.shape).astype(np.float32)
    return values


def recast(model: LoadedModel, type_name: str) -> LoadedModel:
    """`model` with every matrix in `type_name`; in Q8_0 where a K format's 256 values do not divide its rows."""
    found: dict[str, StoredTensor] = {}
    for name in model.tensors.in_file_order():
        tensor = model.tensors.stored(name)
        if len(tensor.shape) == 2:
            kind = "Q8_0" if type_name.endswith("_K") and tensor.shape[1] % 256 else type_name
            if kind == INT8:
                tensor = dataclasses.replace(tensor, type_name="Q8_0", data=_int8(values_of(tensor)))
            elif kind != tensor.type_name:
                tensor = dataclasses.replace(tensor, type_name=kind, data=encode(values_of(tensor), kind))
        found[name] = tensor
    name = f"{model.fingerprint}-{type_name}"
    return dataclasses.replace(model, tensors=Recast(found), fingerprint=name, stored_dtype=type_name)


def encode(values: F32, type_name: str) -> bytes:
    """Values in a format of GGUF; rows must fill its blocks."""
    if type_name == "Q4_K":
        return _q4_k(values.reshape(-1, 8, 32)).tobytes()
    if type_name == "Q6_K":
        return _q6_k(values.reshape(-1, 16, 16)).tobytes()
    return quantize(values, GGMLQuantizationType[type_name]).tobytes()


def _halves(values: F32) -> tuple[BYTES, F32]:
    rounded = values.astype(np.float16)
    return rounded.view(np.uint8).reshape(-1, 2), rounded.astype(np.float32)


def _divide(values: F32, by: F32) -> F32:
    return np.divide(values, by, out=np.zeros_like(values), where=by != 0)


def _int8(values: F32) -> bytes:
    """Blocks of Q8_0 whose integers are rounded to the scale as stored, as the native executor does it."""
    x = values.reshape(-1, 32)
    scales, step = _halves(np.abs(x).max(axis=1) / np.float32(127))
    q = np.clip(np.rint(_divide(x, np.broadcast_to(step[:, None], x.shape))), -127, 127)
    return np.concatenate([scales, q.astype(np.int8).view(np.uint8)], axis=1).tobytes()


def _q4_k(x: F32) -> BYTES:
    low = np.minimum(x.min(axis=2), 0)
    scale, offset = (x.max(axis=2) - low) / 15, -low
    d_bytes, d = _halves(scale.max(axis=1) / 63)
    m_bytes, m = _halves(offset.max(axis=1) / 63)
    scales = np.clip(np.rint(_divide(scale, np.broadcast_to(d[:, None], scale.shape))), 0, 63)
    mins = np.clip(np.rint(_divide(offset, np.broadcast_to(m[:, None], scale.shape))), 0, 63)
    step = np.broadcast_to((scales * d[:, None])[..., None], x.shape)
    q = np.clip(np.rint(_divide(x + (mins * m[:, None])[..., None], step)), 0, 15).astype(np.uint8)
    s, o = scales.astype(np.uint8), mins.astype(np.uint8)
    packed = np.concatenate(
        [s[:, :4] | s[:, 4:] >> 4 << 6, o[:, :4] | o[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (o[:, 4:] & 15) << 4], axis=1
    )
    nibbles = (q[:, 0::2] | q[:, 1::2] << 4).reshape(len(x), 128)
    return np.concatenate([d_bytes, m_bytes, packed, nibbles], axis=1)


def _q6_k(x: F32) -> BYTES:
    scale = np.abs(x).max(axis=2) / 31
    d_bytes, d = _halves(scale.max(axis=1) / 127)
    scales = np.clip(np.rint(_divide(scale, np.broadcast_to(d[:, None], scale.shape))), 0, 127)
    step = np.broadcast_to((scales * d[:, None])[..., None], x.shape)
    q = (np.clip(np.rint(_divide(x, step)), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (q[:, :, :2] & 15 | (q[:, :, 2:] & 15) << 4).reshape(len(x), 128)
    high = (q[:, :, 0] >> 4 | q[:, :, 1] >> 4 << 2 | q[:, :, 2] >> 4 << 4 | q[:, :, 3] >> 4 << 6).reshape(len(x), 64)
    return np.concatenate([low, high, scales.astype(np.int8).view(np.uint8), d_bytes], axis=1)
