"""Tool calls that the real model makes, read by the vendors' own client packages in every API family and both modes.

The model is small: earlier turns of the conversation show it how a call looks, greedy decoding does the rest.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest
from branchline_router import Router

from tests.cases.loader import case

from .stack import Stack

pytestmark = pytest.mark.model
SYSTEM = "You call get_weather for each question about the weather."
PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT_TOOLS: list[Any] = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
FLAT_TOOLS: list[Any] = [{"type": "function", "name": "get_weather", "parameters": PARAMETERS}]
OWN_TOOLS: list[Any] = [{"name": "get_weather", "input_schema": PARAMETERS}]
GREEDY = {"temperature": 0}


def written(city: str) -> str:
    return f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


def turns(*cities: str, write: Callable[[str], str] = written) -> list[Any]:
    """A question and a call for each city; the last question is open."""
    said: list[Any] = []
    for city in cities:
        said += [{"role": "user", "content": f"Weather in {city}?"}, {"role": "assistant", "content": write(city)}]
    return said[:-1]


CITIES = ("Oslo", "Rome", "Cairo", "Lima", "Paris")


@pytest.fixture
def stack(stacks: Callable[..., Stack]) -> Any:
    running = stacks(gateway_flags=("--tool-call-parser", "hermes"))
    yield running
    running.assert_idle(10)


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def claude(stack: Stack) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=stack.url, api_key="none", max_retries=0)


def chat(client: openai.OpenAI, **more: Any) -> Any:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, *turns(*CITIES)]
    return client.chat.completions.create(
        model="default", messages=messages, tools=CHAT_TOOLS, temperature=0, max_tokens=60, **more
    )


def test_openai_gets_the_call_of_a_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    choice = chat(client).choices[0]
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "get_weather",
        {"city": "Paris"},
    )
    names, arguments, text, finish = [], "", "", None
    for chunk in chat(client, stream=True):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        finish = chunk.choices[0].finish_reason or finish
        for part in delta.tool_calls or []:
            assert part.index == 0
            names += [part.function.name] if part.function.name else []
            arguments += part.function.arguments or ""
    assert (names, arguments, text, finish) == (["get_weather"], call.function.arguments, "", "tool_calls")


def test_openais_own_stream_helper_assembles_the_call(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, *turns(*CITIES)]
    with client.chat.completions.stream(
        model="default", messages=messages, tools=CHAT_TOOLS, temperature=0, max_tokens=60
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    (call,) = final.choices[0].message.tool_calls or []
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def test_without_tools_or_with_choice_none_the_call_is_text(client: openai.OpenAI) -> None:
    for more in ({"tool_choice": "none"}, {"tool_choice": "none", "stream": True}):
        answer = chat(client, **more)
        if "stream" in more:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        else:
            assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.tool_calls is None
            text = answer.choices[0].message.content
        assert text == written("Paris")


def test_several_answers_of_one_chat_have_calls_of_their_own(client: openai.OpenAI) -> None:
    answer = chat(client, n=2)
    calls = [choice.message.tool_calls[0] for choice in answer.choices]
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Paris"}] * 2
    assert calls[0].id != calls[1].id


def test_a_call_that_the_limit_cuts_off_is_not_finished(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, *turns(*CITIES)]
    whole = chat(client).choices[0].message.tool_calls[0].function.arguments
    arguments = set()
    for limit in (4, 12, 20):
        cut = client.chat.completions.create(
            model="default", messages=messages, tools=CHAT_TOOLS, temperature=0, max_tokens=limit
        ).choices[0]
        assert cut.finish_reason == "length"
        for call in cut.message.tool_calls or []:
            assert call.type == "function" and call.function.name == "get_weather"
            assert whole.startswith(call.function.arguments)
            arguments.add(call.function.arguments)
    assert arguments and whole not in arguments


def test_a_tools_result_goes_back_into_the_chat(client: openai.OpenAI) -> None:
    call = chat(client).choices[0].message.tool_calls[0]
    messages: list[Any] = [
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "It is sunny."},
        {"role": "user", "content": "Say it again."},
    ]
    answer = client.chat.completions.create(model="default", messages=messages, tools=CHAT_TOOLS, max_tokens=4)
    assert answer.usage is not None and answer.usage.completion_tokens > 0


def test_openais_responses_have_the_call_as_an_item_whole_and_streamed(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {
        "model": "default",
        "instructions": SYSTEM,
        "input": turns(*CITIES),
        "tools": FLAT_TOOLS,
        "temperature": 0,
        "max_output_tokens": 60,
    }
    whole = client.responses.create(**given)
    (item,) = whole.output
    assert item.type == "function_call" and whole.status == "completed"
    assert (item.name, json.loads(item.arguments)) == ("get_weather", {"city": "Paris"})
    with client.responses.stream(**given) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert deltas == item.arguments and events[-1].type == "response.completed"
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == sorted(
        {event.sequence_number for event in events if hasattr(event, "sequence_number")}
    )
    assert final.output[0].type == "function_call"
    result: list[Any] = [{"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}]
    after = client.responses.create(
        model="default", previous_response_id=whole.id, input=result, tools=FLAT_TOOLS, max_output_tokens=4
    )
    assert after.usage is not None and whole.usage is not None and after.usage.input_tokens > 10
    kinds = [entry.type for entry in client.responses.input_items.list(after.id).data]
    assert kinds == ["function_call_output"]


def test_anthropic_gets_the_call_as_a_block_whole_and_streamed(claude: anthropic.Anthropic) -> None:
    given: dict[str, Any] = {
        "model": "default",
        "system": SYSTEM,
        "messages": turns(*CITIES),
        "tools": OWN_TOOLS,
        "max_tokens": 60,
        "extra_body": GREEDY,
    }
    whole = claude.messages.create(**given)
    (block,) = whole.content
    assert block.type == "tool_use" and whole.stop_reason == "tool_use"
    assert (block.name, block.input) == ("get_weather", {"city": "Paris"}) and block.id.startswith("toolu_")
    with claude.messages.stream(**given) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
    (streamed,) = final.content
    assert streamed.type == "tool_use" and streamed.input == {"city": "Paris"}
    assert final.stop_reason == "tool_use" and final.usage.output_tokens == whole.usage.output_tokens
    answered: list[Any] = [
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": [block.model_dump()]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}]},
    ]
    after = claude.messages.create(model="default", messages=answered, tools=OWN_TOOLS, max_tokens=4)
    assert after.usage.output_tokens > 0


def test_a_forced_call_is_made_or_refused_by_the_clients_own_name(
    client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    def forced(run: Callable[[], Any]) -> None:
        try:
            run()
        except (openai.BadRequestError, anthropic.BadRequestError) as refused:
            assert "tool_choice" in str(refused) and refused.status_code == 400

    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        forced(lambda choice=choice: chat(client, tool_choice=choice))  # type: ignore[misc]
    for own in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        forced(
            lambda own=own: claude.messages.create(  # type: ignore[misc]
                model="default", messages=turns("Oslo"), tools=OWN_TOOLS, tool_choice=own, max_tokens=40
            )
        )
    with pytest.raises(openai.BadRequestError, match="nope"):
        chat(client, tool_choice={"type": "function", "function": {"name": "nope"}})


async def test_a_router_in_a_program_reads_calls_too(stack: Stack) -> None:
    async with Router(
        port=0, worker_urls=[f"grpc://{stack.engines[0].address}"], tool_call_parser="hermes", log_level="error"
    ) as router:
        async with asyncio.timeout(60):
            while not any(worker["ready"] for worker in await router.workers()):
                await asyncio.sleep(0.01)
        messages = [{"role": "system", "content": SYSTEM}, *turns(*CITIES)]
        answer = await router.chat(messages, tools=CHAT_TOOLS, temperature=0, max_tokens=60)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}


@pytest.mark.parametrize("parameters", case("tools-tool-without-parameters")["given"]["tools_parameters"])
def test_tools_tool_without_parameters(stack: Stack, parameters: dict[str, Any] | None) -> None:
    given = case("tools-tool-without-parameters")["given"]
    function = {"name": "ping", **({} if parameters is None else {"parameters": parameters})}
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "Ping"}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": given["tool_choice"],
        **given["sampling_params"],
    }
    answer = stack.post("/v1/chat/completions", body).json()
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert all(json.loads(call["function"]["arguments"]) == {} for call in choice["message"]["tool_calls"])
    assert answer["usage"]["completion_tokens"] < given["sampling_params"]["max_tokens"]


def test_a_forced_call_is_made_by_the_model_in_every_family(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    question: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    choices: list[Any] = ["required", named]
    for choice in choices:
        answer = client.chat.completions.create(
            model="default", messages=question, tools=CHAT_TOOLS, tool_choice=choice, temperature=0, max_tokens=60
        )
        call = (answer.choices[0].message.tool_calls or [])[0]
        assert call.type == "function" and "city" in json.loads(call.function.arguments)
        assert not answer.choices[0].message.content
    for own in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        given: Any = {"tools": OWN_TOOLS, "tool_choice": own, "max_tokens": 60, "extra_body": GREEDY}
        message = claude.messages.create(model="default", messages=question, **given)
        assert [block.type for block in message.content][:1] == ["tool_use"] and message.stop_reason == "tool_use"
