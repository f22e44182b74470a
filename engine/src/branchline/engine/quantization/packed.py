"""`awq` and `gptq` checkpoints: int32 words of 4-bit (gptq: also 8-bit) codes, a scale and a zero a group.

A weight is (code − zero) · scale. 4-bit groups in input order become Q4_1 blocks, which say the same up to the
rounding of scale · zero to half precision, so the native executor multiplies them as 4-bit; everything else is
given as float32. Imports torch only to hand a tensor over.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from branchline.engine.errors import LoadError
from branchline.engine.model.source import LoadedModel, RawSource, StoredTensor, TensorSource
from branchline.engine.quantization.base import Matrix

if TYPE_CHECKING:
    import torch

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where output column j of eight lies in its word
BLOCK = 32  # values of a Q4_1 block


def unpack(words: npt.NDArray[Any], bits: int, axis: int, order: tuple[int, ...] | None = None) -> I32:
    """Codes of int32 words, 32/bits a word along `axis`, lowest bits first or in the given order."""
    per_word = 32 // bits
    places = order if order is not None else range(per_word)
    shifts = np.array([place * bits for place in places], np.uint32)
    wide = np.expand_dims(words.view(np.uint32), axis + 1)
    shape = [1] * wide.ndim
    shape[axis + 1] = per_word
    codes = (wide >> shifts.reshape(shape)) & np.uint32((1 << bits) - 1)
    merged = list(words.shape)
    merged[axis] *= per_word
    return np.ascontiguousarray(codes.reshape(merged)).astype(np.int32)


@dataclasses.dataclass(frozen=True, slots=True)
class Grouped:
    """One matrix: `codes` [out, in], `scales` and `zeros` [out, groups], `group` [in] the group of each input."""

    codes: I32
    scales: F32
    zeros: I32
    group: I32
    bits: int

    def values(self) -> F32:
        """float32 [out, in]."""
        zeros = self.zeros[:, self.group]
        result: F32 = (self.codes - zeros).astype(np.float32) * self.scales[:, self.group]
        return result

    def is_blocked(self) -> bool:
        """Whether every run of BLOCK inputs has one group, as Q4_1 needs."""
        blocks = len(self.group) // BLOCK
        if self.bits != 4 or len(self.group) % BLOCK:
            return False
        runs = self.group.reshape(blocks, BLOCK)
        return bool((runs == runs[:, :1]).all())

    def blocks(self) -> bytes:
        """The matrix in Q4_1: scale and minimum as float16, then 16 bytes of which low halves come first."""
        rows, count = self.codes.shape[0], len(self.group) // BLOCK
        group = self.group.reshape(count, BLOCK)[:, 0]
        scales = self.scales[:, group].astype(np.float16)
        least = (-self.scales[:, group] * self.zeros[:, group]).astype(np.float16)
        codes = self.codes.reshape(rows, count, 2, BLOCK // 2).astype(np.uint8)
        packed = codes[:, :, 0] | codes[:, :, 1] << 4
        head = np.stack((scales, least), axis=-1).view(np.uint8)
        return np.concatenate((head, packed), axis=-1).tobytes()


class PackedTensors:
    """TensorSource over a packed checkpoint: `X.weight` stands for `X.qweight`, `X.qzeros` and `X.scales`."""

    def __init__(self, source: TensorSource, read: Reader) -> None:
        if not isinstance(source, RawSource):
            raise LoadError("packed weights can be read from safetensors files only", field="model")
        self._source: Any = source
        self._read = read
        names = source.names()
        self._packed = {name.removesuffix(".qweight") for name in names if name.endswith(".qweight")}
        parts = {f"{stem}.{part}" for stem in self._packed for part in ("qweight", "qzeros", "scales", "g_idx")}
        self._names = (names - parts) | {f"{stem}.weight" for stem in self._packed}
        for stem in sorted(self._packed):
            missing = [part for part in ("qzeros", "scales") if f"{stem}.{part}" not in names]
            if missing:
                raise LoadError(f"tensor {stem}.{missing[0]} is missing: the checkpoint is incomplete", field="model")

    def names(self) -> set[str]:
        """Canonical names."""
        return set(self._names)

    def in_file_order(self) -> list[str]:
        """Canonical names by where their bytes lie; a packed tensor stands where its codes are."""
        places = (name.removesuffix(".qweight") + ".weight" if name.endswith(".qweight") else name
                  for name in self._source.in_file_order())  # fmt: skip
        return [name for name in places if name in self._names]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the unpacked tensor."""
        stem = self._stem(name)
        return self._source.shape(name) if stem is None else self._read.shape(self._source, stem)

    def read(self, name: str) -> torch.Tensor:
        """float32 values of a packed tensor; others as they are."""
        import torch

        stem = self._stem(name)
        return self._source.read(name) if stem is None else torch.from_numpy(self._grouped(stem).values())

    def stored(self, name: str) -> StoredTensor:
        """Q4_1 where the groups allow it, else F32; others as they are."""
        stem = self._stem(name)
        if stem is None:
            return self._source.stored(name)  # type: ignore[no-any-return]
        grouped = self._grouped(stem)
        if grouped.is_blocked():
            return StoredTensor("Q4_1", grouped.codes.shape, grouped.blocks())
        return StoredTensor("F32", grouped.codes.shape, grouped.values().tobytes())

    def _stem(self, name: str) -> str | None:
        stem = name.removesuffix(".weight")
        return stem if name.endswith(".weight") and stem in self._packed else None

    def _grouped(self, stem: str) -> Grouped:
        grouped = self._read(self._source, stem)
        if int(grouped.group.max(initial=0)) >= grouped.scales.shape[1] or int(grouped.group.min(initial=0)) < 0:
            raise LoadError(f"{stem}.g_idx names a group that {stem}.scales lacks", field="model")
        if grouped.zeros.shape != grouped.scales.shape or len(grouped.group) != grouped.codes.shape[1]:
            raise LoadError(
                f"tensor {stem} is damaged: {grouped.codes.shape[1]} inputs, {len(grouped.group)} group numbers, "
                f"scales {list(grouped.scales.shape)} and zeros {list(grouped.zeros.shape)} do not fit together",
                field="model",
            )
        return grouped


