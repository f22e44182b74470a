"""The executor `transformers`: any causal language model that the package transformers has, slowly.

A page holds token ids, not keys and values: every step computes the whole context of each row that wants logits, so
paging, prefix sharing, forks and retraction are right by construction, and cost grows with the square of the length.
For architectures without a family of ours, and to compare with. Never runs code of a checkpoint.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import torch

from branchline.engine.errors import InternalError, LoadError
from branchline.engine.executor.on_torch import SamplesOnTorch, device_of, dtype_of
from branchline.engine.model.source import LoadedModel
from branchline.engine.types import ForwardBatch

logger = logging.getLogger(__name__)


class TransformersExecutor(SamplesOnTorch):
    """Executor; see `branchline.engine.types.Executor` for the contract. `model` maps ids [1, L] to logits."""

    api_version = 1

    def __init__(self, model: Any, vocab_size: int, *, num_pages: int, page_size: int, numerics_id: str) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._ids = torch.zeros(num_pages * page_size, dtype=torch.int64)  # [slots]
        self.vocab_size = vocab_size
        self.num_pages = num_pages
        self.page_size = page_size
        self.numerics_id = numerics_id

    def run(self, batch: ForwardBatch) -> object:
        """Logits float32 [R, vocab], valid until the next `run`."""
        if self._model is None:
            raise InternalError("executor is closed")
        self._ids[torch.from_numpy(batch.slots)] = torch.from_numpy(batch.token_ids).to(torch.int64)
        wanted = batch.logit_rows.tolist()
        found: list[torch.Tensor] = []
        offset = at = 0
        with torch.inference_mode():
            for count, length, table in zip(
                batch.query_lens.tolist(), batch.context_lens.tolist(), batch.page_tables, strict=True
            ):
                here = []
                while at < len(wanted) and wanted[at] < offset + count:
                    here.append(length - count + wanted[at] - offset)
                    at += 1
                if here:
                    found.append(self._forward(table, length)[here])
                offset += count
        return torch.cat(found) if found else torch.empty((0, self.vocab_size))

    def _forward(self, table: list[int], length: int) -> torch.Tensor:
        """Logits float32 [length, vocab] of one context."""
        size = self.page_size
        pages = torch.tensor(table[: -(-length // size)], dtype=torch.int64)
        slots = (pages[:, None] * size + torch.arange(size)).flatten()[:length]
        answer = self._model(input_ids=self._ids[slots][None].to(self._device), use_cache=False)
        logits: torch.Tensor = answer.logits[0, :, : self.vocab_size].float()
        return logits

    def close(self) -> None:
        """Drop the weights; idempotent."""
        self._model = None


def build_executor(
    model: LoadedModel,
    *,
    device: str,
    dtype: str,
    num_pages: int,
    page_size: int,
    threads: int | None,
    attention_backend: str,
    quantization: object | None = None,
) -> TransformersExecutor:
    """Load the folder's weights by transformers. Raises LoadError if they can't be, or are quantised."""
    if not model.path.is_dir():
        raise LoadError("the executor transformers needs a Hugging Face folder, and this is a file", field="executor")
    if quantization is not None or model.quantization:
        raise LoadError("the executor transformers runs no quantised weights: leave quantization out", field="executor")
    try:
        import transformers
    except ImportError:
        raise LoadError(
            "the executor transformers needs the package transformers: run pip install 'branchline[transformers]'",
            field="executor",
        ) from None
    if threads is not None:
        torch.set_num_threads(threads)
    target = device_of(device)
    kind = dtype_of(dtype, target)
    try:
        factory: Any = transformers.AutoModelForCausalLM
        loaded, report = factory.from_pretrained(
            model.path,
            dtype=kind,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise LoadError(f"transformers can't load {model.path}: {error}", field="model") from error
    _refuse_invented(report, model)
    logger.warning(
        "%s runs by transformers: every step computes whole contexts, which is slow", model.spec.architecture
    )
    parts = ("transformers", transformers.__version__, torch.__version__, str(kind), str(target), model.fingerprint)
    return TransformersExecutor(
        loaded.to(target).eval(),
        model.spec.vocab_size,
        num_pages=num_pages,
        page_size=page_size,
        numerics_id=hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16],
    )


def _refuse_invented(report: dict[str, Any], model: LoadedModel) -> None:
    """transformers gives weights that the checkpoint lacks random values and goes on."""
    mismatched = [name if isinstance(name, str) else name[0] for name in report["mismatched_keys"]]
    absent = sorted({*report["missing_keys"], *mismatched})
    if absent:
        raise LoadError(
            f"the checkpoint in {model.path} is not one of {model.spec.architecture}: {len(absent)} of its weights are "
            f"missing or of another shape, first {absent[0]!r}; check 'architectures' in config.json",
            field="model",
        )
