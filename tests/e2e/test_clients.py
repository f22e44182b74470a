"""Clients that people already have: the openai package, curl, and the HTTP calls of SGLang's frontend."""

from __future__ import annotations

import itertools
import json
import subprocess
from typing import Any

import openai
import pytest

from .stack import Stack, collect

pytestmark = pytest.mark.model
CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)


def test_openai_lists_and_chats(client: openai.OpenAI) -> None:
    models = [model.id for model in client.models.list()]
    assert models
    assert client.models.retrieve(models[0]).id == models[0]
    answer = client.chat.completions.create(model=models[0], messages=CAPITAL, temperature=0, max_tokens=24)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].message.role == "assistant"
    assert (
        answer.usage is not None
        and answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    )
    assert answer.usage.prompt_tokens_details is not None


def test_openai_stream_equals_plain(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model="default", messages=CAPITAL, temperature=0, max_tokens=32)
    chunks = list(
        client.chat.completions.create(
            model="default",
            messages=CAPITAL,
            temperature=0,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    finish = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert finish == [plain.choices[0].finish_reason]
    assert chunks[-1].usage is not None and plain.usage is not None
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens


async def test_openai_async(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(model="default", messages=CAPITAL, temperature=0, max_tokens=16)
        stream = await client.chat.completions.create(
            model="default", messages=CAPITAL, temperature=0, max_tokens=16, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == answer.choices[0].message.content


def test_openai_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="default", messages=CAPITAL, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content if answer.choices[0].logprobs else None
    assert content is not None and len(content) == 6
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob, abs=1e-6)  # greedy: the likeliest
        assert entry.logprob <= 0
        assert bytes(entry.bytes or []).decode() == entry.token
    text = b"".join(bytes(entry.bytes or []) for entry in content).decode()
    assert text == answer.choices[0].message.content


def test_openai_n_stop_and_seed(client: openai.OpenAI) -> None:
    def run() -> list[str]:
        answer = client.completions.create(
            model="default", prompt="Once upon a time", n=3, seed=11, temperature=1.0, max_tokens=12
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.text for choice in answer.choices]

    first = run()
    assert run() == first
    assert len(set(first)) > 1
    free = (
        client.completions.create(model="default", prompt="One, two, three,", temperature=0, max_tokens=24)
        .choices[0]
        .text
    )
    stop = free.strip()[4:7]
    cut = client.completions.create(
        model="default", prompt="One, two, three,", temperature=0, max_tokens=24, stop=[stop]
    )
    assert cut.choices[0].text == free[: free.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_openai_n_stream_keeps_choices_apart(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {
        "model": "default",
        "prompt": "Once upon a time",
        "n": 3,
        "seed": 5,
        "temperature": 1.0,
        "max_tokens": 12,
    }
    plain = client.completions.create(**arguments)
    texts = ["", "", ""]
    for chunk in client.completions.create(**arguments, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in plain.choices]


def test_openai_errors_are_typed(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="no-such-model", messages=CAPITAL)
    assert "no-such-model" in str(unknown.value)
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="default", messages=CAPITAL, temperature=-1)
    assert wrong.value.param == "temperature"


def test_curl_streams(stack: Stack) -> None:
    body = json.dumps({"messages": CAPITAL, "temperature": 0, "max_tokens": 12, "stream": True})
    command = ["curl", "-sN", f"{stack.url}/v1/chat/completions", "-H", "content-type: application/json", "-d", body]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert output.endswith("data: [DONE]\n\n")
    assert "Paris" in "".join(
        json.loads(line[6:])["choices"][0]["delta"].get("content", "")
        for line in output.splitlines()
        if line.startswith("data: {")
    )


def test_sglang_frontend_calls(stack: Stack) -> None:
    """The calls that sglang.lang's RuntimeEndpoint makes: model info, plain, streamed, cached prefix and select."""
    info = stack.client.get("/get_model_info").json()
    assert info["model_path"]
    sampling = {
        "max_new_tokens": 12,
        "min_new_tokens": 0,
        "n": 1,
        "stop": [],
        "stop_token_ids": None,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "ignore_eos": False,
        "regex": None,
        "json_schema": None,
    }
    body = {
        "text": "The capital of France is",
        "sampling_params": {"skip_special_tokens": True, "spaces_between_special_tokens": True, **sampling},
    }
    plain = stack.post("/generate", body).json()
    assert isinstance(plain["text"], str) and plain["meta_info"]["completion_tokens"] == 12
    with stack.stream("/generate", body) as data:
        pieces = collect(data)
    assert pieces[-1]["text"] == plain["text"]
    assert all(later["text"].startswith(earlier["text"]) for earlier, later in itertools.pairwise(pieces))
    assert stack.post("/generate", {"text": body["text"], "sampling_params": {"max_new_tokens": 0}}).status_code == 200

    prompt, choices = "Question: is the sky blue? Answer:", [" yes", " no", " perhaps"]
    primed = stack.post(
        "/generate", {"text": prompt, "sampling_params": {"max_new_tokens": 0, "temperature": 0.0}}
    ).json()
    length = primed["meta_info"]["prompt_tokens"]
    answers = stack.post(
        "/generate",
        {
            "text": [prompt + choice for choice in choices],
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "return_text_in_logprobs": True,
            "logprob_start_len": max(length - 2, 0),
        },
    ).json()
    for choice, answer in zip(choices, answers, strict=True):
        entries = answer["meta_info"]["input_token_logprobs"]
        assert all(entry[0] is not None for entry in entries)
        assert "".join(entry[2] for entry in entries).endswith(choice)
        assert answer["meta_info"]["prompt_tokens"] > length


def test_health_and_metrics(stack: Stack) -> None:
    for path in ("/health", "/readiness", "/liveness"):
        assert stack.client.get(path).status_code == 200, path
    stack.generate("Hi", sampling_params={"max_new_tokens": 2})
    text = stack.client.get("/metrics").text
    assert "# TYPE" in text and "branchline" in text
