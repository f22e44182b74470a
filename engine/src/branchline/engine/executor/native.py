"""The native executor: Executor's methods over `branchline._native.CpuModel`. Needs no torch.

Built by `build_executor`, called from the step loop's one thread. Weights stay in the file's own types unless
another is asked for; a request's results are the same bits whatever else is in the step.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

from branchline import _native
from branchline.engine.errors import InternalError, LoadError
from branchline.engine.model.source import LoadedModel, StoredTensor
from branchline.engine.model.spec import ModelSpec
from branchline.engine.quantization.base import QuantizationMethod
from branchline.engine.types import ForwardBatch, PageMove, RowPlan, RowResult, SamplingParams

WEIGHT_TYPES = {
    "auto": "auto", "int8": "int8", "bfloat16": "bf16", "bf16": "bf16", "float32": "f32", "fp32": "f32",
}  # fmt: skip
KERNELS = 2  # counts up when kernels change the bits
_SPEC_FIELDS = (
    "hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab_size", "norm_eps", "rope_theta",
    "qk_norm",
)  # fmt: skip


class NativeExecutor:
    """Executor on the CPU; see `branchline.engine.types.Executor` for the contract."""

    api_version = 1

    def __init__(
        self, model: _native.CpuModel, spec: ModelSpec, *, num_pages: int, page_size: int, numerics_id: str
    ) -> None:
        self._model: _native.CpuModel | None = model
        self.vocab_size = spec.vocab_size
        self.num_pages = num_pages
        self.page_size = page_size
        self.numerics_id = numerics_id

    @property
    def model(self) -> _native.CpuModel:
        """The native model, for tests and diagnostics. Raises InternalError once closed."""
        if self._model is None:
            raise InternalError("executor is closed")
        return self._model

    def run(self, batch: ForwardBatch) -> object:
        """Run one step. The logits stay inside the model, valid until the next `run`."""
        return self.model.run(
            batch.token_ids,
            batch.positions,
            batch.slots,
            batch.query_lens,
            batch.context_lens,
            batch.page_tables,
            batch.logit_rows,
        )

    def sample(self, logits: object, plans: list[RowPlan]) -> list[RowResult]:
        """Answer each plan, in order; a bad row gets its own error."""
        del logits  # the model holds those of its last step
        return [RowResult(*fields) for fields in self.model.sample(plans)] if plans else []

    def penalty_state(self, prompt: tuple[int, ...], params: SamplingParams) -> object | None:
        """State for a sequence's penalties, or None if `params` has none."""
        if params.repetition_penalty == 1.0 and params.frequency_penalty == 0.0 and params.presence_penalty == 0.0:
            return None
        return _native.PenaltyState(
            prompt, params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        )

    def observe(self, state: object, token_id: int) -> None:
        """Count one generated token in a penalty state."""
        assert isinstance(state, _native.PenaltyState), "states come from penalty_state"
        state.observe(token_id)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page's keys and values."""
        return self.model.page_bytes()

    def reserve_host(self, slots: int) -> None:
        """Reserve the host tier. Raises LoadError if there is no memory for it."""
        try:
            self.model.reserve_host(slots)
        except ValueError as error:
            raise LoadError(str(error), field="host_cache_gib") from error

    def move_pages(self, moves: Sequence[PageMove]) -> None:
        """Copy pages between the tiers, in this order."""
        self.model.move_pages(moves)

    def read_pages(self, pages: Sequence[int]) -> bytes:
        """Keys and values of these pages, one after the other."""
        return self.model.read_pages(pages)

    def write_pages(self, pages: Sequence[int], data: bytes | memoryview) -> None:
        """Fill pages from what `read_pages` gave. Raises ValueError, and writes nothing, for another size."""
        self.model.write_pages(pages, data)

    def close(self) -> None:
        """Release memory and threads; idempotent."""
        if self._model is not None:
            self._model.close()
            self._model = None


