"""Chained block hashes for the pure-Python backends.

Same shape as crates/prefix (each block's hash covers everything before it), another hash function:
these backends never feed a gateway, so the values need not agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def root_hash(namespace: bytes) -> int:
    """Parent of a namespace's first blocks."""
    return _digest(b"namespace" + namespace)


def chain_hash(parent: int, token_ids: Sequence[int]) -> int:
    """Hash of one block after `parent`."""
    return _digest(parent.to_bytes(8, "little") + b"".join(token.to_bytes(4, "little") for token in token_ids))


def block_hashes(namespace: bytes, token_ids: Sequence[int], page_size: int) -> list[int]:
    """Chained hash of each whole page of `token_ids`."""
    hashes: list[int] = []
    parent = root_hash(namespace)
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        parent = chain_hash(parent, token_ids[start : start + page_size])
        hashes.append(parent)
    return hashes


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
