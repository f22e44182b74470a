"""Runs: limits, retries, cancellation, events, joins, batches."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from branchline import lang as bl
from branchline.lang import hosts
from branchline.lang.backends.base import GenCall


async def forever(call: GenCall) -> str:
    await asyncio.Event().wait()
    return ""


@bl.function
def ask(s: bl.State) -> Any:
    s += "Q" + bl.gen("a", max_tokens=8)
    return s["a"]


def test_a_blocks_timeout_names_the_limit_and_aborts_the_call() -> None:
    mock = bl.Mock(answers=forever)

    @bl.function
    def slow(s: bl.State) -> None:
        s += bl.gen("a", timeout_s=0.05)

    with pytest.raises(bl.ProgramError, match=r"timeout_s=0\.05") as raised:
        slow.run(backend=mock)
    assert isinstance(raised.value.cause, bl.DeadlineError)
    assert len(mock.aborted) == 1


def test_a_programs_deadline_ends_every_branch() -> None:
    mock = bl.Mock(answers=forever)

    @bl.function
    def slow(s: bl.State) -> None:
        s += "x"
        forks = s.fork(3)
        forks += bl.gen("a")
        forks.join()

    with pytest.raises(bl.ProgramError, match="deadline"):
        slow.run(backend=mock, timeout_s=0.05)
    assert mock.meter.in_flight == 0
    assert mock.meter.held == 0


@pytest.mark.parametrize(("status", "calls"), [(503, 3), (429, 3), (400, 1), (None, 1)])
def test_only_refusals_that_may_pass_are_retried(status: int | None, calls: int) -> None:
    mock = bl.Mock(answers=[bl.BackendError("no", status=status, retry_after_s=0.0)])
    with pytest.raises(bl.ProgramError, match="no"):
        ask.run(backend=mock)
    assert len(mock.calls) == calls


def test_a_retry_that_succeeds_is_not_seen() -> None:
    mock = bl.Mock(answers=[bl.BackendError("busy", status=503, retry_after_s=0.0), "fine"])
    assert ask.run(backend=mock).ret_value == "fine"


def test_retries_can_be_turned_off() -> None:
    mock = bl.Mock(answers=[bl.BackendError("busy", status=503)])

    @bl.function
    def once(s: bl.State) -> None:
        s += bl.gen("a", retries=0)

    with pytest.raises(bl.ProgramError, match="busy"):
        once.run(backend=mock)
    assert len(mock.calls) == 1


def test_nothing_is_retried_after_the_first_piece() -> None:
    class Breaking(bl.Mock):
        async def generate(self, call: GenCall) -> Any:
            async for piece in super().generate(call):
                yield piece
                raise bl.BackendError("broke", status=503)

    mock = Breaking(answers=["long answer"])
    with pytest.raises(bl.ProgramError, match="broke"):
        ask.run(backend=mock)
    assert len(mock.calls) == 1


def test_cancelling_the_task_of_an_async_program_aborts_its_calls() -> None:
    mock = bl.Mock(answers=forever)

    @bl.function
    async def slow(s: bl.State) -> None:
        s += bl.gen("a")
        await s.get("a")

    async def main() -> None:
        task = asyncio.create_task(slow.run_async(backend=mock))
        while mock.meter.in_flight == 0:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert mock.meter.in_flight == 0
    assert len(mock.aborted) == 1


def test_a_plain_program_can_be_awaited() -> None:
    assert asyncio.run(ask.run_async(backend=bl.Mock(answers=["v"]))).ret_value == "v"


def test_events_tell_start_deltas_and_end_of_each_variable() -> None:
    async def main() -> list[bl.Event]:
        @bl.function
        async def asks(s: bl.State) -> list[bl.Event]:
            seen: list[bl.Event] = []
            s.branch.run.listen(seen.append)
            s += bl.gen("a") + bl.select("c", ["x", "y"])
            await s.async_sync()
            return seen

        return list((await asks.run_async(backend=bl.Mock(answers=["abcdef"]))).ret_value)

    events = asyncio.run(main())
    assert [(event.kind, event.variable, event.text) for event in events] == [
        ("start", "a", ""),
        ("delta", "a", "abcd"),
        ("delta", "a", "ef"),
        ("end", "a", ""),
        ("start", "c", ""),
        ("end", "c", ""),
    ]
    assert events[-1].value == "x"


def test_joining_can_append_the_branches_texts_in_order() -> None:
    @bl.function
    def tree(s: bl.State) -> None:
        s += "root"
        with s.fork(2) as forks:
            for index, branch in enumerate(forks):
                branch += f"[{index}:" + bl.gen(f"v{index}") + "]"
            forks.join("concate_and_append")
        assert s["v0"] == ["v", bl.MISSING]
        assert s["v1"] == [bl.MISSING, "v"]

    assert tree.run(backend=bl.Mock(answers=["v"])).text() == "root[0:v][1:v]"


def test_a_with_block_joins_by_itself_and_cancels_on_an_exception() -> None:
    mock = bl.Mock(answers=forever)

    @bl.function
    def tree(s: bl.State) -> None:
        s += "x"
        with pytest.raises(ValueError, match="mine"), s.fork(2) as forks:
            forks += bl.gen("a")
            raise ValueError("mine")

    tree.run(backend=mock)
    assert mock.meter.held == 0

    @bl.function
    def joined(s: bl.State) -> Any:
        s += "x"
        with s.fork(2) as forks:
            forks += bl.gen("a")
        return s["a"]

    assert joined.run(backend=bl.Mock(answers=["v"])).ret_value == ["v", "v"]


def test_nested_forks_hold_their_own_prefixes_and_let_them_go() -> None:
    mock = bl.Mock(answers=["v"])

    @bl.function
    def tree(s: bl.State) -> Any:
        s += "root "
        outer = s.fork(2)
        for index, branch in enumerate(outer):
            branch += f"{index} "
            inner = branch.fork(2)
            inner += bl.gen("leaf")
            inner.join()
        outer.join()
        return s["leaf"]

    assert tree.run(backend=mock).ret_value == [["v", "v"], ["v", "v"]]
    assert sorted(mock.planted) == ["root ", "root 0 ", "root 1 "]
    assert len(mock.released) == 3
    assert mock.meter.held == 0
    leases = {call.prompt.text: call.context.lease for call in mock.calls}
    assert leases["root 0 "] != leases["root 1 "]


def test_a_failing_sibling_cancels_what_runs_on_the_server() -> None:
    async def answer(call: GenCall) -> Any:
        if call.context.branch != (1,):
            return await forever(call)
        while mock.meter.in_flight < 3:
            await asyncio.sleep(0)
        return RuntimeError("down")

    mock = bl.Mock(answers=answer)

    @bl.function
    def tree(s: bl.State) -> None:
        s += "x"
        forks = s.fork(3)
        forks += bl.gen("a")
        forks.join()

    with pytest.raises(bl.ProgramError, match="branch 1"):
        tree.run(backend=mock)
    assert mock.meter.in_flight == 0
    assert {call.context.branch for call in mock.aborted} >= {(0,), (2,)}


def test_a_state_plus_a_block_is_another_state() -> None:
    @bl.function
    def values(s: bl.State) -> tuple[str, str]:
        s += "a"
        other = s + "b"
        return s.text(), other.text()

    assert values.run(backend=bl.Mock()).ret_value == ("a", "ab")


def test_variables_can_be_set_scoped_and_looked_for() -> None:
    @bl.function
    def values(s: bl.State) -> Any:
        s["mine"] = 3
        with s.var_scope("part"):
            s += "x" + bl.gen("y")
        s += bl.named("tail", "z")
        assert "mine" in s
        assert "other" not in s
        with pytest.raises(bl.UnknownVariable, match="other"):
            s["other"]
        return s["mine"], s["part"], s["tail"], s.get_meta_info("y")["finish_reason"]

    assert values.run(backend=bl.Mock(answers=["v"])).ret_value == (3, "xv", "z", {"type": "stop"})


def test_blocks_after_the_end_of_a_program_are_refused() -> None:
    state = ask.run(backend=bl.Mock())
    with pytest.raises(bl.LangError, match="has ended"):
        state += "more"


def test_roles_that_do_not_match_are_errors_with_the_line() -> None:
    @bl.function
    def wrong(s: bl.State) -> None:
        s += bl.user_begin() + bl.assistant_begin()

    with pytest.raises(bl.ProgramError, match="assistant begins inside user") as raised:
        wrong.run(backend=bl.Mock())
    assert raised.value.place is not None
    assert raised.value.place.file == __file__


def test_a_batch_runs_no_more_than_its_limit_at_once_and_leaves_no_host() -> None:
    hosts.background()
    before = threading.active_count()
    mock = bl.Mock(answers=["v"])
    states = ask.run_batch([{}] * 50, backend=mock, num_threads=4)
    assert [state.ret_value for state in states] == ["v"] * 50
    assert mock.meter.most_in_flight <= 4
    assert threading.active_count() == before


def test_an_async_batch_needs_no_thread() -> None:
    hosts.background()
    before = threading.active_count()

    @bl.function
    async def item(s: bl.State, a: int) -> Any:
        s += f"{a}" + bl.gen("x")
        assert threading.active_count() == before
        return await s.get("x")

    states = item.run_batch([{"a": a} for a in range(20)], backend=bl.Mock(answers=["v"]))
    assert [state.ret_value for state in states] == ["v"] * 20


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bl.gen("a", max_tokens=-1), "max_tokens is -1"),
        (lambda: bl.gen("a", n=0), "n is 0"),
        (lambda: bl.gen("a", temperature=float("nan")), "temperature is nan"),
        (lambda: bl.gen("a", regex="("), "regex"),
        (lambda: bl.gen("a", json_schema="{"), "json_schema is not JSON"),
        (lambda: bl.gen("a", dtype=list), "dtype is"),
        (lambda: bl.gen("a", stop=[""]), "stop is"),
        (lambda: bl.select("a", ["x", "x"]), "twice"),
        (lambda: bl.select("a", ["x"], choices_method="best"), "choices_method is 'best'"),
        (lambda: bl.select("a", ["x"], temperature=-1), "temperature is -1"),
        (lambda: bl.image(""), "image is empty"),
    ],
)
def test_arguments_that_mean_nothing_are_refused_by_name(call: Any, message: str) -> None:
    with pytest.raises(bl.ArgumentError) as raised:
        call()
    assert message in str(raised.value)


def test_a_first_parameter_not_named_s_is_refused() -> None:
    with pytest.raises(bl.ArgumentError, match="must be named s"):

        @bl.function
        def wrong(state: bl.State) -> None: ...


@pytest.mark.parametrize("size", [0, -1, True, "2"])
def test_a_fork_of_a_senseless_size_is_refused(size: Any) -> None:
    @bl.function
    def tree(s: bl.State) -> None:
        s.fork(size)

    with pytest.raises(bl.ArgumentError, match="fork size"):
        tree.run(backend=bl.Mock())


def test_without_a_backend_the_remedy_is_named() -> None:
    bl.set_default_backend(None)
    with pytest.raises(bl.LangError, match="set_default_backend"):
        ask.run()
    bl.set_default_backend(bl.Mock(answers=["v"]))
    assert ask.run().ret_value == "v"
    bl.set_default_backend(None)


def test_a_progress_function_that_raises_harms_no_item_and_is_told_at_the_end() -> None:
    def progress(done: int, total: int) -> None:
        raise ValueError("mine")

    seen: list[Any] = []
    with pytest.raises(ValueError, match="mine"):
        for state in ask.run_batch(
            [{}] * 20, backend=bl.Mock(answers=["v"]), num_threads=3, progress=progress, generator_style=True
        ):
            seen.append(state.ret_value)
    assert seen == ["v"] * 20


def test_a_batch_that_is_left_early_ends_what_runs_and_starts_no_more() -> None:
    hosts.background()
    before = threading.active_count()

    async def first_only(call: GenCall) -> str:
        return "v" if call.prompt.text == "item 0" else await forever(call)

    mock = bl.Mock(answers=first_only)

    @bl.function
    def item(s: bl.State, a: int) -> Any:
        s += f"item {a}" + bl.gen("x")
        return s["x"]

    states = item.run_batch([{"a": a} for a in range(50)], backend=mock, num_threads=4, generator_style=True)
    assert next(states).ret_value == "v"
    states.close()
    assert mock.meter.in_flight == 0
    assert len(mock.calls) <= 5
    assert threading.active_count() == before


def test_an_async_batch_that_is_left_early_aborts_what_runs() -> None:
    async def first_only(call: GenCall) -> str:
        return "v" if call.prompt.text == "item 0" else await forever(call)

    mock = bl.Mock(answers=first_only)

    @bl.function
    async def item(s: bl.State, a: int) -> Any:
        s += f"item {a}" + bl.gen("x")
        return await s.get("x")

    states = item.run_batch([{"a": a} for a in range(50)], backend=mock, num_threads=4, generator_style=True)
    assert next(states).ret_value == "v"
    states.close()
    ended = threading.Event()
    while mock.meter.in_flight:
        ended.wait(0.01)
    assert len(mock.calls) <= 5


@bl.function
def two(s: bl.State) -> Any:
    s += "Q" + bl.gen("a")
    first = s["a"]
    s += bl.gen("b")
    return first + s["b"]


def test_whoever_reads_a_streaming_run_from_outside_waits_for_what_is_still_to_be_appended() -> None:
    state = two.run(backend=bl.Mock(answers=["one", "two"], delay_s=0.05), stream=True)
    assert state["b"] == "two"
    assert state.text() == "Qonetwo"
    assert state.error() is None
    assert state.ret_value == "onetwo"


def test_a_streaming_run_that_fails_says_so_at_the_first_read_whatever_is_read() -> None:
    def failed() -> bl.State:
        return two.run(backend=bl.Mock(answers=["one", bl.BackendError("no")], delay_s=0.05), stream=True)

    reads: list[Callable[[bl.State], object]] = [bl.State.sync, bl.State.text, lambda s: s["b"], bl.State.messages]
    for read in reads:
        with pytest.raises(bl.ProgramError, match="no"):
            read(failed())
    assert isinstance(failed().error(), bl.ProgramError)


def test_a_streaming_programs_own_exception_is_what_its_reader_gets() -> None:
    @bl.function
    def wrong(s: bl.State) -> None:
        s += "Q" + bl.gen("a")
        raise KeyError(s["a"])

    def run() -> bl.State:
        return wrong.run(backend=bl.Mock(answers=["one"], delay_s=0.05), stream=True)

    for name in ("sync", "text"):
        with pytest.raises(KeyError, match="one"):
            getattr(run(), name)()
    with pytest.raises(KeyError, match="one"):
        run()["never"]
    assert run()["a"] == "one"
    assert isinstance(run().error(), KeyError)
