"""What the launches share: the interpreter's switch, the processors at hand, rounded block sizes."""

from __future__ import annotations

import functools

import torch
import triton

PROGRAMS_A_PROCESSOR = 4  # enough to hide the latency of loads
PROCESSORS_ELSEWHERE = 132  # assumed where there is no GPU to ask


def is_wide(tensor: torch.Tensor) -> bool:
    """Whether a kernel casts to float32 right after its loads."""
    return bool(triton.knobs.runtime.interpret) or tensor.dtype == torch.float32


def block(size: int, least: int = 1) -> int:
    """The power of two that holds `size`, and no less than `least`."""
    return max(least, 1 << (size - 1).bit_length())


def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a device."""
    return _processors(device.index or 0) if device.type == "cuda" else PROCESSORS_ELSEWHERE


@functools.cache
def _processors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def lanes(device: torch.device, programs: int, parts: int) -> int:
    """Programs to share `parts` equal pieces of work, where `programs` others run beside each. Never changes a bit."""
    wanted = -(-PROGRAMS_A_PROCESSOR * processors(device) // max(programs, 1))
    return max(1, min(parts, wanted))
