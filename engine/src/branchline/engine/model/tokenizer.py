"""Rebuilds a tokenizer.json from GGUF metadata: byte-level BPE by its pre-tokenizer name, or SentencePiece.

Produces JSON text only and needs no tokenizer library, so that gateway and engine read the same bytes. An
unknown pre-tokenizer is refused: a wrong split yields plausible text from wrong tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from branchline.engine.errors import LoadError

Json = dict[str, Any]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(use_regex: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": use_regex}


def _split(pattern: str) -> list[Json]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, _byte_level(False)]


_DIGITS = {"type": "Digits", "individual_digits": True}
_PRE_TOKENIZERS: dict[str, list[Json]] = {
    "gpt-2": [_byte_level(True)],
    "smollm": [_DIGITS, _byte_level(True)],
    "llama-bpe": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
    "tekken": _split(_TEKKEN),
}
_ALIASES = {
    "default": "gpt-2",
    "gpt2": "gpt-2",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "smaug-bpe": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
}
_WHOLE_WORDS_FIRST = {"llama-bpe", "tekken"}  # a piece found whole in the vocabulary is not merged
_NFC = {"qwen2"}


def rebuild(metadata: Mapping[str, Any]) -> bytes:
    """tokenizer.json for a GGUF file's `tokenizer.ggml.*` keys. Raises LoadError for unknown kinds."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise LoadError("gguf file has no tokenizer.ggml.tokens: it holds no tokenizer", field="model.tokenizer")
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise LoadError(
            f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens", field="model.tokenizer"
        )
    if kind == "gpt2":
        document = _byte_pair(metadata, tokens)
    elif kind == "llama":
        document = _sentence_piece(metadata, tokens, types)
    else:
        raise LoadError(
            f"tokenizer kind {kind!r} is not supported; supported are gpt2 and llama", field="model.tokenizer"
        )
    document["added_tokens"] = _added(tokens, types)
    return json.dumps(document, ensure_ascii=False).encode()


def _document(model: Json, normalizer: Json | None, pre: Json | None, decoder: Json) -> Json:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": pre,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def _bpe(vocabulary: dict[str, int], merges: list[list[str]], **changes: object) -> Json:
    model: Json = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
    }
    return {**model, **changes}


def _byte_pair(metadata: Mapping[str, Any], tokens: list[str]) -> Json:
    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    name = _ALIASES.get(name, name)
    if name not in _PRE_TOKENIZERS:
        known = ", ".join(sorted({*_PRE_TOKENIZERS, *_ALIASES}))
        raise LoadError(
            f"pre-tokenizer {name!r} is not supported; supported are {known}. use the model's safetensors folder,"
            " which carries its own tokenizer.json",
            field="model.tokenizer",
        )
    merges = [merge.split(" ", 1) for merge in metadata.get("tokenizer.ggml.merges") or []]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    model = _bpe(vocabulary, merges, ignore_merges=name in _WHOLE_WORDS_FIRST)
    normalizer = {"type": "NFC"} if name in _NFC else None
    pre = {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[name]}
    document = _document(model, normalizer, pre, _byte_level(True))
    document["post_processor"] = _post(metadata, tokens, name == "llama-bpe", _byte_level(True))
    return document


def _sentence_piece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Json:
    scores = metadata.get("tokenizer.ggml.scores") or []
    if len(scores) != len(tokens):
        raise LoadError(
            f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens", field="model.tokenizer"
        )
    vocabulary = {token: number for number, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    mergeable = {
        token: (scores[number], number)
        for number, token in enumerate(tokens)
        if types[number] in (NORMAL, USER_DEFINED, UNUSED)
    }
    model = _bpe(vocabulary, _merges(mergeable), unk_token=unknown, fuse_unk=True, byte_fallback=BYTE in set(types))
    space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[Json] = [{"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if space:
        steps.insert(0, {"type": "Prepend", "prepend": "▁"})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    normalizer = {"type": "Sequence", "normalizers": steps}
    document = _document(model, normalizer, None, {"type": "Sequence", "decoders": decoders})
    document["post_processor"] = _post(metadata, tokens, True, None)
    return document


def _merges(pieces: dict[str, tuple[float, int]]) -> list[list[str]]:
    """BPE merges that reproduce SentencePiece's order: the pair whose union scores best merges first."""
    found: list[tuple[float, int, int, str, str]] = []
    for piece, (score, number) in pieces.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                found.append((-score, number, pieces[left][1], left, right))
    found.sort(key=lambda merge: merge[:3])
    return [[left, right] for _, _, _, left, right in found]


def _post(metadata: Mapping[str, Any], tokens: list[str], default_begin: bool, otherwise: Json | None) -> Json | None:
    """Adds begin and end tokens where the file asks for them when special tokens are wanted."""
    begin = metadata.get("tokenizer.ggml.bos_token_id")
    end = metadata.get("tokenizer.ggml.eos_token_id")
    first = bool(metadata.get("tokenizer.ggml.add_bos_token", default_begin)) and isinstance(begin, int)
    last = bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and isinstance(end, int)
    if not first and not last:
        return otherwise
    names = {"begin": tokens[begin] if first else "", "end": tokens[end] if last else ""}  # type: ignore[index]
    used = ([(names["begin"], begin)] if first else []) + ([(names["end"], end)] if last else [])

    def template(letter: str, type_id: int) -> list[Json]:
        body: list[Json] = [{"Sequence": {"id": letter, "type_id": type_id}}]
        if first:
            body.insert(0, {"SpecialToken": {"id": names["begin"], "type_id": type_id}})
        if last:
            body.append({"SpecialToken": {"id": names["end"], "type_id": type_id}})
        return body

    special = {name: {"id": name, "ids": [number], "tokens": [name]} for name, number in used}
    processor: Json = {
        "type": "TemplateProcessing",
        "single": template("A", 0),
        "pair": template("A", 0) + template("B", 1),
        "special_tokens": special,
    }
    if otherwise is None:
        return processor
    return {"type": "Sequence", "processors": [otherwise, processor]}


def _added(tokens: list[str], types: list[int]) -> list[Json]:
    return [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED, UNKNOWN) and token
    ]
