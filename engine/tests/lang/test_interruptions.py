"""Programs that are interrupted, abandoned or read at the wrong time: everything ends, nothing is lost or hangs."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
import warnings
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from branchline import lang as bl
from branchline.lang.backends.base import Context, GenCall, Lease, Piece, Prompt

LIMIT_S = 30.0


def ends(work: Callable[[], Any]) -> Any:
    """What `work` returns or raises, on a thread that must end."""
    out: list[Any] = []

    def body() -> None:
        try:
            out.append((True, work()))
        except BaseException as error:
            out.append((False, error))

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "it hangs"
    fine, value = out[0]
    if fine:
        return value
    raise value


class Refused(bl.BackendError):
    """So that tests see that it is theirs."""


@bl.function
def fork_after(s: bl.State) -> Any:
    s += "root" + bl.gen("first", retries=0)
    forks = s.fork(2)
    forks += bl.gen("a")
    forks.join()
    return s["a"]


def test_a_fork_after_a_failure_ends_with_the_failure() -> None:
    with pytest.raises(bl.ProgramError, match="variable 'first'"):
        ends(lambda: fork_after.run(backend=bl.Mock(answers=[Refused("no", status=400)])))


def test_branches_that_nobody_reads_end_after_a_failure_before_the_fork() -> None:
    @bl.function
    def unread(s: bl.State) -> None:
        s += "root" + bl.gen("first", retries=0)
        for branch in s.fork(2):
            branch += bl.gen("a")

    with pytest.raises(bl.ProgramError, match="variable 'first'"):
        ends(lambda: unread.run(backend=bl.Mock(answers=[Refused("no", status=400)])))


def test_a_branch_read_after_a_failure_before_its_fork_raises_that_failure() -> None:
    @bl.function
    def read(s: bl.State) -> None:
        s += "root" + bl.gen("first", retries=0)
        forks = s.fork(2)
        forks += bl.gen("a")
        with pytest.raises(bl.ProgramError, match="variable 'first'"):
            forks[1]["a"]
        with pytest.raises(bl.ProgramError, match="variable 'first'"):
            forks[0].text()

    ends(lambda: read.run(backend=bl.Mock(answers=[Refused("no", status=400)])))


class Unplantable(bl.Mock):
    """A server that cannot hold prefixes because something is wrong with it."""

    async def plant(self, prompt: Prompt, ttl_ms: int, context: Context) -> Lease | None:
        raise Refused("no plants", status=400)


def test_a_fork_whose_prefix_is_refused_ends_with_the_refusal() -> None:
    @bl.function
    def tree(s: bl.State) -> None:
        s += "root"
        forks = s.fork(2)
        forks += bl.gen("a")
        forks.join()

    with pytest.raises(bl.ProgramError, match="no plants"):
        ends(lambda: tree.run(backend=Unplantable()))


class Stuck(bl.Mock):
    """A server that takes calls and never answers: generation, leases, markup and releases alike."""

    async def generate(self, call: GenCall) -> AsyncGenerator[Piece]:
        await asyncio.Event().wait()
        yield Piece("never")

    async def plant(self, prompt: Prompt, ttl_ms: int, context: Context) -> Lease | None:
        await asyncio.Event().wait()
        return None


def test_a_deadline_also_ends_the_wait_for_a_lease() -> None:
    @bl.function
    def tree(s: bl.State) -> None:
        s += "root"
        forks = s.fork(2)
        forks += bl.gen("a")
        forks.join()
        s["a"]

    with pytest.raises(bl.ProgramError, match=r"deadline of 0\.1 s"):
        ends(lambda: tree.run(backend=Stuck(), timeout_s=0.1))


def test_a_deadline_also_ends_an_async_programs_own_waiting() -> None:
    @bl.function
    async def idle(s: bl.State) -> None:
        await asyncio.Event().wait()

    with pytest.raises(bl.DeadlineError, match=r"deadline of 0\.1 s"):
        ends(lambda: idle.run(backend=bl.Mock(), timeout_s=0.1))


class NeverLetsGo(bl.Mock):
    """A server that stops answering before the lease is let go."""

    async def release(self, lease: Lease) -> None:
        await asyncio.Event().wait()


def test_a_server_that_does_not_take_a_lease_back_does_not_hold_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    from branchline.lang import group

    monkeypatch.setattr(group, "RELEASE_S", 0.05)

    @bl.function
    def tree(s: bl.State) -> Any:
        s += "root"
        forks = s.fork(2)
        forks += bl.gen("a")
        forks.join()
        return s["a"]

    assert ends(lambda: tree.run(backend=NeverLetsGo())).ret_value == ["answer", "answer"]


def test_giving_up_one_read_of_a_variable_leaves_it_for_the_next() -> None:
    gate = asyncio.Event()

    async def slow(call: GenCall) -> str:
        await gate.wait()
        return "late"

    @bl.function
    async def impatient(s: bl.State) -> Any:
        s += bl.gen("a")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(s.get("a"), 0.01)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(s.async_text(), 0.01)
        gate.set()
        return await s.get("a")

    async def main() -> Any:
        return (await impatient.run_async(backend=bl.Mock(answers=slow))).ret_value

    assert ends(lambda: asyncio.run(main())) == "late"


def test_giving_up_a_stream_leaves_the_variable_and_its_pieces() -> None:
    gate = asyncio.Event()

    async def slow(call: GenCall) -> str:
        await gate.wait()
        return "0123456789"

    @bl.function
    async def impatient(s: bl.State) -> Any:
        s += bl.gen("a")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                async for _ in s.text_async_iter("a"):
                    pass
        gate.set()
        return [piece async for piece in s.text_async_iter("a")], await s.get("a")

    async def main() -> Any:
        return (await impatient.run_async(backend=bl.Mock(answers=slow))).ret_value

    pieces, value = ends(lambda: asyncio.run(main()))
    assert "".join(pieces) == value == "0123456789"


def test_an_awaited_plain_program_that_is_cancelled_ends_in_silence() -> None:
    begun = threading.Event()

    @bl.function
    def slow(s: bl.State) -> None:
        s += bl.gen("a")
        begun.set()
        s["a"]

    mock = bl.Mock(delay_s=600)
    thrown: list[Any] = []

    async def main() -> None:
        task = asyncio.create_task(slow.run_async(backend=mock))
        await asyncio.to_thread(begun.wait, LIMIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    before, threading.excepthook = threading.excepthook, thrown.append
    try:
        ends(lambda: asyncio.run(main()))
        for thread in threading.enumerate():
            if thread.name == "branchline-lang-program":
                thread.join(LIMIT_S)
    finally:
        threading.excepthook = before
    assert thrown == []
    assert len(mock.aborted) == 1


def test_a_program_that_reads_its_own_text_as_a_stream_goes_on() -> None:
    @bl.function
    def reader(s: bl.State) -> Any:
        s += "Q:" + bl.gen("a")
        own = "".join(s.text_iter())
        forks = s.fork(2, hold=False)
        forks += "+" + bl.gen("b")
        return own, ["".join(branch.text_iter()) for branch in forks]

    own, below = ends(lambda: reader.run(backend=bl.Mock())).ret_value
    assert own == "Q:answer"
    assert below == ["+answer", "+answer"]


def test_an_async_program_that_reads_its_own_text_as_a_stream_goes_on() -> None:
    @bl.function
    async def reader(s: bl.State) -> Any:
        s += "Q:" + bl.gen("a")
        return "".join([piece async for piece in s.text_async_iter()])

    assert ends(lambda: reader.run(backend=bl.Mock())).ret_value == "Q:answer"


@bl.function
def pick_me(s: bl.State, word: str = "w") -> None:
    s += word + bl.gen("a")


def test_programs_and_errors_cross_processes() -> None:
    assert pickle.loads(pickle.dumps(pick_me)) is pick_me
    bound = pickle.loads(pickle.dumps(pick_me.bind(word="x")))
    assert bound.run(backend=bl.Mock())["a"] == "answer"
    assert bound.bound == {"word": "x"}
    with pytest.raises(bl.ProgramError) as raised:
        pick_me.run(backend=bl.Mock(answers=[bl.BackendError("no", status=418)]))
    error = pickle.loads(pickle.dumps(raised.value))
    assert str(error) == str(raised.value)
    assert (error.variable, error.branch, error.place) == ("a", (), raised.value.place)
    assert (error.cause.status, str(error.cause)) == (418, "no")
    parse = pickle.loads(pickle.dumps(bl.ParseError("not a number", "x7")))
    assert (str(parse), parse.raw) == ("not a number", "x7")


def test_the_mark_of_a_missing_value_stays_itself() -> None:
    assert pickle.loads(pickle.dumps([bl.MISSING]))[0] is bl.MISSING
    assert copy.deepcopy([bl.MISSING])[0] is bl.MISSING


def test_a_plain_run_inside_a_running_loop_is_refused_before_anything_is_sent() -> None:
    mock = bl.Mock()

    async def main() -> None:
        with pytest.raises(bl.LangError, match="run_async"):
            pick_me.run(backend=mock)
        with pytest.raises(bl.LangError, match="run_async"):
            pick_me.run_batch([{}], backend=mock)

    asyncio.run(main())
    assert mock.calls == []


def test_a_programs_own_parameter_wins_over_an_option_of_that_name() -> None:
    @bl.function
    def takes(s: bl.State, n: int, stop: list[str]) -> Any:
        s += bl.gen("a")
        return n, stop

    mock = bl.Mock()
    assert takes.run(n=3, stop=["x"], temperature=0.5, backend=mock).ret_value == (3, ["x"])
    assert (mock.calls[0].sampling.n, mock.calls[0].sampling.temperature) == (None, 0.5)


def test_a_function_that_yields_is_refused_at_its_definition() -> None:
    def yields(s: bl.State) -> Any:
        yield s

    async def yields_too(s: bl.State) -> Any:
        yield s

    for function in (yields, yields_too):
        with pytest.raises(bl.ArgumentError, match="yields"):
            bl.function(function)


@pytest.mark.parametrize("value", [-1, float("nan"), "5", True])
def test_a_senseless_deadline_is_refused(value: Any) -> None:
    with pytest.raises(bl.ArgumentError, match="timeout_s"):
        pick_me.run(backend=bl.Mock(), timeout_s=value)
    with pytest.raises(bl.ArgumentError, match="timeout_s"):
        bl.gen("a", timeout_s=value)


def test_a_value_set_by_the_program_reaches_a_reader_who_waits_outside() -> None:
    go, done = threading.Event(), threading.Event()

    @bl.function
    def setter(s: bl.State) -> None:
        assert go.wait(LIMIT_S)
        s["x"] = 5
        assert done.wait(LIMIT_S)

    state = setter.run(backend=bl.Mock(), stream=True)

    def read() -> Any:
        threading.Timer(0.0, go.set).start()
        value = state["x"]
        done.set()
        return value

    assert ends(read) == 5


def test_many_threads_write_and_read_one_branch() -> None:
    @bl.function
    def shared(s: bl.State) -> Any:
        def work(number: int) -> None:
            nonlocal s
            s += f"[{number}]" + bl.gen(f"v{number}")
            assert s[f"v{number}"] == "answer"

        threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        return s.text()

    text = ends(lambda: shared.run(backend=bl.Mock())).ret_value
    assert text.count("answer") == 16
    assert all(f"[{number}]" in text for number in range(16))


def test_a_program_that_is_forgotten_while_it_streams_ends_without_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mock = bl.Mock()
        state = pick_me.run(backend=mock, stream=True)
        stream = state.text_iter("a")
        next(stream)
        run = state.branch.run
        del state, stream
        gc.collect()
        run.concluded.result(LIMIT_S)
    assert mock.meter.in_flight == 0


def test_a_timeout_of_the_backends_own_is_told_as_it_is() -> None:
    with pytest.raises(bl.ProgramError, match="TimeoutError: theirs"):
        ends(lambda: pick_me.run(backend=bl.Mock(answers=[TimeoutError("theirs")])))


def test_a_limit_bounds_all_attempts_together_and_names_the_last_refusal() -> None:
    @bl.function
    def busy(s: bl.State) -> None:
        s += bl.gen("a", timeout_s=0.2, retries=100)

    with pytest.raises(bl.ProgramError, match=r"timeout_s=0\.2.*busy now"):
        ends(lambda: busy.run(backend=bl.Mock(answers=[bl.BackendError("busy now", status=503)])))


def test_a_program_inside_another_fails_with_the_inner_line() -> None:
    @bl.function
    def outer(s: bl.State) -> None:
        s += "outer "
        pick_me(s, "inner ")

    with pytest.raises(bl.ProgramError, match=r"test_interruptions\.py:\d+"):
        outer.run(backend=bl.Mock(answers=[bl.BackendError("no")]))


def test_a_parent_that_writes_between_fork_and_join_loses_no_text_of_its_branches() -> None:
    @bl.function
    def both(s: bl.State) -> str:
        s += "root"
        forks = s.fork(2)
        s += " between"
        forks += " branch" + bl.gen("a")
        forks.join("concate_and_append")
        return s.text()

    assert both.run(backend=bl.Mock()).ret_value == "root between branchanswer branchanswer"


def test_what_is_no_backend_and_no_item_is_refused_by_name() -> None:
    with pytest.raises(bl.ArgumentError, match="backend is 'http://x'"):
        pick_me.run(backend="http://x")  # type: ignore[arg-type]
    with pytest.raises(bl.ArgumentError, match="backend is 'http://x'"):
        bl.set_default_backend("http://x")  # type: ignore[arg-type]
    with pytest.raises(bl.ArgumentError, match="item 1 of the batch is 7"):
        pick_me.run_batch([{}, 7], backend=bl.Mock())  # type: ignore[list-item]
