"""What all kernels ask of their arguments, and where they run. Called first by every public form."""

from __future__ import annotations

import functools
import importlib.util

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
E4M3 = torch.float8_e4m3fn
E4M3_LARGEST = 448.0


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def on_triton(tensor: torch.Tensor) -> bool:
    """Whether the Triton form runs for this tensor: it is on a CUDA device, and Triton is there."""
    return tensor.is_cuda and has_triton()


def power_of_two(name: str, value: int) -> None:
    """Raises ValueError unless `value` is a power of two, 1 included."""
    if value < 1 or value & (value - 1):
        raise ValueError(f"{name} is {value}; use a power of two")


def float_kind(name: str, tensor: torch.Tensor, *, e4m3: bool = False) -> None:
    """Raises ValueError for a dtype that no kernel computes from."""
    accepted = (*FLOATS, E4M3) if e4m3 else FLOATS
    if tensor.dtype not in accepted:
        raise ValueError(f"{name} has dtype {tensor.dtype}; use one of {', '.join(str(kind) for kind in accepted)}")


def integers(name: str, tensor: torch.Tensor, dtype: torch.dtype, *shape: int | None) -> None:
    """Raises ValueError unless `tensor` is a dense index tensor of this dtype and shape; None accepts any size."""
    shaped(name, tensor, *shape)
    if tensor.dtype != dtype:
        raise ValueError(f"{name} has dtype {tensor.dtype}; use {dtype}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}; pass a contiguous tensor")


def shaped(name: str, tensor: torch.Tensor, *shape: int | None) -> None:
    """Raises ValueError unless the shape is this one; None accepts any size."""
    fits = tensor.dim() == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} has shape {list(tensor.shape)}; use [{wanted}]")


def dense_rows(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError unless the last dimension is dense."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
        raise ValueError(f"{name} has strides {tensor.stride()}; its last dimension must be dense")


def result_like(out: torch.Tensor | None, like: torch.Tensor, *shape: int) -> torch.Tensor:
    """`out` once checked, or a new contiguous tensor of this shape in the dtype of `like`."""
    if out is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    shaped("out", out, *shape)
    if out.dtype != like.dtype or not out.is_contiguous():
        raise ValueError(f"out is {out.dtype} with strides {out.stride()}; use a contiguous {like.dtype} tensor")
    return out
