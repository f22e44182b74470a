"""Which attention backend `auto` is for the executor `torch-cuda`. Imports no torch: plans are made before it is."""

from __future__ import annotations

import importlib.util

INVARIANT = ("fixed", "triton_invariant")
"""Backends whose bits depend on a token's own context alone."""


def choose_attention(device: str, dtype: str, page_size: int, *, deterministic: bool) -> tuple[str, str]:
    """(backend, reason). On a GPU flashinfer where it is installed and has kernels for the dtype, else our own kernels
    where Triton is; with `deterministic` those with fixed splits. Elsewhere plain torch."""
    on_gpu = not device.startswith("cpu")
    if not on_gpu or not _is_installed("triton") or page_size & (page_size - 1):
        reason = "the device is a cpu" if not on_gpu else "triton is not installed, or page-size is no power of two"
        return ("fixed" if deterministic else "torch_paged"), reason
    if deterministic:
        return "triton_invariant", "deterministic is asked for"
    if dtype in ("bfloat16", "float16") and _is_installed("flashinfer"):
        return "flashinfer", "it is installed"
    return "triton", "flashinfer is not installed, or has no kernels for the dtype"


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
