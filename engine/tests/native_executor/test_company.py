"""One reduction order a row: bits do not depend on batch, chunks, pages, threads or position in the step."""

from __future__ import annotations

import random

import numpy as np
import pytest
from branchline.engine.executor.native import NativeExecutor
from hypothesis import given, settings
from hypothesis import strategies as st

from .driver import F32, Line, build, logits_of, tiny_model, tiny_spec

FORMATS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
TEXT = [random.Random(5).randrange(320) for _ in range(700)]


def alone(executor: NativeExecutor, ids: list[int]) -> F32:
    """Logits of the last of `ids`, all in one step."""
    return logits_of(executor, [(Line(list(range(100, 200))), ids)])[0].copy()


@pytest.mark.parametrize("format_name", FORMATS)
def test_bits_are_the_same_alone_in_company_and_in_chunks(format_name: str, isa: str) -> None:
    model = tiny_model(format_name)
    executor = build(model, isa=isa, threads=2)
    texts = [TEXT[start : start + length] for start, length in ((0, 1), (3, 40), (50, 17), (9, 33), (70, 64), (1, 5))]
    wanted = [alone(executor, text) for text in texts]
    lines = [Line(list(range(number, 60, 6))) for number in range(len(texts))]
    together = logits_of(executor, list(zip(lines, texts, strict=True)))
    for found, expected in zip(together, wanted, strict=True):
        assert np.array_equal(found, expected)
    for text, expected in zip(texts, wanted, strict=True):
        line = Line([61, 7, 80, 33, 90])
        for token in text[:-1]:
            logits_of(executor, [(line, [token])])
        assert np.array_equal(logits_of(executor, [(line, text[-1:])])[0], expected)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_mix_of_rows_leaves_a_long_context_unchanged(data: st.DataObject) -> None:
    executor = _shared()
    length = data.draw(st.sampled_from([1, 15, 16, 17, 255, 256, 257, 300, 512, 600]))
    expected = alone(executor, TEXT[:length])
    pages = list(range(100))
    random.Random(data.draw(st.integers(0, 1000))).shuffle(pages)
    line = Line(pages[:40])
    at = 0
    while at < length - 1:
        step = data.draw(st.integers(1, length - 1 - at))
        others = data.draw(st.lists(st.integers(1, 20), max_size=4))
        work = [
            (Line([pages[40 + number * 2], pages[41 + number * 2]]), TEXT[:count])
            for number, count in enumerate(others)
        ]
        work.insert(data.draw(st.integers(0, len(work))), (line, TEXT[at : at + step]))
        logits_of(executor, work)
        at += step
    assert np.array_equal(logits_of(executor, [(line, TEXT[length - 1 : length])])[0], expected)


_kept: list[NativeExecutor] = []


def _shared() -> NativeExecutor:
    if not _kept:
        _kept.append(build(tiny_model("Q4_1"), threads=2))
    return _kept[0]


@pytest.mark.parametrize("heads,kv_heads", [(1, 1), (4, 2), (6, 2), (4, 1), (10, 2), (6, 1), (7, 1), (16, 2), (16, 1)])
@pytest.mark.parametrize("page_size", [1, 16])
def test_every_ratio_of_query_to_key_heads_keeps_its_bits(heads: int, kv_heads: int, page_size: int) -> None:
    spec = tiny_spec(heads=heads, kv_heads=kv_heads, head_dim=32, layers=1)
    executor = build(tiny_model("F32", spec), pages=512, page_size=page_size)
    ids = TEXT[:290]
    line = Line(list(range(512)))
    whole = logits_of(executor, [(line, ids)], every_row=True).copy()
    line = Line(list(range(511, -1, -1)))
    rows = [logits_of(executor, [(line, [token])])[0].copy() for token in ids]
    assert np.array_equal(np.stack(rows), whole)


def test_page_size_and_threads_do_not_change_bits() -> None:
    found = []
    for page_size, threads in ((1, 1), (4, 3), (16, 2), (64, 1)):
        executor = build(tiny_model("Q8_0"), pages=1024, page_size=page_size, threads=threads)
        found.append(logits_of(executor, [(Line(list(range(900))), TEXT[:400])]).tobytes())
        executor.close()
    assert len(set(found)) == 1


def test_stale_pages_of_a_broken_sequence_do_not_leak() -> None:
    executor = build(tiny_model("F32"))
    expected = alone(executor, TEXT[:20])
    poisoned = np.frombuffer(executor.model.logits(), np.float32).copy()
    assert np.isfinite(poisoned).all()
    # Other tokens fill the pages to the end first; then the same sequence reuses them.
    logits_of(executor, [(Line(list(range(100, 110))), TEXT[300:460])])
    assert np.array_equal(alone(executor, TEXT[:20]), expected)
