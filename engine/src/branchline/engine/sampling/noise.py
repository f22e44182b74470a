"""Random numbers that depend on (seed, position, token id) only, never on the batch or on earlier draws.

A counter-based integer hash replaces a generator's state: a row sampled alone, in company, after a
retraction or on another worker draws the same numbers.
"""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1


def _finish(value: int) -> int:
    """splitmix64's finaliser: every input bit reaches every output bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    """The low 32 bits as torch's int32 holds them."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def row_keys(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit keys (as signed ints) of one draw."""
    mixed = _finish((_finish(seed & _MASK) + position * 0x9E3779B97F4A7C15) & _MASK)
    return _signed(mixed), _signed(mixed >> 32)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """In place, a 32-bit finaliser (lowbias32). Shifts are logical: the sign bits are masked off."""
    bits.bitwise_xor_(bits.bitwise_right_shift(16).bitwise_and_(0xFFFF))
    bits.mul_(0x7FEB352D)
    bits.bitwise_xor_(bits.bitwise_right_shift(15).bitwise_and_(0x1FFFF))
    bits.mul_(_signed(0x846CA68B))
    bits.bitwise_xor_(bits.bitwise_right_shift(16).bitwise_and_(0xFFFF))
    return bits


def gumbel(keys: list[tuple[int, int]], vocab_size: int, device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise, float32 [len(keys), vocab_size]; finite everywhere.

    -log(E) with E = -log(1 - v), v uniform in 32 bits: small v, which decide the winner, keep full precision.
    """
    first = torch.tensor([[one] for one, _ in keys], dtype=torch.int32, device=device)
    second = torch.tensor([[two] for _, two in keys], dtype=torch.int32, device=device)
    ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
    bits = _mix(_mix(ids ^ first).add_(second))
    uniform = bits.float().add_(2.0**31 + 0.5).mul_(2.0**-32).clamp_(2.0**-33, 1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()
