"""The seam of `Vocabulary`, `TextStream` and `push_many`."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from branchline import _native

from .fixtures import ids, tokenizer_json


@pytest.fixture(scope="module")
def vocabulary() -> _native.Vocabulary:
    return _native.Vocabulary.from_tokenizer_json(tokenizer_json())


def test_vocabulary_answers_for_every_id(vocabulary: _native.Vocabulary) -> None:
    assert len(vocabulary) == 3 + 256 + 2
    assert vocabulary.token_bytes(1) == b"<|im_start|>"
    assert [vocabulary.token_bytes(3 + byte) for byte in range(256)] == [bytes([b]) for b in range(256)]
    assert vocabulary.token_bytes(2**32 - 1) == b""
    assert vocabulary.is_special(2) and not vocabulary.is_special(3) and not vocabulary.is_special(10**6)


def test_encode_and_decode_round_trip(vocabulary: _native.Vocabulary) -> None:
    token_ids = vocabulary.encode("<|im_start|>hell 🙂<|im_end|>")
    assert token_ids == [1, 259, 260, *ids(" 🙂"), 2]
    assert vocabulary.decode(token_ids) == "hell 🙂"
    assert vocabulary.decode(token_ids, skip_special_tokens=False) == "<|im_start|>hell 🙂<|im_end|>"
    assert vocabulary.decode([10**6]) == ""
    assert vocabulary.encode("", add_special_tokens=True) == []


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b'{"model": 1}'])
def test_a_broken_tokenizer_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json can't be read"):
        _native.Vocabulary.from_tokenizer_json(data)


@pytest.mark.parametrize("make", [list, tuple, np.int32, np.uint32, np.int64, "array", range])
def test_ids_come_in_any_integer_sequence(vocabulary: _native.Vocabulary, make: Any) -> None:
    values = ids("abc")
    if make == "array":
        given: Any = array("I", values)
    elif make is range:
        given = range(values[0], values[0] + 3)
    elif make in (list, tuple):
        given = make(values)
    else:
        given = np.array(values, dtype=make)
    assert vocabulary.decode(given) == "abc"


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ([-1], ValueError),
        ([2**32], ValueError),
        ([2**70], ValueError),
        (np.array([-1], dtype=np.int32), ValueError),
        (np.array([2**40], dtype=np.int64), ValueError),
        (["a"], TypeError),
        ([1.0], TypeError),
        ([None], TypeError),
        ("abc", TypeError),
        (b"abc", TypeError),
        (None, TypeError),
        (7, TypeError),
        (np.array([1.5]), TypeError),
    ],
)
def test_wrong_ids_name_the_entry(vocabulary: _native.Vocabulary, wrong: Any, error: type[Exception]) -> None:
    stream = _native.TextStream(vocabulary)
    with pytest.raises(error):
        vocabulary.decode(wrong)
    with pytest.raises(error):
        stream.push(wrong)
    assert stream.push(ids("ok")) == ("ok", 2, None), "a refused push changes nothing"


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_a_single_id_out_of_range_is_an_error(vocabulary: _native.Vocabulary, token_id: int) -> None:
    with pytest.raises(OverflowError):
        vocabulary.token_bytes(token_id)
    with pytest.raises(OverflowError):
        vocabulary.is_special(token_id)


def test_stream_stops_inside_a_push_and_takes_nothing_more(vocabulary: _native.Vocabulary) -> None:
    stream = _native.TextStream(vocabulary, ["cd"])
    assert stream.push(ids("abc")) == ("ab", 3, None)
    assert stream.push(ids("def")) == ("", 1, "cd")
    assert stream.push(ids("x")) == ("", 0, None)
    assert stream.finish() == ""


def test_stream_options_count(vocabulary: _native.Vocabulary) -> None:
    kept = _native.TextStream(vocabulary, ("b",), skip_special_tokens=False, include_stop=True, min_tokens=2)
    assert kept.push([*ids("b"), 1, *ids("bc")]) == ("b<|im_start|>b", 3, "b")
    assert _native.TextStream(vocabulary).push([1, *ids("a"), 2]) == ("a", 3, None)


def test_finish_marks_an_unfinished_character_once(vocabulary: _native.Vocabulary) -> None:
    stream = _native.TextStream(vocabulary)
    assert stream.push(ids("🙂".encode()[:3])) == ("", 3, None)
    assert stream.finish() == "\ufffd"


def test_an_empty_stop_is_a_value_error(vocabulary: _native.Vocabulary) -> None:
    with pytest.raises(ValueError, match=r"stop\[1\] is empty"):
        _native.TextStream(vocabulary, ["a", ""])
    with pytest.raises(TypeError):
        _native.TextStream(vocabulary, [1])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        _native.TextStream(None)  # type: ignore[arg-type]


def test_push_many_equals_one_push_each(vocabulary: _native.Vocabulary) -> None:
    texts = ["stop", "🙂abc", "xyz!"]
    single = [_native.TextStream(vocabulary, ["op"]) for _ in texts]
    many = [_native.TextStream(vocabulary, ["op"]) for _ in texts]
    for column in zip(*(ids(text)[:4] for text in texts), strict=True):
        expected = [stream.push([token_id]) for stream, token_id in zip(single, column, strict=True)]
        assert _native.push_many(many, column) == expected
    with pytest.raises(ValueError, match="3 streams but 1 token ids"):
        _native.push_many(many, [1])
    with pytest.raises(TypeError):
        _native.push_many([None], [1])  # type: ignore[list-item]
