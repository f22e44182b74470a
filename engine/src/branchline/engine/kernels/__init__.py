"""Kernels of the GPU path: pure functions on tensors. Each has three forms.

`NAME` chooses: Triton on a CUDA device, torch elsewhere. `NAME_reference` is the oracle in plain torch, on any device.
The Triton form has the name of the choice, stands in `kernels/compiled/` and is imported when first used, so that a
machine without Triton can import this package. No Triton form reads a tensor's contents on the host, so every call may
stand in a CUDA graph; sizes come from shapes and integers. The caller owns every tensor; `out=` and workspaces are
written, never kept. Faulty shapes, dtypes or options raise ValueError naming the argument, its value and what is
accepted.

attention.py
    Pages: `keys`, `values` [slots, kv_heads, head_dim] (one layer; any strides with a dense last dimension), slot =
    page * page_size + offset; `page_table` int32 [rows, pages], unused entries may hold anything. fp32, fp16, bf16, or
    float8_e4m3fn with `key_scale`, `value_scale` (floats: true value = stored * scale).
    decode_attention(queries [R, heads, head_dim], keys, values, page_table [R, P], context_lens int32 [R], *,
        page_size, scale=None (head_dim ** -0.5), window=None, key_scale=1.0, value_scale=1.0, split_tokens=None,
        max_context=None, invariant=False, workspace=None, out=None) -> [R, heads, head_dim]
        One new token a row, the last of its context. A context is cut every `split_tokens` tokens (a power of two) and
        the parts are merged in order: for one `split_tokens` a row's bits depend on the row alone. `max_context`
        (default P * page_size) bounds context_lens and sizes the grid. context_len 0 gives zeros: pad graphs with it.
    decode_workspace(rows, heads, head_dim, max_context, split_tokens=None, device) -> float32 tensor to pass as
        `workspace`; split_size(max_context) -> the default of split_tokens.
    prefill_attention(queries [T, heads, head_dim], keys, values, page_table [S, P], query_starts int32 [S + 1],
        context_lens int32 [S], tiles int32 [N, 2], *, page_size, scale, window, key_scale, value_scale,
        split_tokens=None, invariant=False, out=None) -> [T, heads, head_dim]
        Ragged: sequence s has new tokens query_starts[s]..query_starts[s + 1]-1, the last ones of its context.
        With `invariant` and the same split_tokens its bits are decode_attention's and independent of chunk borders.
    prefill_tiles(query_lens, heads, kv_heads, invariant=False) -> int32 numpy [N, 2] of (sequence, first new token in
        it): the launch plan, made once a step on the host.

norm.py
    rms_norm(x [rows, width], weight [width], eps, *, out=None) -> like x
    add_rms_norm(x [rows, width], residual [rows, width], weight, eps, *, out=None) -> like x; residual += x in place,
        the result is the norm of that sum. Statistics float32; one program a row, so bits never depend on company.

rope.py
    rope_write(projected [T, (heads + 2 kv_heads) * head_dim], cos, sin [positions, head_dim] (sin's first half negated,
        as RotaryTable keeps them), positions int64 [T], slots int64 [T], keys, values, *, heads, kv_heads,
        query_norm=None, key_norm=None ([head_dim]), eps=0.0, key_scale=1.0, value_scale=1.0, out=None)
        -> queries [T, heads, head_dim]. Norms (if given), turns and writes keys and values of all T tokens into the
        pool, saturating where it is float8. A slot below 0 writes nothing.

sampling.py
    sample(logits float32 [R, vocab], *, temperatures float32 [R], top_k int32 [R], top_p float32 [R],
        min_p float32 [R], seeds int64 [R], positions int64 [R], mask=None int32 [R, ceil(vocab / 32)],
        raw=None float32 [R, vocab])
        -> (token_ids int64 [R], logprobs float32 [R], status int32 [R]). `logits` have penalties, bias and bans (-inf)
        in them. Temperature 0 is argmax, lowest id among equals; the numbers drawn are engine/sampling/noise.py's, so a
        seed counts on every executor. logprobs are the chosen token's under `raw` (the model's own logits; default:
        `logits`). status: OK, UNUSABLE (raw NaN or infinite; without raw: NaN or +inf) or NOTHING_LEFT. Where it is not
        OK the token is 0.

pages.py
    copy_pages(pool [layers, 2, slots, kv_heads, head_dim], host [host_slots, layers, 2, page_size, kv_heads, head_dim],
        pages int64 [N], slots int64 [N], *, page_size, store: bool) -> None. store: pool to host, else host to pool.
        `host` is pinned host memory or a device tensor; all N in one launch.

linear.py
    linear_invariant(x [T, in], weight [out, in], bias=None, *, out=None) -> [T, out]. A row's bits depend on the row
        and the weight alone: cuts along `in` follow from the weight's shape, parts are added in order.
    quantize_e4m3(weight [out, in]) -> (float8_e4m3fn [out, in], scales float32 [out]).
    linear_e4m3(x [T, in], weight float8 [out, in], scales [out], bias=None, *, invariant=False, out=None) -> [T, out]
"""

from branchline.engine.kernels.attention import (
    decode_attention,
    decode_workspace,
    prefill_attention,
    prefill_tiles,
    split_size,
)
from branchline.engine.kernels.linear import linear_e4m3, linear_invariant, quantize_e4m3
from branchline.engine.kernels.norm import add_rms_norm, rms_norm
from branchline.engine.kernels.pages import copy_pages
from branchline.engine.kernels.rope import rope_write
from branchline.engine.kernels.sampling import NOTHING_LEFT, OK, UNUSABLE, sample

__all__ = [
    "NOTHING_LEFT",
    "OK",
    "UNUSABLE",
    "add_rms_norm",
    "copy_pages",
    "decode_attention",
    "decode_workspace",
    "linear_e4m3",
    "linear_invariant",
    "prefill_attention",
    "prefill_tiles",
    "quantize_e4m3",
    "rms_norm",
    "rope_write",
    "sample",
    "split_size",
]
