"""The cases of area dsl, each with the values it asks for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import Any

import pytest
from branchline import lang as bl
from branchline.lang.backends.base import GenCall

CHATML_USER = "<|im_start|>user\nhello<|im_end|>\n"


def test_dsl_fork_of_empty_state() -> None:
    def program(prefix: str, size: int) -> tuple[bl.Mock, list[str]]:
        mock = bl.Mock(answers=["1"])

        @bl.function
        def ask(s: bl.State) -> list[str]:
            s += prefix
            forks = s.fork(size)
            for branch in forks:
                branch += "A" + bl.gen("x")
            forks.join()
            return list(s["x"])

        return mock, ask.run(backend=mock).ret_value

    mock, values = program("", 2)
    assert [call.prompt.text for call in mock.calls] == ["A", "A"]
    assert (values, mock.planted) == (["1", "1"], [])
    mock, values = program("with text ", 1)
    assert (values, mock.planted) == (["1"], [])
    mock, values = program("with text ", 2)
    assert (values, mock.planted) == (["1", "1"], ["with text "])
    assert mock.meter.held == 0


def test_dsl_fork_inside_a_role() -> None:
    @bl.function
    def chat(s: bl.State) -> Any:
        s += bl.user("Q1")
        s += bl.assistant_begin()
        s += "So "
        child = s.fork(1)[0]
        child += "far"
        child += bl.assistant_end()
        mine = child.messages()
        s += bl.assistant_end()
        return mine, s.branch.messages[:1]

    child, parent = chat.run(backend=bl.Mock()).ret_value
    assert child == [{"role": "user", "content": "Q1"}, {"role": "assistant", "content": "So far"}]
    assert [(item.role, item.content) for item in parent] == [("user", "Q1")]


@pytest.mark.parametrize(("method", "decision"), [("token_length_normalized", "A"), ("greedy_token_selection", "B")])
def test_dsl_select_slice(method: str, decision: str) -> None:
    mock = bl.Mock(scores={"A": [-1.2], "B": [-1.0, -1.5, -1.2]})

    @bl.function
    def ask(s: bl.State) -> Any:
        s += "Q:" + bl.select("c", ["A", "B"], choices_method=method)
        return s["c"], s.get_meta_info("c")["normalized_prompt_logprobs"]

    picked, means = ask.run(backend=mock).ret_value
    assert picked == decision
    assert means == pytest.approx([-1.2, -1.233333], abs=1e-6)


def test_dsl_choices_with_defaults() -> None:
    @bl.function
    def ask(s: bl.State) -> None:
        s += "Q: x? "
        s += bl.gen("c", choices=["red", "blue"])

    state = ask.run(backend=bl.Mock())
    assert state["c"] in ("red", "blue")
    assert state.text().endswith(state["c"])

    down = bl.Mock(scores=RuntimeError("down"))
    with pytest.raises(bl.ProgramError, match=r"'c'.*down") as raised:
        ask.run(backend=down)
    assert isinstance(raised.value.cause, RuntimeError)
    state = ask.run(backend=down, on_error="state")
    with pytest.raises(bl.ProgramError, match="down"):
        state["c"]


def test_dsl_n_greater_than_one() -> None:
    mock = bl.Mock(answers=[["<think>r0</think>x0", "<think>r1</think>x1", "x2"]])

    @bl.function
    def ask(s: bl.State) -> None:
        s += bl.user("q")
        s += bl.separate_reasoning(bl.assistant(bl.gen("a", n=3)), model_type="deepseek-r1")

    state = ask.run(backend=mock)
    assert state["a"] == ["x0", "x1", "x2"]
    assert state["a_reasoning_content"] == ["r0", "r1", ""]
    assert state.error() is None
    assert "x0" in state.text()


def batch_program(mock: bl.Mock) -> bl.Program:
    @bl.function
    def item(s: bl.State, number: int) -> None:
        s += f"item {number}: " + bl.gen("x")
        if number == 2:
            raise ValueError("boom")
        s.sync()

    return item


def slow_first(call: GenCall) -> Any:
    async def answer() -> str:
        if call.prompt.text.startswith("item 0"):
            await slow_first.gate.wait()  # type: ignore[attr-defined]
        return "v"

    return answer()


def test_dsl_run_batch_order() -> None:
    slow_first.gate = asyncio.Event()  # type: ignore[attr-defined]
    mock = bl.Mock(answers=slow_first)
    threads = threading.active_count()
    ended: list[int] = []

    def progress(done: int, total: int) -> None:
        ended.append(done)
        if done == total - 1:  # all others are done: let the slow one go
            mock.calls[0]
            bl_loop().call_soon_threadsafe(slow_first.gate.set)  # type: ignore[attr-defined]

    items = [{"number": number} for number in range(5)]
    states = batch_program(mock).run_batch(
        items, backend=mock, num_threads=5, on_error="collect", progress=progress, generator_style=True
    )
    results = list(states)
    assert ended == [1, 2, 3, 4, 5]
    assert [type(state.failure) for state in results] == [type(None)] * 2 + [ValueError] + [type(None)] * 2
    assert [state["x"] for state in results if state.failure is None] == ["v"] * 4
    assert threading.active_count() <= threads + 1  # the language's one loop stays


def bl_loop() -> asyncio.AbstractEventLoop:
    from branchline.lang import hosts

    return hosts.background().loop


def test_dsl_select_in_text_once() -> None:
    mock = bl.Mock(scores={" red": [-3.0], " green": [-1.0], " blue": [-2.0]})

    @bl.function
    def ask(s: bl.State) -> None:
        s += "Colour:"
        s += bl.select("v", choices=[" red", " green", " blue"])
        s += "."

    state = ask.run(backend=mock)
    assert (state.text(), state["v"]) == ("Colour: green.", " green")
    streamed = ask.run(backend=mock, stream=True)
    assert "".join(streamed.text_iter()) == "Colour: green."


def test_dsl_batch_failures_are_reported() -> None:
    mock = bl.Mock(answers=lambda call: f"ok-{call.prompt.text}")

    @bl.function
    def item(s: bl.State, a: int) -> None:
        s += str(a) + bl.gen("x")
        if a == 42:
            raise ValueError("boom")

    items = [{"a": a} for a in (1, 42, 3)]
    for states in (
        item.run_batch(items, backend=mock, on_error="collect"),
        list(item.run_batch(items, backend=mock, on_error="collect", generator_style=True)),
    ):
        assert [state["x"] for state in states if state.failure is None] == ["ok-1", "ok-3"]
        failed = [(index, type(s.failure).__name__, str(s.failure)) for index, s in enumerate(states) if s.failure]
        assert failed == [(1, "ValueError", "boom")]
    with pytest.raises(ValueError, match="boom") as raised:
        item.run_batch(items, backend=mock)
    assert "in item 1 of the batch" in raised.value.__notes__
    assert str(raised.traceback[-1].path) == __file__


def test_dsl_none_is_a_result() -> None:
    mock = bl.Mock(answers=["v"])
    told: list[int] = []

    @bl.function
    def item(s: bl.State, a: int) -> None:
        s += f"{a}" + bl.gen("x")

    states = item.run_batch(
        [{"a": a} for a in (1, 2, 3, 4)], backend=mock, num_threads=2, progress=lambda done, total: told.append(done)
    )
    assert len(mock.calls) == 4
    assert told == [1, 2, 3, 4]
    assert [(state.ret_value, state.failure) for state in states] == [(None, None)] * 4


def test_dsl_fallback_only_for_its_own_error() -> None:
    from pydantic import BaseModel

    class Thing(BaseModel):
        size: int

    @bl.function
    def ask(s: bl.State) -> Any:
        s += "x" + bl.gen("x", type=Thing)
        return s["x"]

    for answer, kind in ((RuntimeError("401 bad key"), RuntimeError), (TypeError("callback"), TypeError)):
        mock = bl.Mock(answers=[answer])
        with pytest.raises(bl.ProgramError) as raised:
            ask.run(backend=mock)
        assert isinstance(raised.value.cause, kind)
        assert len(mock.calls) == 1
    mock = bl.Mock(answers=["no JSON"])
    with pytest.raises(bl.ProgramError) as raised:
        ask.run(backend=mock)
    assert isinstance(raised.value.cause, bl.ParseError)
    assert raised.value.cause.raw == "no JSON"
    assert [call.gen.json_schema is not None for call in mock.calls] == [True]


def test_dsl_backend_lacks_a_constraint() -> None:
    class Weak(bl.Mock):
        name = "weak"
        options = frozenset({"top_p"})
        constraints = frozenset({"json_schema"})
        select_methods = frozenset({"token_length_normalized"})

    refused: list[Any] = [
        bl.gen("n", regex="[0-9]+"),
        bl.gen("n", ebnf='root ::= "a"'),
        bl.gen("n", min_tokens=3),
        bl.select("n", ["a", "b"], choices_method="greedy_token_selection"),
    ]
    for block in refused:
        mock = Weak()

        @bl.function
        def ask(s: bl.State, block: Any = block) -> None:
            s += "n: "
            s += bl.gen("a")
            s.sync()
            s += block

        with pytest.raises(bl.UnsupportedError, match="weak"):
            ask.run(backend=mock)
        assert [call.gen.name for call in mock.calls] == ["a"]
        assert mock.selects == []


def test_dsl_streams_of_forks_are_labelled() -> None:
    pieces = {0: "abc", 1: "123"}
    mock = bl.Mock(answers=lambda call: pieces[call.context.branch[0]], chunk=1)
    seen: dict[int, list[str]] = {0: [], 1: []}

    async def main() -> bl.State:
        @bl.function
        async def ask(s: bl.State) -> list[str]:
            s += "Q"

            def listen(event: bl.Event) -> None:
                if event.kind == "delta":
                    assert event.variable == "x"
                    seen[event.branch[0]].append(event.text)

            s.branch.run.listen(listen)
            forks = s.fork(2)
            for branch in forks:
                branch += bl.gen("x")
            streams = [[piece async for piece in branch.text_async_iter("x")] for branch in forks]
            assert streams == [["a", "b", "c"], ["1", "2", "3"]]
            assert s.branch.stream.pieces == ["Q"]
            forks.join()
            return list(await s.get("x"))

        return await ask.run_async(backend=mock)

    assert asyncio.run(main()).ret_value == ["abc", "123"]
    assert seen == {0: ["a", "b", "c"], 1: ["1", "2", "3"]}


def test_dsl_roles_inside_helpers() -> None:
    runs: list[int] = []

    def helper(s: bl.State) -> None:
        runs.append(1)
        with s.user():
            s += "hello"

    @bl.function
    def inner(s: bl.State) -> None:
        helper(s)

    @bl.function
    def plain(s: bl.State) -> None:
        helper(s)

    @bl.function
    def called(s: bl.State) -> None:
        inner(s)

    @bl.function
    def forked(s: bl.State) -> Any:
        child = s.fork(1)[0]
        helper(child)
        return child.text(), child.messages()

    mock = bl.Mock()
    for state in (plain.run(backend=mock), called.run(backend=mock), plain.run_batch([{}], backend=mock)[0]):
        assert state.text() == CHATML_USER
        assert state.messages()[-1] == {"role": "user", "content": "hello"}
    text, messages = forked.run(backend=mock).ret_value
    assert (text, messages[-1]) == (CHATML_USER, {"role": "user", "content": "hello"})
    assert len(runs) == 4


def test_dsl_every_run_raises() -> None:
    @bl.function
    def before(s: bl.State) -> None:
        raise ValueError("here")

    @bl.function
    def after(s: bl.State) -> None:
        s += "x"
        raise ValueError("here")

    @bl.function
    def inside(s: bl.State) -> None:
        with s.user():
            raise ValueError("here")

    @bl.function
    def in_fork(s: bl.State) -> None:
        s += "x"
        forks = s.fork(3)
        for index, branch in enumerate(forks):
            branch += bl.gen("y")
            if index == 1:
                raise ValueError("here")

    @bl.function
    def good(s: bl.State) -> None:
        s += bl.user("q") + bl.assistant(bl.gen("a"))

    mock = bl.Mock(answers=["v"], delay_s=0.01)
    for program in (before, after, inside, in_fork):
        for _ in range(3):
            with pytest.raises(ValueError, match="here") as raised:
                program.run(backend=mock)
            assert str(raised.traceback[-1].path) == __file__
            assert mock.meter.in_flight == 0
            assert mock.meter.held == 0
            assert good.run(backend=mock)["a"] == "v"


ALONE = """
from branchline import lang as bl
@bl.function
def p(s):
    {body}
mock = bl.Mock()
state = p.run(backend=mock)
print(repr(state["c"]), len(mock.selects))
"""


@pytest.mark.parametrize(
    ("body", "right"),
    [
        ("s += 'Choice:' + bl.select('c', [' pos', ' neg'])", "' pos' 1"),
        ("s += bl.select('c', ['pos', 'neg'])", "'pos' 1"),
        ("s += bl.user('q'); s += bl.assistant(bl.select('c', ['pos']))", "'pos' 0"),
    ],
)
def test_dsl_select_alone(body: str, right: str) -> None:
    out = subprocess.run(
        [sys.executable, "-c", ALONE.format(body=body)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (out.returncode, out.stdout.strip()) == (0, right), out.stderr
