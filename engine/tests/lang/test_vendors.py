"""Vendors' backends through the vendors' own packages, against local servers that speak their wire."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from branchline import lang as bl
from branchline.lang.backends import conversation

from .test_runtime import Server
from .vendor_wires import WIRES, Wire

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # importing it asks the internet otherwise
for package in ("openai", "anthropic", "google.genai", "litellm"):
    pytest.importorskip(package, reason=f"{package} is a development requirement")

# Vendors' packages warn of themselves when imported and used.
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("UserWarning", "DeprecationWarning")]
PNG = b"\x89PNG\r\n\x1a\n" + b"0" * 8
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.stop()


@pytest.fixture(params=WIRES, ids=lambda wire: wire.name)
def wire(request: pytest.FixtureRequest) -> Wire:
    given: Wire = request.param
    return given


@pytest.fixture
def backend(wire: Wire, server: Server) -> Iterator[bl.Backend]:
    with wire.make(server.url) as made:
        yield made


@bl.function
def two_turns(s: bl.State, block: Any) -> Any:
    s += bl.system("Be brief.")
    s += bl.user("First?")
    s += bl.assistant(bl.gen("first", max_tokens=4))
    s += bl.user("Second?")
    s += bl.assistant(block)
    return s["a"]


def bodies(server: Server) -> list[Any]:
    return [body for _, _, body in server.seen if body]


def test_a_conversation_goes_out_as_messages(wire: Wire, server: Server, backend: bl.Backend) -> None:
    wire.install(server, ["It ", "is ✓"])
    state = two_turns.run(block=bl.gen("a", max_tokens=8, temperature=0.5, stop=["x"]), backend=backend)
    assert state.ret_value == "It is ✓"
    assert wire.sent_messages(bodies(server)[1]) == [
        ("system", "Be brief."),
        ("user", "First?"),
        ("assistant", "It is ✓"),
        ("user", "Second?"),
    ]
    meta = state.get_meta_info("a")
    assert meta["finish_reason"] == {"type": "stop"}
    assert (meta["prompt_tokens"], meta["cached_tokens"], meta["completion_tokens"]) == (5, 3, 2)


def test_pieces_are_seen_as_they_come(wire: Wire, server: Server, backend: bl.Backend) -> None:
    wire.install(server, ["It ", "is"])
    state = two_turns.run(block=bl.gen("a"), backend=backend, stream=True)
    assert list(state.text_iter("a")) == ["It ", "is"]


def test_a_schema_goes_out_as_one_that_must_be_kept(wire: Wire, server: Server, backend: bl.Backend) -> None:
    wire.install(server, ['{"a": ', "1}"])
    two_turns.run(block=bl.gen("a", json_schema=SCHEMA), backend=backend)
    assert wire.sent_schema(bodies(server)[1]) == SCHEMA


@pytest.mark.parametrize(
    "block",
    [
        bl.gen("a", regex="[0-9]+"),
        bl.gen("a", ebnf='root ::= "a"'),
        bl.gen("a", dtype=int),
        bl.select("a", ["yes", "no"]),
        bl.gen("a", min_tokens=3),
        bl.gen("a", ignore_eos=True),
        bl.gen("a", return_logprob=True),
    ],
    ids=["regex", "ebnf", "dtype", "select", "min_tokens", "ignore_eos", "return_logprob"],
)
def test_what_a_vendor_cannot_do_is_refused_before_that_call(
    wire: Wire, server: Server, backend: bl.Backend, block: Any
) -> None:
    wire.install(server, ["no"])

    @bl.function
    def only(s: bl.State) -> None:
        s += bl.user("Q")
        s += bl.assistant(block)

    with pytest.raises(bl.UnsupportedError, match=r"is not possible on|cannot be enforced by"):
        only.run(backend=backend)
    assert bodies(server) == []


def test_a_stream_that_breaks_is_an_error(wire: Wire, server: Server, backend: bl.Backend) -> None:
    wire.install(server, None)
    with pytest.raises(bl.ProgramError, match=r"(?i)stream ended before"):
        two_turns.run(block=bl.gen("a"), backend=backend, stream=True).sync()


def test_a_refusal_keeps_its_status_and_is_retried_as_often_as_asked(
    wire: Wire, server: Server, backend: bl.Backend
) -> None:
    wire.install(server, 429)

    @bl.function
    def once(s: bl.State) -> None:
        s += bl.user("Q")
        s += bl.assistant(bl.gen("a", retries=1))

    with pytest.raises(bl.ProgramError, match=r"answered 429.*too many cooks") as refused:
        once.run(backend=backend)
    assert isinstance(refused.value.cause, bl.BackendError) and refused.value.cause.status == 429
    assert len(bodies(server)) == 2


def test_a_fault_of_the_caller_is_not_retried(wire: Wire, server: Server, backend: bl.Backend) -> None:
    wire.install(server, 400)
    with pytest.raises(bl.ProgramError, match="answered 400"):
        two_turns.run(block=bl.gen("a"), backend=backend)
    assert len(bodies(server)) == 1


def test_nobody_at_the_address_is_said(wire: Wire) -> None:
    @bl.function
    def once(s: bl.State) -> None:
        s += bl.user("Q")
        s += bl.assistant(bl.gen("a", retries=0))

    with (
        wire.make("http://127.0.0.1:9") as nobody,
        pytest.raises(bl.ProgramError) as failed,
    ):
        once.run(backend=nobody)
    assert isinstance(failed.value.cause, bl.BackendError), failed.value


def test_text_outside_of_messages_is_refused_and_not_lost(wire: Wire, server: Server, backend: bl.Backend) -> None:
    wire.install(server, ["no"])

    @bl.function
    def bare(s: bl.State) -> None:
        s += "Q" + bl.gen("a")

    @bl.function
    def between(s: bl.State) -> None:
        s += bl.user("Q")
        s += "lost?"
        s += bl.assistant(bl.gen("a"))

    for program, words in ((bare, "outside of messages"), (between, "takes messages only")):
        with pytest.raises(bl.ProgramError, match=words):
            program.run(backend=backend)
    assert bodies(server) == []


def test_a_begun_message_is_refused_where_the_api_cannot_go_on_with_it(
    wire: Wire, server: Server, backend: bl.Backend
) -> None:
    wire.install(server, ["no"])
    with pytest.raises(bl.ProgramError, match="begun assistant message"):
        two_turns.run(block="Well: " + bl.gen("a"), backend=backend)


def test_branches_of_a_vendor_run_side_by_side_in_plain_and_async_programs(
    wire: Wire, server: Server, backend: bl.Backend
) -> None:
    wire.install(server, ["leaf"])

    @bl.function
    def tree(s: bl.State) -> Any:
        s += bl.user("Q")
        forks = s.fork(3)
        for branch in forks:
            branch += bl.assistant(bl.gen("leaf"))
        forks.join()
        return s["leaf"]

    assert tree.run(backend=backend).ret_value == ["leaf"] * 3

    @bl.function
    async def one(s: bl.State) -> Any:
        s += bl.user("Q")
        s += bl.assistant(bl.gen("leaf"))
        return await s.get("leaf")

    async def main() -> Any:
        state = await one.run_async(backend=backend)
        await backend.aclose()
        return state.ret_value

    assert asyncio.run(main()) == "leaf"


# ---- single vendors ------------------------------------------------------------------------------


def test_openai_answers_n_sequences(server: Server) -> None:
    WIRES[0].install(server, ["one"])
    with WIRES[0].make(server.url) as backend:
        state = two_turns.run(block=bl.gen("a", n=2, seed=3, top_p=0.5), backend=backend)
    assert state["a"] == ["one", "one"]
    sent = bodies(server)[1]
    assert (sent["n"], sent["seed"], sent["top_p"], sent["max_completion_tokens"]) == (2, 3, 0.5, 128)


def test_openai_takes_four_stops(server: Server) -> None:
    with WIRES[0].make(server.url) as backend, pytest.raises(bl.UnsupportedError, match="at most 4 values of stop"):
        two_turns.run(block=bl.gen("a", stop=list("abcde")), backend=backend)


def test_openai_completions_take_the_text_as_it_is(server: Server) -> None:
    def reply(body: Any) -> Any:
        choice = {"index": 0, "text": " Paris", "finish_reason": "length", "logprobs": None}
        return {"id": "c", "created": 1, "model": "m", "object": "text_completion", "choices": [choice]}

    server.answers["/v1/completions"] = reply

    @bl.function
    def capital(s: bl.State) -> Any:
        s += "France:" + bl.gen("city", max_tokens=2)
        return s["city"]

    with bl.OpenAI("m", is_chat_model=False, api_key="k", base_url=f"{server.url}/v1") as backend:
        state = capital.run(backend=backend)
    assert state.ret_value == " Paris" and state.get_meta_info("city")["finish_reason"] == {"type": "length"}
    assert bodies(server) == [{"model": "m", "prompt": "France:", "max_tokens": 2}]


def test_select_on_completions_scores_the_choices_own_tokens(server: Server) -> None:
    logprobs = {" good": [-0.5, -0.25], " bad": [-1.0, -2.0]}

    def reply(body: Any) -> Any:
        prefix, choice = "It is", body["prompt"].removeprefix("It is")
        tokens = [prefix, choice[:2], choice[2:], " generated"]
        offsets = [0, len(prefix), len(prefix) + 2, len(prefix) + len(choice)]
        given = {"tokens": tokens, "text_offset": offsets, "token_logprobs": [None, *logprobs[choice], -9.0]}
        item = {"index": 0, "text": "", "finish_reason": "length", "logprobs": {**given, "top_logprobs": None}}
        return {"id": "c", "created": 1, "model": "m", "object": "text_completion", "choices": [item]}

    server.answers["/v1/completions"] = reply

    @bl.function
    def judge(s: bl.State, method: str) -> Any:
        s += "It is" + bl.select("verdict", [" bad", " good"], choices_method=method)
        return s["verdict"]

    make: dict[str, Any] = {"is_chat_model": False, "api_key": "k", "base_url": f"{server.url}/v1"}
    with bl.OpenAI("m", echo_logprobs=True, **make) as backend:
        state = judge.run(method="exact", backend=backend)
        assert state.ret_value == " good"
        assert state.get_meta_info("verdict")["scores"] == [-3.0, -0.75]
        with pytest.raises(bl.UnsupportedError, match="unconditional_likelihood_normalized"):
            judge.run(method="unconditional_likelihood_normalized", backend=backend)
    with bl.OpenAI("m", **make) as backend, pytest.raises(bl.UnsupportedError, match="possible: none"):
        judge.run(method="exact", backend=backend)


def test_anthropic_goes_on_with_a_begun_message_if_the_model_does(server: Server) -> None:
    WIRES[1].install(server, ["done"])
    with bl.Anthropic("m", prefill=True, api_key="k", base_url=server.url) as backend:
        state = two_turns.run(block="Well: " + bl.gen("a"), backend=backend)
    assert bodies(server)[1]["messages"][-1] == {"role": "assistant", "content": "Well: "}
    assert state.messages()[-1]["content"] == "Well: done"


def test_a_conversation_keeps_its_system_message(server: Server) -> None:
    WIRES[1].install(server, ["done"])
    with WIRES[1].make(server.url) as backend:
        state = two_turns.run(block=bl.gen("a"), backend=backend)
    assert [body["system"] for body in bodies(server)] == ["Be brief."] * 2
    assert state.messages()[0] == {"role": "system", "content": "Be brief."}


def test_litellm_says_which_model_it_does_not_know() -> None:
    with pytest.raises(bl.BackendError, match="knows no provider of 'nonsense'"):
        bl.LiteLLM("nonsense")


def test_a_prompt_that_gemini_blocks_is_an_error(server: Server) -> None:
    blocked = b'data: {"promptFeedback": {"blockReason": "SAFETY"}}\n\n'
    server.answers["/v1/models/m:streamGenerateContent"] = lambda body: [blocked]
    with WIRES[2].make(server.url) as backend, pytest.raises(bl.ProgramError, match="blocked the prompt"):
        two_turns.run(block=bl.gen("a"), backend=backend)


# ---- pictures ------------------------------------------------------------------------------------


@bl.function
def look(s: bl.State, source: Any) -> Any:
    with s.user():
        s += bl.image(source) + "What is it?"
    s += bl.assistant(bl.gen("a"))
    return s["a"]


def pictures(body: Any) -> list[str]:
    """Base64 of the pictures in any vendor's body."""
    found: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if "url" in value and str(value["url"]).startswith("data:image/png;base64,"):
                found.append(value["url"].partition(",")[2])
            if "image/png" in (value.get("media_type"), value.get("mime_type"), value.get("mimeType")):
                found.append(value["data"])
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)

    walk(body)
    return found


