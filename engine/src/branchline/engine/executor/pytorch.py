"""The torch executor: Executor's methods over a Decoder and the sampler.

Built by `build_executor`, called from the step loop's one thread. Device errors other than a bad row are
raised: they concern the whole process. Works on `cpu` and on `cuda` devices with the same code.
"""

from __future__ import annotations

import hashlib

import torch

from branchline.engine.attention.base import AttentionBackend, AttentionShape
from branchline.engine.errors import InternalError, LoadError
from branchline.engine.executor.decoder import Decoder
from branchline.engine.executor.holding import HoldsPages
from branchline.engine.executor.on_torch import SamplesOnTorch, device_of, dtype_of
from branchline.engine.executor.weights import load_weights
from branchline.engine.model.adapter import Adapter
from branchline.engine.model.source import LoadedModel
from branchline.engine.model.spec import ModelSpec
from branchline.engine.quantization.base import QuantizationMethod
from branchline.engine.types import ForwardBatch
from branchline.registry import attention_backends


class TorchExecutor(SamplesOnTorch, HoldsPages):
    """Executor on torch; see `branchline.engine.types.Executor` for the contract."""

    api_version = 1

    def __init__(self, decoder: Decoder, spec: ModelSpec, *, num_pages: int, page_size: int, numerics_id: str) -> None:
        self._decoder: Decoder | None = decoder
        self.vocab_size = spec.vocab_size
        self.num_pages = num_pages
        self.page_size = page_size
        self.numerics_id = numerics_id

    def run(self, batch: ForwardBatch) -> object:
        """Logits float32 [R, vocab] on the executor's device, valid until the next `run`."""
        if self._decoder is None:
            raise InternalError("executor is closed")
        with torch.inference_mode():
            return self._decoder.forward(batch)

    def hidden(self) -> object:
        """The normed last hidden states [R, hidden] of the latest logits rows, for speculative heads."""
        return self.decoder.hidden

    def load_adapter(self, number: int, adapter: Adapter) -> None:
        """Convert an adapter's weights. Any thread. Raises LoadError."""
        self.decoder.adapters.load(number, adapter)

    def unload_adapter(self, number: int) -> None:
        """Free an adapter that no batch names any more. Any thread."""
        if self._decoder is not None:
            self._decoder.adapters.unload(number)

    @property
    def pool(self) -> torch.Tensor:
        """See HoldsHost."""
        return self.decoder.pool

    def close(self) -> None:
        """Drop weights and pool; idempotent."""
        self._decoder = None
        self._host = None

    @property
    def decoder(self) -> Decoder:
        """The decoder, for tests and diagnostics. Raises InternalError once closed."""
        if self._decoder is None:
            raise InternalError("executor is closed")
        return self._decoder


def build_executor(
    model: LoadedModel,
    *,
    device: str,
    dtype: str,
    num_pages: int,
    page_size: int,
    threads: int | None,
    attention_backend: str,
    quantization: QuantizationMethod | None = None,
) -> TorchExecutor:
    """Convert the weights, reserve the KV pool and return a ready executor.

    `dtype` is float32, bfloat16, float16 or auto (float32 on a CPU, else bfloat16). Raises LoadError for an
    unknown device or dtype, faulty weights, or a pool that does not fit.
    """
    target = device_of(device)
    kind = dtype_of(dtype, target)
    if threads is not None:
        torch.set_num_threads(threads)
    spec = model.spec
    shape = AttentionShape(spec.heads, spec.kv_heads, spec.head_dim, page_size, _window(spec))
    factory = attention_backends.get(attention_backend)
    attention: AttentionBackend = factory(shape, target)  # type: ignore[assignment]
    weights = load_weights(model, target, kind, quantization)
    try:
        decoder = Decoder(spec, weights, attention, num_pages * page_size)
    except (RuntimeError, MemoryError) as error:
        size = spec.page_bytes(page_size, kind.itemsize) * num_pages
        raise LoadError(
            f"kv pool of {num_pages} pages ({size / 2**30:.1f} GiB) does not fit on {device}; lower the page count",
            field="num_pages",
        ) from error
    return TorchExecutor(
        decoder,
        spec,
        num_pages=num_pages,
        page_size=page_size,
        numerics_id=numerics_id(model, target, kind, attention_backend, quantization.name if quantization else ""),
    )


def numerics_id(
    model: LoadedModel, device: torch.device, dtype: torch.dtype, attention_backend: str, quantization: str = ""
) -> str:
    """Hash of everything known to change the bits: weights, dtype, device, library, instruction set, threads."""
    if device.type == "cuda":
        unit = torch.cuda.get_device_name(device)
    else:
        unit = f"{torch.backends.cpu.get_cpu_capability()}/{torch.get_num_threads()}"
    parts = (
        "torch",
        torch.__version__,
        str(dtype),
        device.type,
        unit,
        attention_backend,
        quantization,
        model.fingerprint,
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _window(spec: ModelSpec) -> int | None:
    """The window, unless no sequence can be longer than it."""
    window = spec.sliding_window
    return window if window is not None and window < spec.context_length else None
