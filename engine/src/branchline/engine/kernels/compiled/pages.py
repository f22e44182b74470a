"""The page copy in Triton. Host memory is reached through its mapped address, so one kernel serves both directions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WORDS = 1024  # 64-bit words a program moves at once


@triton.jit
def copy_piece(
    pool, host, pages, slots, pieces, piece_words, pool_piece, BLOCK: tl.constexpr, STORE: tl.constexpr
):  # fmt: skip
    """(page, piece): one layer's keys or values of one page."""
    move, piece = tl.program_id(0), tl.program_id(1)
    page, slot = tl.load(pages + move), tl.load(slots + move)
    inside = pool + piece.to(tl.int64) * pool_piece + page * piece_words
    outside = host + (slot * pieces + piece) * piece_words
    for start in range(0, piece_words, BLOCK):
        at = start + tl.arange(0, BLOCK)
        real = at < piece_words
        if STORE:
            tl.store(outside + at, tl.load(inside + at, mask=real), mask=real)
        else:
            tl.store(inside + at, tl.load(outside + at, mask=real), mask=real)


def copy_pages(
    pool: torch.Tensor, host: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, page_size: int, store: bool
) -> None:
    """Copy; arguments are checked. Moves the widest words that a piece is made of."""
    if not pages.shape[0]:
        return
    layers, two, all_slots, heads, width = pool.shape
    piece_bytes = page_size * heads * width * pool.element_size()
    word = next(kind for kind in (torch.int64, torch.int32, torch.int16, torch.int8) if not piece_bytes % kind.itemsize)
    copy_piece[(pages.shape[0], layers * two)](
        pool.view(-1).view(word), host.view(-1).view(word), pages, slots, layers * two, piece_bytes // word.itemsize,
        all_slots * heads * width * pool.element_size() // word.itemsize, BLOCK=WORDS, STORE=store, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