def test_a_picture_goes_out_from_bytes_file_and_data_url(
    wire: Wire, server: Server, backend: bl.Backend, tmp_path: Path
) -> None:
    wire.install(server, ["a dot"])
    file = tmp_path / "dot.bin"
    file.write_bytes(PNG)
    encoded = base64.b64encode(PNG).decode()
    for source in (PNG, str(file), f"data:image/png;base64,{encoded}"):
        assert look.run(source=source, backend=backend).ret_value == "a dot"
    assert [pictures(body) for body in bodies(server)] == [[encoded]] * 3


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (b"no picture", "no PNG, JPEG, GIF or WebP"),
        ("/no/such/file.png", "cannot be read: No such file"),
        ("data:image/png,xx", "write data:image/png;base64"),
        ("data:image/png;base64,***", "is not base64"),
    ],
)
def test_what_is_no_picture_is_said(source: str | bytes, words: str) -> None:
    with pytest.raises(bl.ArgumentError, match=words):
        conversation.picture(source)


def test_a_picture_elsewhere_is_sent_as_its_address() -> None:
    shown = conversation.picture("https://example.org/a.png")
    assert (shown.any_url, shown.media_type) == ("https://example.org/a.png", "image/png")


def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(ImportError, match=r"pip install 'branchline\[openai\]'"):
        conversation.needed("openai", "openai")


def test_an_unexpected_answer_of_another_length_is_an_error(server: Server) -> None:
    empty = {"id": "c", "created": 1, "model": "m", "object": "chat.completion", "choices": []}
    server.answers["/v1/chat/completions"] = lambda body: web.json_response(empty)
    with WIRES[0].make(server.url) as backend, pytest.raises(bl.ProgramError, match="0 of 1 sequences"):
        two_turns.run(block=bl.gen("a"), backend=backend)
