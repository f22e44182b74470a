"""Words and bits of masks."""

from __future__ import annotations

import numpy as np
import pytest
from branchline.engine.grammar import mask as masks
from branchline.engine.grammar.base import BaseGrammarObject


@pytest.mark.parametrize(("size", "words"), [(0, 0), (1, 1), (32, 1), (33, 2), (49152, 1536)])
def test_a_row_is_as_wide_as_the_head(size: int, words: int) -> None:
    assert masks.width(size) == words
    assert masks.allocate(3, size).shape == (3, words)


def test_a_new_mask_allows_everything() -> None:
    words = masks.allocate(1, 40)[0]
    assert masks.allowed_ids(words, 40).tolist() == list(range(40))


def test_bits_are_set_and_cleared_lowest_first() -> None:
    words = masks.allocate(1, 70)[0]
    words[:] = 0
    masks.set_bits(words, [0, 31, 32, 69], True)
    assert words.view(np.uint32).tolist() == [0x8000_0001, 1, 32]
    masks.set_bits(words, [31, 69], False)
    assert masks.allowed_ids(words, 70).tolist() == [0, 32]
    assert [token for token in range(-3, 200) if masks.allows(words, token)] == [0, 32]


def test_the_host_mask_is_moved_by_whoever_knows_the_device() -> None:
    mask = masks.allocate(1, 8)
    assert BaseGrammarObject.move_vocab_mask(mask, lambda host: ("device", host.shape)) == ("device", (1, 1))


def test_ids_beyond_a_narrow_mask_are_forbidden() -> None:
    logits = np.zeros(50, dtype=np.float32)
    masks.apply(logits, masks.allocate(1, 32)[0])
    assert np.isfinite(logits).tolist() == [True] * 32 + [False] * 18
