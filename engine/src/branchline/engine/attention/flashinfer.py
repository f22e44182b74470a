"""Paged attention by flashinfer: its prefill and decode wrappers over our pool, planned once a step.

A step of decode rows takes the decode wrapper, any other one the prefill wrapper, which computes decode rows as
prompts of one token. Each graph has a wrapper of its own, planned again before each replay. Splits are chosen by
flashinfer from the whole batch, so bits depend on company: `--deterministic` does not use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from branchline.engine.attention.base import AttentionShape, Upload
from branchline.engine.attention.tables import I32, PageRows
from branchline.engine.errors import LoadError
from branchline.engine.types import ForwardBatch

WORKSPACE = 256 << 20  # bytes of partial results, shared by all wrappers: they run one after the other
TENSOR_CORE_GROUP = 4  # query heads a key head from which decode is faster as small prompts


@dataclass(slots=True)
class FlashinferPlan:
    """A planned wrapper; for a graph with the most pages that its buffers hold."""

    wrapper: Any
    rows: int = 0
    pages: int = 0


class FlashinferAttention:
    """See AttentionBackend and GraphAttention; registered as `flashinfer`."""

    api_version = 1

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        """Raises LoadError if the package is not installed."""
        self._library = _library()
        self._shape = shape
        self._device = device
        self._upload: Upload | None = None
        self._tensor_cores = shape.heads // shape.kv_heads >= TENSOR_CORE_GROUP
        self._workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
        self._prefill = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        self._decode = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=self._tensor_cores
        )
        self._rows = PageRows()
        self._dtypes = (torch.bfloat16, torch.bfloat16)  # of queries and of the pool
        self._window = -1 if shape.window is None else shape.window - 1  # without the token itself

    def connect(self, upload: Upload, queries: torch.dtype, pool: torch.dtype) -> None:
        """See GraphAttention. Kernels are chosen at planning by the dtypes."""
        if queries == torch.float32:
            raise LoadError(
                "attention-backend flashinfer has no float32 kernels: give --dtype bfloat16, or another backend",
                field="attention_backend",
            )
        self._upload = upload
        self._dtypes = (queries, pool)

    # ---- planning ---------------------------------------------------------------------------

    def plan(self, batch: ForwardBatch) -> object:
        """See AttentionBackend."""
        starts, pages = self._rows.joined(batch, self._shape.page_size)
        if (batch.query_lens == 1).all():
            self._plan_decode(self._decode, batch, starts, pages)
            return FlashinferPlan(self._decode)
        queries = np.zeros(len(batch.query_lens) + 1, dtype=np.int32)
        np.cumsum(batch.query_lens, out=queries[1:])
        shape = self._shape
        self._prefill.plan(
            torch.from_numpy(queries),
            torch.from_numpy(starts),
            self._device_pages(pages),
            torch.from_numpy(self._last(batch)),
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.page_size,
            causal=True,
            window_left=self._window,
            q_data_type=self._dtypes[0],
            kv_data_type=self._dtypes[1],
        )
        return FlashinferPlan(self._prefill)

    def prepare(self, rows: int, pages: int) -> object:
        """See GraphAttention: a wrapper on buffers of its own."""

        def room(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=self._device)

        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=self._tensor_cores,
            paged_kv_indptr_buffer=room(rows + 1),
            paged_kv_indices_buffer=room(rows * pages),
            paged_kv_last_page_len_buffer=room(rows),
        )
        return FlashinferPlan(wrapper, rows, pages)

    def update(self, plan: object, batch: ForwardBatch) -> None:
        """See GraphAttention."""
        assert isinstance(plan, FlashinferPlan), "plan comes from this backend"
        starts, pages = self._rows.joined(batch, self._shape.page_size)
        self._plan_decode(plan.wrapper, batch, starts, pages)

    def _plan_decode(self, wrapper: Any, batch: ForwardBatch, starts: I32, pages: I32) -> None:
        shape = self._shape
        # Host arrays where flashinfer looks at them itself, so that planning does not wait for the device.
        wrapper.plan(
            torch.from_numpy(starts),
            self._device_pages(pages),
            torch.from_numpy(self._last(batch)),
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.page_size,
            window_left=self._window,
            q_data_type=self._dtypes[0],
            kv_data_type=self._dtypes[1],
        )

    def _device_pages(self, pages: I32) -> torch.Tensor:
        if self._upload is None:
            return torch.from_numpy(pages).to(self._device)
        return self._upload({"pages": pages})["pages"]

    def _last(self, batch: ForwardBatch) -> npt.NDArray[np.int32]:
        """Positions on each sequence's last page, 1 to page_size."""
        last: npt.NDArray[np.int32] = (batch.context_lens - 1) % self._shape.page_size + 1
        return last.astype(np.int32)

    # ---- attending --------------------------------------------------------------------------

    def attend(self, plan: object, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """See AttentionBackend."""
        assert isinstance(plan, FlashinferPlan), "plan comes from this backend"
        shape = self._shape
        paged = (-1, shape.page_size, shape.kv_heads, shape.head_dim)
        answer: torch.Tensor = plan.wrapper.run(queries, (keys.view(paged), values.view(paged)))
        return answer.reshape(queries.shape[0], -1)


def _library() -> Any:
    try:
        import flashinfer
    except ImportError as error:
        raise LoadError(
            f"attention-backend flashinfer can't be loaded ({error}): install flashinfer-python, or use another one",
            field="attention_backend",
        ) from None
    return flashinfer


def build(shape: AttentionShape, device: torch.device) -> FlashinferAttention:
    """Factory for the registry."""
    return FlashinferAttention(shape, device)