class Reader(abc.ABC):
    """Reads one packed matrix; which way depends on the format and its settings."""

    def __init__(self, bits: int, group_size: int) -> None:
        self.bits = bits
        self.group_size = group_size

    @abc.abstractmethod
    def __call__(self, source: RawSource, stem: str) -> Grouped:
        """The matrix under `stem`."""

    @abc.abstractmethod
    def shape(self, source: TensorSource, stem: str) -> tuple[int, ...]:
        """(out, in) without reading."""

    def _groups(self, inputs: int) -> I32:
        size = self.group_size if self.group_size > 0 else inputs
        return (np.arange(inputs) // size).astype(np.int32)


class AwqReader(Reader):
    """qweight [in, out/8], qzeros [groups, out/8], scales [groups, out]; columns of a word are interleaved."""

    def __call__(self, source: RawSource, stem: str) -> Grouped:
        """See Reader."""
        codes = unpack(source.raw(f"{stem}.qweight", "I32"), 4, 1, AWQ_ORDER).T
        zeros = unpack(source.raw(f"{stem}.qzeros", "I32"), 4, 1, AWQ_ORDER).T
        scales = source.raw(f"{stem}.scales").T.astype(np.float32)
        return Grouped(np.ascontiguousarray(codes), scales, zeros, self._groups(codes.shape[1]), 4)

    def shape(self, source: TensorSource, stem: str) -> tuple[int, ...]:
        """See Reader."""
        inputs, words = source.shape(f"{stem}.qweight")
        return words * 8, inputs


class GptqReader(Reader):
    """qweight [in·bits/32, out], qzeros [groups, out·bits/32], scales [groups, out], g_idx [in] if it says so."""

    def __init__(self, bits: int, group_size: int, zero_offset: int) -> None:
        super().__init__(bits, group_size)
        self.zero_offset = zero_offset  # the first format stores zero − 1

    def __call__(self, source: RawSource, stem: str) -> Grouped:
        """See Reader."""
        codes = np.ascontiguousarray(unpack(source.raw(f"{stem}.qweight", "I32"), self.bits, 0).T)
        zeros = unpack(source.raw(f"{stem}.qzeros", "I32"), self.bits, 1).T + self.zero_offset
        scales = source.raw(f"{stem}.scales").T.astype(np.float32)
        name = f"{stem}.g_idx"
        group = source.raw(name, "I32").astype(np.int32) if name in source.names() else self._groups(codes.shape[1])
        return Grouped(codes, scales, zeros.astype(np.int32), group, self.bits)

    def shape(self, source: TensorSource, stem: str) -> tuple[int, ...]:
        """See Reader."""
        words, outputs = source.shape(f"{stem}.qweight")
        return outputs, words * (32 // self.bits)


class _Packed(abc.ABC):
    """What the two methods share."""

    api_version = 1
    executors = ("native", "torch", "torch-cuda")
    native_dtype = ""
    of_checkpoint = True
    name = ""

    def open(self, model: LoadedModel) -> LoadedModel:
        """The checkpoint with packed matrices under their canonical names."""
        reader = self._reader(model.quantization)
        return dataclasses.replace(model, tensors=PackedTensors(model.tensors, reader), quantization={})

    def matrix(self, weight: torch.Tensor) -> Matrix | None:
        """Kept as dequantised."""
        return None

    @abc.abstractmethod
    def _reader(self, settings: Mapping[str, Any]) -> Reader:
        """How matrices of these settings are read."""


class Awq(_Packed):
    """QuantizationMethod of AWQ checkpoints (4 bits, gemm layout)."""

    name = "awq"

    def _reader(self, settings: Mapping[str, Any]) -> Reader:
        bits, version = settings.get("bits", 4), str(settings.get("version", "gemm")).lower()
        if bits != 4 or version != "gemm":
            raise LoadError(
                f"awq with bits {bits} and version {version!r} is not supported: only 4 bits in the gemm layout are",
                field="model.quantization_config",
            )
        return AwqReader(4, _group_size(settings))


class Gptq(_Packed):
    """QuantizationMethod of GPTQ checkpoints (4 or 8 bits, with or without activation order)."""

    name = "gptq"

    def _reader(self, settings: Mapping[str, Any]) -> Reader:
        bits = settings.get("bits")
        if bits not in (4, 8):
            raise LoadError(
                f"gptq with bits {bits!r} is not supported: 4 and 8 are", field="model.quantization_config.bits"
            )
        second = settings.get("checkpoint_format") == "gptq_v2"
        return GptqReader(int(bits), _group_size(settings), 0 if second else 1)


def _group_size(settings: Mapping[str, Any]) -> int:
    """Inputs a group; −1 for one group a row."""
    size = settings.get("group_size", settings.get("q_group_size", 128))
    if isinstance(size, bool) or not isinstance(size, int) or not (size == -1 or size > 0):
        raise LoadError(
            f"group_size is {size!r}: it must be positive, or -1 for one group a row",
            field="model.quantization_config.group_size",
        )
    return size
