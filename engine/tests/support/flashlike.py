"""What of flashinfer our backend calls, in plain torch, with its rules: plan before run and outside captures, a graph's
wrapper on its own buffers. Positions and names are those of flashinfer 0.6."""

from __future__ import annotations

import types
from typing import Any

import torch
from recorder import Recorder, RuleBroken


def module(recorder: Recorder) -> types.ModuleType:
    """To stand in sys.modules as `flashinfer`."""
    made: Any = types.ModuleType("flashinfer")

    class Decode(_Wrapper):
        def plan(
            self, indptr: Any, indices: Any, last_page_len: Any, num_qo_heads: int, num_kv_heads: int, head_dim: int,
            page_size: int, pos_encoding_mode: str = "NONE", window_left: int = -1, *, q_data_type: torch.dtype,
            kv_data_type: torch.dtype,
        ) -> None:  # fmt: skip
            queries = torch.arange(len(indptr), dtype=torch.int32)
            self._plan(queries, indptr, indices, last_page_len, (num_qo_heads, num_kv_heads, head_dim), page_size,
                       window_left, (q_data_type, kv_data_type))  # fmt: skip

    class Prefill(_Wrapper):
        def plan(
            self, qo_indptr: Any, paged_kv_indptr: Any, paged_kv_indices: Any, paged_kv_last_page_len: Any,
            num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool,
            window_left: int = -1, q_data_type: torch.dtype, kv_data_type: torch.dtype,
        ) -> None:  # fmt: skip
            if not causal:
                raise RuleBroken("new tokens must not see later ones")
            self._plan(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
                       (num_qo_heads, num_kv_heads, head_dim_qk), page_size, window_left,
                       (q_data_type, kv_data_type))  # fmt: skip

    for name, kind in (("BatchDecode", Decode), ("BatchPrefill", Prefill)):
        kind.recorder = recorder
        setattr(made, f"{name}WithPagedKVCacheWrapper", kind)
    return made  # type: ignore[no-any-return]


class _Wrapper:
    recorder: Recorder

    def __init__(
        self, workspace: torch.Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        use_tensor_cores: bool = False, paged_kv_indptr_buffer: Any = None, paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
    ) -> None:  # fmt: skip
        assert workspace.dtype == torch.uint8 and kv_layout == "NHD"
        self.graph = use_cuda_graph
        self.buffers = [paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer]
        self.planned = False
        self.staged = self.recorder.pinned(4096)  # as each real wrapper has, written by every plan

    def _plan(
        self, queries: Any, indptr: Any, indices: Any, last: Any, shape: Any, size: int, left: int, dtypes: Any
    ) -> None:
        if self.recorder.capturing:
            raise RuleBroken("plan inside a capture")
        for one in (queries, indptr, last, indices):
            assert one.dtype == torch.int32
        self.staged[: indptr.nbytes].copy_(indptr.view(torch.uint8))
        self.recorder.send(torch.empty_like(self.staged), self.staged)
        self.recorder.log.append("plan")
        if self.graph:
            assert len(indptr) == len(self.buffers[0]), "a graph's wrapper has a fixed number of rows"
            for buffer, values in zip(self.buffers, (indptr, indices, last), strict=True):
                buffer[: len(values)].copy_(values)
        else:
            self.buffers = [indptr.clone(), indices.clone(), last.clone()]
        self.queries, self.shape, self.size, self.left, self.dtypes = queries, shape, size, left, dtypes
        self.planned = True

    def run(self, queries: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Attention of `queries` [T, heads, head_dim] over `pages` [pages, page_size, kv_heads, head_dim]."""
        if not self.planned:
            raise RuleBroken("run before plan")
        assert (queries.dtype, pages[0].dtype) == self.dtypes
        heads, kv_heads, width = self.shape
        assert queries.shape[1:] == (heads, width) and pages[0].shape[1:] == (self.size, kv_heads, width)
        indptr, indices, last = self.buffers
        owners = list(range(len(last)))
        if not self.graph:
            owners = [row for row in owners for _ in range(self.queries[row], self.queries[row + 1])]
        most = len(indices) if self.graph else int((indptr[1:] - indptr[:-1]).max())
        places = torch.arange(most * self.size)
        result = []
        for token, row in enumerate(owners):
            length = (indptr[row + 1] - indptr[row] - 1) * self.size + last[row]
            at = length if self.graph else length - (self.queries[row + 1] - 1 - token)
            seen = places < at
            if self.left >= 0:
                seen = seen & (places >= at - 1 - self.left)
            page = indices[(indptr[row] + places // self.size).clamp(max=len(indices) - 1)]
            key, value = (
                torch.where(seen[:, None, None], pool[page.long(), places % self.size].float(), 0.0) for pool in pages
            )
            asked = queries[token].float().view(kv_heads, heads // kv_heads, width)
            scores = torch.einsum("kgd,skd->kgs", asked, key) * width**-0.5
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            result.append(torch.einsum("kgs,skd->kgd", weights, value).reshape(heads, width))
        return torch.stack(result).to(queries.dtype)
