"""The vendors' own client packages against the real stack: openai's Responses and tools, anthropic's Messages."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest

from .stack import Stack

pytestmark = pytest.mark.model
CAPITAL = "What is the capital of France? Answer in one sentence."
# The client's newest version has no such argument; the API keeps it.
GREEDY = {"temperature": 0}


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def claude(stack: Stack) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=stack.url, api_key="none", max_retries=0)


def test_openai_creates_reads_continues_and_deletes_responses(client: openai.OpenAI) -> None:
    first = client.responses.create(model="default", input=CAPITAL, temperature=0, max_output_tokens=24)
    assert first.status in ("completed", "incomplete") and "Paris" in first.output_text
    assert first.usage is not None and first.usage.total_tokens == first.usage.input_tokens + first.usage.output_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    items = client.responses.input_items.list(first.id).data
    assert items[0].type == "message"
    second = client.responses.create(
        model="default", input="And of Italy?", previous_response_id=first.id, temperature=0, max_output_tokens=8
    )
    assert second.previous_response_id == first.id and second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_openai_streams_the_same_response(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="default", input=CAPITAL, temperature=0, max_output_tokens=24)
    with client.responses.stream(model="default", input=CAPITAL, temperature=0, max_output_tokens=24) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response() if "response.completed" in kinds else None
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    if final is not None:
        assert final.output_text == whole.output_text


def test_openai_runs_a_response_in_the_background_and_cancels_it(client: openai.OpenAI) -> None:
    started = client.responses.create(
        model="default", input=CAPITAL, background=True, max_output_tokens=1500, extra_body={"ignore_eos": True}
    )
    assert started.status == "in_progress"
    assert client.responses.cancel(started.id).status == "cancelled"
    assert client.responses.retrieve(started.id).status == "cancelled"


def test_openai_sends_tools_and_gets_an_answer(client: openai.OpenAI) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
    choices: list[Any] = ["auto", "none"]
    for choice in choices:
        answer = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": CAPITAL}],
            tools=tools,
            tool_choice=choice,
            temperature=0,
            max_tokens=16,
        )
        assert answer.choices[0].message.content and answer.choices[0].message.tool_calls is None


def test_anthropic_answers_streams_and_counts(claude: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": CAPITAL}]
    options: dict[str, Any] = {"model": "default", "messages": messages, "system": "Be brief.", "extra_body": GREEDY}
    whole = claude.messages.create(max_tokens=24, **options)
    text = "".join(block.text for block in whole.content if block.type == "text")
    assert "Paris" in text and whole.stop_reason in ("end_turn", "max_tokens") and whole.role == "assistant"
    with claude.messages.stream(max_tokens=24, **options) as stream:
        streamed = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert streamed == text and final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = claude.messages.count_tokens(model="default", messages=messages, system="Be brief.").input_tokens
    assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_anthropic_stops_at_a_sequence_and_continues_a_prefilled_answer(claude: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": CAPITAL}, {"role": "assistant", "content": "The capital of"}]
    answer = claude.messages.create(
        model="default", messages=messages, max_tokens=24, extra_body=GREEDY, stop_sequences=["Paris"]
    )
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "Paris")
    assert answer.content[0].type == "text" and answer.content[0].text.startswith(" France")


def test_anthropic_gets_errors_as_its_own(claude: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": "x"}]
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(model="no-such-model", messages=messages, max_tokens=4)
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        claude.messages.create(model="default", messages=messages, max_tokens=20_000)
    image: list[Any] = [{"role": "user", "content": [{"type": "image"}]}]
    with pytest.raises(anthropic.BadRequestError, match="image"):
        claude.messages.create(model="default", messages=image, max_tokens=4)
