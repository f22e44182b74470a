"""What is known to go wrong in SGLang's language, one test for each of its 29 reproducible holes."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from branchline import lang as bl
from branchline.lang import hosts
from branchline.lang.backends.base import GenCall
from branchline.lang.errors import WouldBlock

DOWN = RuntimeError("down")


def fails_for(*names: str) -> bl.Mock:
    """A backend that fails for variables of these names."""
    return bl.Mock(answers=lambda call: DOWN if call.gen.name in names else f"<{call.gen.name}>")


@bl.function
def two_gens(s: bl.State) -> None:
    s += "x" + bl.gen("a")
    s += bl.gen("b")


def test_01_text_after_an_error_raises_instead_of_hanging() -> None:
    @bl.function
    def ask(s: bl.State) -> None:
        s += bl.gen("a")
        with pytest.raises(bl.ProgramError):
            s.sync()
        s += "more"
        s.text()

    with pytest.raises(bl.ProgramError, match="'a'"):
        ask.run(backend=fails_for("a"))


def test_02_a_variable_asked_for_after_an_error_raises_instead_of_hanging() -> None:
    @bl.function
    def ask(s: bl.State) -> None:
        s += bl.gen("a")
        with pytest.raises(bl.ProgramError):
            s["a"]
        s += bl.gen("b")
        s["b"]

    with pytest.raises(bl.ProgramError, match="'a'"):
        ask.run(backend=fails_for("a"))


def test_03_run_raises_a_failure_that_nobody_read() -> None:
    with pytest.raises(bl.ProgramError, match="'b'") as raised:
        two_gens.run(backend=fails_for("b"))
    assert raised.value.cause is DOWN


def test_04_reading_a_failed_variable_gives_the_cause() -> None:
    state = two_gens.run(backend=fails_for("a"), on_error="state")
    for name in ("a", "b"):
        with pytest.raises(bl.ProgramError, match="RuntimeError: down"):
            state[name]


@bl.function
def three_branches(s: bl.State) -> Any:
    s += "x"
    forks = s.fork(3)
    for branch in forks:
        branch += bl.gen("y")
    forks.join()
    return s["y"]


def fails_in_branch_one(call: GenCall) -> Any:
    return DOWN if call.context.branch == (1,) else "ok"


def test_05_a_failing_branch_is_named_and_the_list_never_shrinks() -> None:
    with pytest.raises(bl.ProgramError) as raised:
        three_branches.run(backend=bl.Mock(answers=fails_in_branch_one))
    assert raised.value.branch == (1,)
    assert raised.value.place is not None
    assert raised.value.place.file == __file__

    @bl.function
    def collect(s: bl.State) -> Any:
        s += "x"
        forks = s.fork(3, on_error="collect")
        forks += bl.gen("y")
        forks.join()
        return s["y"]

    values = collect.run(backend=bl.Mock(answers=fails_in_branch_one)).ret_value
    assert (values[0], values[2]) == ("ok", "ok")
    assert isinstance(values[1], bl.ProgramError)


def test_06_a_branchs_variable_named_like_one_of_the_parent_is_an_error_at_join() -> None:
    @bl.function
    def ask(s: bl.State) -> None:
        s += bl.gen("y")
        forks = s.fork(2)
        forks += bl.gen("y")
        forks.join()

    with pytest.raises(bl.JoinError, match="'y'"):
        ask.run(backend=bl.Mock())


def test_07_one_failing_item_loses_no_other_result() -> None:
    @bl.function
    def item(s: bl.State, a: int) -> int:
        if a == 1:
            raise ValueError("boom")
        s += bl.gen("x")
        return a

    states = item.run_batch([{"a": a} for a in range(3)], backend=bl.Mock(), on_error="collect")
    assert [state.ret_value for state in states] == [0, None, 2]
    assert isinstance(states[1].failure, ValueError)


def test_08_backend_errors_are_raised_where_the_value_is_read() -> None:
    @bl.function
    def ask(s: bl.State) -> str:
        s += bl.gen("a")
        try:
            s["a"]
        except bl.ProgramError as error:
            return str(error.cause)
        return "no error"

    assert ask.run(backend=fails_for("a")).ret_value == "down"


def test_09_a_callers_stop_list_is_never_changed() -> None:
    stops = ["\n"]
    mock = bl.Mock()

    @bl.function
    def ask(s: bl.State) -> None:
        s += bl.user("q") + bl.assistant(bl.gen("a", stop=stops))

    for _ in range(3):
        ask.run(backend=mock)
    assert stops == ["\n"]
    assert [call.sampling.stop for call in mock.calls] == [("\n",)] * 3


def test_10_empty_choices_are_an_error() -> None:
    with pytest.raises(bl.ArgumentError, match="choices is empty"):
        bl.gen("a", choices=[])


def test_11_choices_and_a_regex_exclude_each_other() -> None:
    with pytest.raises(bl.ArgumentError, match="choices and regex"):
        bl.gen("a", choices=["x"], regex="x")


def test_12_a_batch_runs_users_code_once_an_item() -> None:
    ran: list[int] = []

    @bl.function
    def item(s: bl.State, a: int) -> None:
        ran.append(a)
        s += "a long shared prefix " * 10 + str(a) + bl.gen("x")

    item.run_batch([{"a": a} for a in range(4)], backend=bl.Mock())
    assert sorted(ran) == [0, 1, 2, 3]


def test_13_a_key_error_of_one_item_is_that_items() -> None:
    @bl.function
    def item(s: bl.State, a: dict[str, int]) -> int:
        return a["k"]

    states = item.run_batch([{"a": {"k": 1}}, {"a": {}}], backend=bl.Mock(), on_error="collect")
    assert states[0].ret_value == 1
    assert isinstance(states[1].failure, KeyError)


def test_14_role_context_managers_work_in_batches() -> None:
    @bl.function
    def item(s: bl.State, a: int) -> None:
        with s.user():
            s += f"q{a}"
        with s.assistant():
            s += bl.gen("x")

    states = item.run_batch([{"a": a} for a in range(2)], backend=bl.Mock())
    assert [state.messages()[0]["content"] for state in states] == ["q0", "q1"]


class Breaking(bl.Mock):
    """Breaks after the first piece."""

    async def generate(self, call: GenCall) -> Any:
        async for piece in super().generate(call):
            yield piece
            raise bl.BackendError("the stream broke")


def test_15_a_stream_that_breaks_raises_where_it_broke() -> None:
    state = two_gens.run(backend=Breaking(answers=["long answer"]), stream=True)
    pieces: list[str] = []
    with pytest.raises(bl.ProgramError, match="the stream broke"):
        pieces.extend(state.text_iter("a"))
    with pytest.raises(bl.ProgramError, match="the stream broke"):
        for piece in state.text_iter("a"):
            assert piece == "long"


def test_16_the_stream_of_an_unknown_variable_is_an_error() -> None:
    state = two_gens.run(backend=bl.Mock())
    with pytest.raises(bl.UnknownVariable, match=r"'nope'.*a, b"):
        next(state.text_iter("nope"))


def test_17_separate_reasoning_streams_and_ends() -> None:
    @bl.function
    def ask(s: bl.State) -> None:
        s += bl.user("q") + bl.separate_reasoning(bl.assistant(bl.gen("a")))
        s["a"]

    state = ask.run(backend=bl.Mock(answers=["<think>why</think>so"]), stream=True)
    list(state.text_iter())
    assert (state["a"], state["a_reasoning_content"]) == ("so", "why")
    assert "".join(state.text_iter("a")) == "so"


def test_18_api_speculation_is_refused_by_name() -> None:
    with pytest.raises(bl.ArgumentError, match="num_api_spec_tokens"):
        bl.function(num_api_spec_tokens=64)


def test_19_bind_keeps_the_programs_options() -> None:
    @bl.function(hints={"expected_tokens": 7})
    def ask(s: bl.State, a: int, b: int) -> None:
        s += f"{a}{b}" + bl.gen("x")

    mock = bl.Mock()
    ask.bind(a=1).bind(b=2).run(backend=mock)
    assert mock.calls[0].prompt.text == "12"
    assert mock.calls[0].context.expected_tokens == 7


def test_20_copy_leaves_variables_as_they_are() -> None:
    @bl.function
    def ask(s: bl.State) -> Any:
        s += bl.gen("a")
        with s.copy() as c:
            c += bl.gen("b")
            assert c["b"] == "v"
            assert c["a"] == "v"
        assert "b" not in s
        return s["a"]

    assert ask.run(backend=bl.Mock(answers=["v"])).ret_value == "v"


def test_21_an_exception_in_a_role_block_leaves_no_role_open() -> None:
    @bl.function
    def ask(s: bl.State) -> None:
        try:
            with s.user():
                s += "half"
                raise ValueError("mine")
        except ValueError:
            pass
        with s.user():
            s += "again"

    state = ask.run(backend=bl.Mock())
    assert [item["content"] for item in state.messages()] == ["half", "again"]


@pytest.mark.parametrize("noise", [0.0, 1e-7, -1e-7])
def test_22_greedy_selection_does_not_flip_on_noise(noise: float) -> None:
    mock = bl.Mock(scores={"A": [-1.0, -2.0], "B": [-1.0 + noise, -1.0]})

    @bl.function
    def ask(s: bl.State) -> str:
        s += bl.select("c", ["A", "B"], choices_method="greedy_token_selection")
        return str(s["c"])

    assert ask.run(backend=mock).ret_value == "B"


def test_23_a_logprob_of_zero_counts() -> None:
    mock = bl.Mock(scores={"A": [0.0, -2.0], "B": [-1.5]})

    @bl.function
    def ask(s: bl.State) -> Any:
        s += bl.select("c", ["A", "B"])
        return s["c"], s.get_meta_info("c")["normalized_prompt_logprobs"]

    assert ask.run(backend=mock).ret_value == ("A", [-1.0, -1.5])


def test_24_choices_without_tokens_do_not_divide_by_zero() -> None:
    mock = bl.Mock(scores={"A": [], "B": [-1.0]})

    @bl.function
    def ask(s: bl.State) -> str:
        s += bl.select("c", ["A", "B"])
        return str(s["c"])

    assert ask.run(backend=mock).ret_value == "A"


def test_25_dtype_int_takes_a_stop_of_one_string() -> None:
    mock = bl.Mock(answers=["7"])

    @bl.function
    def ask(s: bl.State) -> Any:
        s += bl.gen("n", dtype=int, stop=".")
        return s["n"]

    assert ask.run(backend=mock).ret_value == "7"
    assert mock.calls[0].sampling.stop == (".",)


def test_26_a_fork_of_a_thousand_needs_no_thread() -> None:
    hosts.background()
    before, seen = threading.active_count(), 0

    @bl.function
    def ask(s: bl.State) -> Any:
        nonlocal seen
        s += "x"
        forks = s.fork(1000)
        forks += bl.gen("y")
        forks.join()
        values = s["y"]
        seen = threading.active_count()
        return values

    assert ask.run(backend=bl.Mock(answers=["v"])).ret_value == ["v"] * 1000
    assert seen == before


def test_27_leaving_the_program_aborts_what_runs() -> None:
    async def never(call: GenCall) -> str:
        await asyncio.Event().wait()
        return ""

    mock = bl.Mock(answers=lambda call: never(call))

    @bl.function
    def ask(s: bl.State) -> None:
        s += "x" + bl.gen("a")
        while mock.meter.in_flight == 0:
            threading.Event().wait(0.001)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask.run(backend=mock)
    assert mock.meter.in_flight == 0
    assert len(mock.aborted) == 1


def test_28_async_streams_never_block_the_loop_and_blocking_reads_are_refused() -> None:
    ticks: list[int] = []

    async def main() -> None:
        @bl.function
        async def ask(s: bl.State) -> None:
            s += bl.gen("a")
            with pytest.raises(WouldBlock, match="would block"):
                s["a"]
            async for _ in s.text_async_iter("a"):
                ticks.append(len(ticks))
                await asyncio.sleep(0)

        await asyncio.wait_for(ask.run_async(backend=bl.Mock(answers=["long answer"])), 30)

    asyncio.run(main())
    assert len(ticks) == 3


def test_29_programs_in_other_threads_run_for_themselves() -> None:
    results: list[str] = []

    @bl.function
    def ask(s: bl.State, a: int) -> None:
        s += f"{a}" + bl.gen("x")

    def run(a: int) -> None:
        results.append(ask.run(a=a, backend=bl.Mock(answers=["v"])).text())

    threads = [threading.Thread(target=run, args=(a,)) for a in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [f"{a}v" for a in range(8)]