def build_executor(
    model: LoadedModel,
    *,
    device: str,
    dtype: str,
    num_pages: int,
    page_size: int,
    threads: int | None,
    attention_backend: str = "auto",
    quantization: QuantizationMethod | None = None,
    weight_dtype: str = "auto",
    isa: str | None = None,
) -> NativeExecutor:
    """Pack the weights, reserve the KV pool and return a ready executor.

    `dtype` is auto (weights as stored), int8, bfloat16 or float32; with float32 the cache is float32 too, else
    16-bit integers with a scale a token and head. A quantisation method may ask for its own weight type;
    `weight_dtype` (auto, int8, bf16, f32) says what weights are requantised to, whatever else is asked for. `isa`
    forces portable, avx2 or avx512. `attention_backend` has no meaning here. Raises LoadError for an unknown device or
    dtype, faulty weights, or a pool that does not fit.
    """
    del attention_backend
    if device not in ("auto", "cpu"):
        raise LoadError(f"device {device!r} is not supported by the native executor; use cpu", field="device")
    if model.spec.experts is not None:
        raise LoadError(
            f"{model.spec.architecture} has experts, which the native executor does not run: use --executor torch",
            field="executor",
        )
    if dtype not in WEIGHT_TYPES:
        raise LoadError(f"dtype {dtype!r} is unknown; use auto, int8, bfloat16 or float32", field="dtype")
    if quantization is not None and "native" not in quantization.executors:
        raise LoadError(
            f"quantization {quantization.name!r} is not run by the native executor: use --executor torch",
            field="quantization",
        )
    asked = WEIGHT_TYPES[quantization.native_dtype or dtype if quantization is not None else dtype]
    if weight_dtype not in WEIGHT_TYPES.values():
        raise LoadError(f"weight dtype {weight_dtype!r} is unknown; use auto, int8, bf16 or f32", field="weight_dtype")
    cache = "f32" if asked == "f32" else "i16"
    weights = asked if weight_dtype == "auto" else weight_dtype
    try:
        built = _native.CpuModel(
            _fields(model.spec),
            num_pages=num_pages,
            page_size=page_size,
            threads=threads or 0,
            isa=isa,
            weight_dtype=weights,
            kv_dtype=cache,
        )
        _fill(built, model)
    except ValueError as error:
        raise LoadError(str(error), field="model") from error
    return NativeExecutor(
        built,
        model.spec,
        num_pages=num_pages,
        page_size=page_size,
        numerics_id=numerics_id(model.fingerprint, built.isa, weights, cache),
    )


def numerics_id(fingerprint: str, isa: str, weights: str, cache: str) -> str:
    """Hash of everything that changes the bits. Threads, page size and batches do not."""
    parts = ("native", str(KERNELS), isa, weights, cache, fingerprint)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _fields(spec: ModelSpec) -> dict[str, Any]:
    window = spec.sliding_window
    fields = {name: getattr(spec, name) for name in _SPEC_FIELDS}
    fields["sliding_window"] = window if window is not None and window < spec.context_length else None
    fields["rope_scaling"] = None if spec.rope_scaling is None else dataclasses.asdict(spec.rope_scaling)
    return fields


def _fill(built: _native.CpuModel, model: LoadedModel) -> None:
    names = model.tensors.in_file_order()
    if model.spec.tied_head and "lm_head.weight" in names:
        names.remove("lm_head.weight")
    elif not model.spec.tied_head and "lm_head.weight" not in names:
        raise LoadError("tensor lm_head.weight is missing and the head is not tied to the embedding", field="model")
    for done, name in enumerate(names):
        model.progress("packing weights", done, len(names))
        _add(built, name, model.tensors.stored(name))
    model.progress("packing weights", len(names), len(names))
    built.finish()


def _add(built: _native.CpuModel, name: str, tensor: StoredTensor) -> None:
    if len(tensor.shape) not in (1, 2):
        raise LoadError(
            f"tensor {name} has shape {list(tensor.shape)}; vectors and matrices are expected", field="model"
        )
    rows = tensor.shape[0]
    cols = tensor.shape[1] if len(tensor.shape) == 2 else 1
    built.add(name, tensor.type_name, rows, cols, tensor.data, tensor.interleaved_heads)
