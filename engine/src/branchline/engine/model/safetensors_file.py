"""safetensors files read through mmap, with the header checked against the file before any tensor is touched."""

from __future__ import annotations

import json
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from branchline.engine.errors import LoadError
from branchline.engine.model.source import StoredTensor

if TYPE_CHECKING:
    import torch

HEADER_LIMIT = 100 << 20  # the format's own limit
_TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
_NUMPY_NAMES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<i4"}
_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """One file's tensors. Raises LoadError for a header or a length that cannot be right."""

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if length < 2 or length > HEADER_LIMIT:
                raise LoadError(f"{path} is not a safetensors file: its header length is {length}", field="model")
            if 8 + length > size:
                raise LoadError(
                    f"{path} is truncated: its header needs {8 + length} bytes, the file has {size}; download it again",
                    field="model",
                )
            self.entries = self._parse(file.read(length), 8 + length)
            needed = max((entry.end for entry in self.entries.values()), default=0)
            if needed > size:
                raise LoadError(
                    f"{path} is truncated: its tensors need {needed} bytes, the file has {size}; download it again",
                    field="model",
                )
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def _parse(self, header: bytes, base: int) -> dict[str, _Entry]:
        try:
            document = json.loads(header)
            found: dict[str, _Entry] = {}
            for name, one in document.items():
                if name != "__metadata__":
                    start, end = one["data_offsets"]
                    found[name] = _Entry(str(one["dtype"]), tuple(map(int, one["shape"])), base + start, base + end)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise LoadError(f"{self.path} has a damaged safetensors header: {error!r}", field="model") from error
        for name, entry in found.items():
            self._check(name, entry, base)
        return found

    def _check(self, name: str, entry: _Entry, base: int) -> None:
        if entry.dtype not in _BYTES:
            return  # refused by name when something asks to read it
        if entry.start < base:
            raise LoadError(f"{self.path} has a damaged safetensors header: {name} lies inside it", field="model")
        self._fits(name, entry, _BYTES[entry.dtype])

    def _fits(self, name: str, entry: _Entry, width: int) -> None:
        size = math.prod(entry.shape) * width
        if entry.end - entry.start != size or min(entry.shape, default=0) < 0:
            raise LoadError(
                f"{self.path} has a damaged safetensors header: {name} of shape {list(entry.shape)} needs {size}"
                f" bytes and is given {entry.end - entry.start}",
                field="model",
            )

    def read(self, name: str) -> torch.Tensor:
        """A view of the mapped file."""
        import torch

        entry = self._readable(name)
        dtype = getattr(torch, _TORCH_NAMES[entry.dtype])
        if entry.start % _BYTES[entry.dtype]:
            aligned = bytearray(self._data[entry.start : entry.end])
            return torch.frombuffer(aligned, dtype=dtype).view(entry.shape)
        count = math.prod(entry.shape)
        return torch.frombuffer(self._data, dtype=dtype, count=count, offset=entry.start).view(entry.shape)

    def stored(self, name: str) -> StoredTensor:
        """The tensor's bytes as the file has them."""
        entry = self._readable(name)
        return StoredTensor(entry.dtype, entry.shape, memoryview(self._data).toreadonly()[entry.start : entry.end])

    def raw(self, name: str, dtype: str = "") -> npt.NDArray[np.generic]:
        """The stored values, BF16 as float32."""
        entry = self.entries[name]
        if entry.dtype not in _NUMPY_NAMES or (dtype and entry.dtype != dtype):
            raise LoadError(
                f"tensor {name} in {self.path} has dtype {entry.dtype}, {dtype or 'a float'} is needed", field="model"
            )
        self._fits(name, entry, np.dtype(_NUMPY_NAMES[entry.dtype]).itemsize)
        values = np.frombuffer(self._data[entry.start : entry.end], _NUMPY_NAMES[entry.dtype]).reshape(entry.shape)
        if entry.dtype == "BF16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values

    def _readable(self, name: str) -> _Entry:
        entry = self.entries[name]
        if entry.dtype not in _BYTES:
            raise LoadError(
                f"tensor {name} in {self.path} has dtype {entry.dtype}, which is not supported; use F32, F16 or BF16",
                field="model",
            )
        return entry


class ShardedTensors:
    """TensorSource over one or more safetensors files. With an index, a name comes from the shard it says."""

    def __init__(self, files: list[SafetensorsFile], index: dict[str, str] | None) -> None:
        by_name = {file.path.name: file for file in files}
        if index is None:
            self._home = {name: file for file in files for name in file.entries}
            return
        self._home = {}
        for name, shard in index.items():
            if name not in by_name[shard].entries:
                raise LoadError(f"tensor {name} is missing from {shard}, where the index puts it", field="model")
            self._home[name] = by_name[shard]

    def names(self) -> set[str]:
        """Names present."""
        return set(self._home)

    def in_file_order(self) -> list[str]:
        """Names by file and by the offset of their bytes in it."""
        return sorted(self._home, key=lambda name: (self._home[name].path.name, self._home[name].entries[name].start))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape without reading the data."""
        return self._home[name].entries[name].shape

    def read(self, name: str) -> torch.Tensor:
        """A view of the mapped file, in its own dtype."""
        return self._home[name].read(name)

    def stored(self, name: str) -> StoredTensor:
        """The tensor's bytes as the file has them."""
        return self._home[name].stored(name)

    def raw(self, name: str, dtype: str = "") -> npt.NDArray[np.generic]:
        """The stored values, BF16 as float32."""
        if name not in self._home:
            raise LoadError(f"tensor {name} is missing: the checkpoint is incomplete", field="model")
        return self._home[name].raw(name, dtype)

    def commonest(self) -> str:
        """The dtype that most tensors have."""
        kinds = [file.entries[name].dtype for name, file in self._home.items()]
        return max(sorted(set(kinds)), key=kinds.count) if kinds else ""
