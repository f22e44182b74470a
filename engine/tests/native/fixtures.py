"""A small byte-level tokenizer.json for the tests of the native module."""

from __future__ import annotations

import json


def byte_alphabet() -> list[str]:
    """GPT-2's character for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def tokenizer_json() -> bytes:
    """Three ChatML marks with ids 0 to 2, all bytes from id 3, then "he" and "ll"."""
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {text: index for index, text in enumerate([*marks, *byte_alphabet(), "he", "ll"])}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": None,
        "added_tokens": [{"id": index, "content": text, "special": True, **flags} for index, text in enumerate(marks)],
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": ["h e", "l l"]},
    }
    return json.dumps(document).encode()


def ids(text: str | bytes) -> list[int]:
    """The id of each byte."""
    data = text.encode() if isinstance(text, str) else text
    return [3 + byte for byte in data]
