"""One GGUF file: metadata and tensor directory, read through mmap with every bound checked.

The `gguf` package supplies the quantisation formats; the header is parsed here because its own reader
takes seconds over a large vocabulary and answers a truncated file with a numpy error. Owns no policy:
names and meanings of keys are the business of `gguf_model`.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from branchline.engine.errors import LoadError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
MAX_COUNT = 1 << 24  # tensors, keys or array entries: far above any real file, far below memory

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9

Value = int | float | bool | str | list["Value"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies. `shape` has the outermost dimension first (row-major, as torch counts)."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    size: int


_SIZE = struct.Struct("<Q")


class _Cursor:
    """Reads forward through the header and never past the file's end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 0

    def take(self, count: int) -> bytes:
        end = self.at + count
        if count < 0 or end > len(self.data):
            raise LoadError(
                f"gguf file {self.path} is truncated: its header needs byte {end}, the file has {len(self.data)};"
                " download it again",
                field="model",
            )
        piece = self.data[self.at : end]
        self.at = end
        return piece

    def scalar(self, kind: int) -> int | float | bool:
        form = _SCALARS[kind]
        value: int | float | bool = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return value

    def count(self, what: str) -> int:
        value = int(self.scalar(10))
        if value > MAX_COUNT:
            raise LoadError(f"gguf file {self.path} claims {value} {what}: the header is damaged", field="model")
        return value

    def string(self) -> str:
        length = int(self.scalar(10))
        return self.take(length).decode("utf-8", errors="surrogateescape")

    def value(self, kind: int, depth: int = 0) -> Value:
        if kind in _SCALARS:
            return self.scalar(kind)
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY and depth < 4:
            return self.array(depth)
        raise LoadError(f"gguf file {self.path} holds a value of unknown type {kind}", field="model")

    def array(self, depth: int) -> Value:
        kind = int(self.scalar(4))
        length = self.count("array entries")
        if kind in _SCALARS:
            form = _SCALARS[kind]
            packed = self.take(length * struct.calcsize(form))
            return list(struct.unpack(f"<{length}{form[1]}", packed))
        if kind == _STRING:
            return self.strings(length)
        return [self.value(kind, depth + 1) for _ in range(length)]

    def strings(self, count: int) -> list[Value]:
        """Vocabularies are long: `string`, five times as fast."""
        read, data, at, end = _SIZE.unpack_from, self.data, self.at, len(self.data)
        out: list[Value] = []
        for _ in range(count):
            start = at + _SIZE.size
            if start > end or (stop := start + read(data, at)[0]) > end:
                self.at = at
                self.string()  # raises, and says what is missing
            out.append(data[start:stop].decode("utf-8", errors="surrogateescape"))
            at = stop
        self.at = at
        return out


class GgufFile:
    """Metadata and tensors of one GGUF file. Tensor bytes stay on disk until `read`.

    Raises LoadError for a bad header, a truncated file or a tensor type outside SUPPORTED_TYPES.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if path.stat().st_size < 24 or file.read(4) != MAGIC:
                raise LoadError(f"{path} is not a gguf file: it does not start with GGUF", field="model")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(self._data, path)
        cursor.take(4)
        version = int(cursor.scalar(4))
        if version not in SUPPORTED_VERSIONS:
            raise LoadError(f"gguf file {path} has version {version}; supported are 2 and 3", field="model")
        tensor_count = cursor.count("tensors")
        key_count = cursor.count("keys")
        self.metadata: dict[str, Value] = {}
        for _ in range(key_count):
            key = cursor.string()
            self.metadata[key] = cursor.value(int(cursor.scalar(4)))
        self.tensors = self._directory(cursor, tensor_count)

    def _directory(self, cursor: _Cursor, count: int) -> dict[str, TensorInfo]:
        entries: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(count):
            name = cursor.string()
            dims = int(cursor.scalar(4))
            if dims > 4:
                raise LoadError(f"gguf tensor {name} claims {dims} dimensions: the header is damaged", field="model")
            shape = tuple(int(cursor.scalar(10)) for _ in range(dims))
            kind, offset = int(cursor.scalar(4)), int(cursor.scalar(10))
            entries.append((name, shape[::-1], kind, offset))
        alignment = self.metadata.get("general.alignment", 32)
        step = alignment if isinstance(alignment, int) and alignment > 0 else 32
        start = -(-cursor.at // step) * step
        tensors = {name: self._entry(name, shape, kind, start + offset) for name, shape, kind, offset in entries}
        self._check_size(tensors)
        return tensors

    def _entry(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
        try:
            quant = GGMLQuantizationType(kind)
        except ValueError:
            raise LoadError(f"gguf tensor {name} has unknown type number {kind}", field="model") from None
        block, block_bytes = GGML_QUANT_SIZES[quant]
        count = int(np.prod(shape, dtype=np.int64)) if shape else 1
        return TensorInfo(name, shape, quant.name, offset, count // block * block_bytes)

    def _check_size(self, tensors: dict[str, TensorInfo]) -> None:
        needed = max((info.offset + info.size for info in tensors.values()), default=0)
        if needed > len(self._data):
            raise LoadError(
                f"gguf file {self.path} is truncated: its tensors need {needed} bytes, the file has"
                f" {len(self._data)}; download it again",
                field="model",
            )

    def check_types(self) -> None:
        """Refuse the file if any tensor has a type that cannot be dequantised here."""
        for info in self.tensors.values():
            if info.type_name not in SUPPORTED_TYPES:
                raise LoadError(
                    f"gguf tensor {info.name} has type {info.type_name}, which is not supported; use a file with"
                    f" {', '.join(SUPPORTED_TYPES)} only",
                    field="model",
                )

    def raw(self, name: str) -> memoryview:
        """The tensor's bytes as they are in the file: a read-only view of the mapping."""
        info = self.tensors[name]
        return memoryview(self._data)[info.offset : info.offset + info.size]

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor dequantised to float32, in row-major shape."""
        info = self.tensors[name]
        quant = GGMLQuantizationType[info.type_name]
        raw = np.frombuffer(self._data, dtype=np.uint8, count=info.size, offset=info.offset)
        if quant == GGMLQuantizationType.F32:
            return raw.view(np.float32).reshape(info.shape)
        if quant == GGMLQuantizationType.F16:
            return raw.view(np.float16).astype(np.float32).reshape(info.shape)
        if quant == GGMLQuantizationType.BF16:
            return (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(info.shape)
        block, block_bytes = GGML_QUANT_SIZES[quant]
        rows = raw.reshape(*info.shape[:-1], info.shape[-1] // block * block_bytes)
        result: npt.NDArray[np.float32] = dequantize(rows, quant).reshape(info.shape)
        return result
