"""Copies pages between a pool and the host tier, all of a step in one launch: the oracle, and the choice of a form.

See `branchline.engine.kernels` for shapes. A page of the pool is 2 * layers pieces that lie apart; one memory copy a
piece would cost a launch each, and a strided copy goes through a temporary tensor.
"""

from __future__ import annotations

import torch

from branchline.engine.kernels import checks


def copy_pages(
    pool: torch.Tensor, host: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, *, page_size: int, store: bool
) -> None:
    """Copy pool page pages[i] to host slot slots[i] (`store`), or the other way. No page or slot stands twice."""
    checks.power_of_two("page_size", page_size)
    checks.shaped("pool", pool, None, 2, None, None, None)
    layers, _, _, heads, width = pool.shape
    checks.shaped("host", host, None, layers, 2, page_size, heads, width)
    checks.integers("pages", pages, torch.int64, None)
    checks.integers("slots", slots, torch.int64, pages.shape[0])
    if pool.dtype != host.dtype:
        raise ValueError(f"host has dtype {host.dtype}; use that of the pool, {pool.dtype}")
    if not (pool.is_contiguous() and host.is_contiguous()):
        raise ValueError("pool and host are not both contiguous; pass the whole tensors")
    if not checks.on_triton(pool):
        copy_pages_reference(pool, host, pages, slots, page_size, store)
        return
    if host.device.type == "cpu" and not host.is_pinned():
        raise ValueError("host is pageable memory, which a GPU cannot reach; allocate it with pin_memory=True")
    from branchline.engine.kernels.compiled import pages as compiled

    compiled.copy_pages(pool, host, pages, slots, page_size, store)


def copy_pages_reference(
    pool: torch.Tensor, host: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, page_size: int, store: bool
) -> None:
    """The oracle: page by page."""
    for page, slot in zip(pages.tolist(), slots.tolist(), strict=True):
        inside = pool[:, :, page * page_size : (page + 1) * page_size]
        if store:
            host[slot].copy_(inside)
        else:
            inside.copy_(host[slot])
