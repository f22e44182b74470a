"""The pure parts: typed values, scores, reasoning, the log, the picture, the waiting of hosts."""

from __future__ import annotations

import enum
import functools
import json
import math
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import pytest
from branchline import lang as bl
from branchline.lang import hosts, reasoning, scoring, typed
from branchline.lang.backends.base import ChoiceScore, GenCall, Piece
from branchline.lang.backends.runtime import _cut
from branchline.lang.ir import Gen, Select
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Person(BaseModel):
    name: str
    age: int


@pytest.mark.parametrize(
    ("text", "target", "value"),
    [
        ("42 ", int, 42),
        ("-1.5", float, -1.5),
        ("True", bool, True),
        ("false", bool, False),
        ("as is ", str, "as is "),
        ("b", Literal["a", "b"], "b"),
        ("red", Colour, Colour.RED),
        ('{"name": "Ada", "age": 36}', Person, Person(name="Ada", age=36)),
        ("[1, 2]", list[int], [1, 2]),
    ],
)
def test_an_answer_becomes_the_value_of_its_type(text: str, target: Any, value: Any) -> None:
    assert typed.parse(text, target) == value


@pytest.mark.parametrize(
    ("text", "target"), [("x", int), ("maybe", bool), ("c", Literal["a"]), ("{}", Person), ("[", list[int])]
)
def test_an_answer_of_another_type_keeps_its_raw_text(text: str, target: Any) -> None:
    with pytest.raises(bl.ParseError) as raised:
        typed.parse(text, target)
    assert raised.value.raw == text


def test_a_type_becomes_a_constraint() -> None:
    number, colour, person = bl.gen("a", type=int), bl.gen("a", type=Colour), bl.gen("a", type=Person)
    assert isinstance(number, Gen)
    assert number.regex is not None
    assert isinstance(colour, Select)
    assert colour.choices == ("red", "blue")
    assert isinstance(person, Gen)
    assert person.json_schema is not None
    assert "age" in person.json_schema


def test_a_literal_and_an_enum_give_their_own_values() -> None:
    @bl.function
    def typed(s: bl.State) -> Any:
        s += "Q" + bl.gen("colour", type=Colour) + bl.gen("number", type=Literal[7, 8])
        return s["colour"], s["number"], s.text()

    assert typed.run(backend=bl.Mock()).ret_value == (Colour.RED, 7, "Qred7")


def test_a_types_schema_allows_no_properties_that_the_type_does_not_have() -> None:
    people, own = bl.gen("a", type=list[Person]), bl.gen("a", json_schema={"type": "object", "properties": {}})
    assert isinstance(people, Gen)
    assert isinstance(own, Gen)
    assert json.loads(people.json_schema or "")["$defs"]["Person"]["additionalProperties"] is False
    assert "additionalProperties" not in json.loads(own.json_schema or "")


def test_an_answer_that_was_cut_off_says_so() -> None:
    class Cut(bl.Mock):
        async def generate(self, call: GenCall) -> AsyncGenerator[Piece]:
            yield Piece('{"name": "A')
            yield Piece("", 0, {"finish_reason": {"type": "length"}})

    @bl.function
    def typed(s: bl.State) -> None:
        s += "Q" + bl.gen("a", type=Person)

    with pytest.raises(bl.ProgramError, match="cut off: raise max_tokens"):
        typed.run(backend=Cut())


logprobs = st.lists(st.floats(-30, 0), min_size=1, max_size=4)


@given(st.lists(logprobs, min_size=2, max_size=5))
def test_probabilities_sum_to_one_and_the_pick_is_best_by_its_method(rows: list[list[float]]) -> None:
    scores = [ChoiceScore(tuple(row), tuple(0.0 for _ in row)) for row in rows]
    names = tuple(f"c{index}" for index in range(len(rows)))
    for method in ("exact", "token_length_normalized", "unconditional_likelihood_normalized"):
        select = Select("x", names, method)
        picked, meta = scoring.pick(select, scores)
        assert math.isclose(sum(meta["probabilities"]), 1.0, rel_tol=1e-9)
        assert meta["scores"][picked] >= max(meta["scores"]) - scoring.TIE


def test_ties_go_to_the_first_choice() -> None:
    scores = [ChoiceScore((-1.0,)), ChoiceScore((-1.0,))]
    assert scoring.pick(Select("x", ("b", "a")), scores)[0] == 0


def test_a_temperature_samples_by_the_seed() -> None:
    scores = [ChoiceScore((-1.0,)), ChoiceScore((-1.1,))]
    picks = {scoring.pick(Select("x", ("a", "b"), temperature=1.0, seed=seed), scores)[0] for seed in range(20)}
    assert picks == {0, 1}
    again = [scoring.pick(Select("x", ("a", "b"), temperature=1.0, seed=3), scores)[0] for _ in range(3)]
    assert len(set(again)) == 1


def test_a_score_that_is_no_number_is_an_error() -> None:
    with pytest.raises(bl.BackendError, match="not a number"):
        scoring.pick(Select("x", ("a", "b")), [ChoiceScore((math.nan,)), ChoiceScore((-1.0,))])


@pytest.mark.parametrize(
    ("text", "model_type", "parts"),
    [
        ("<think>a</think>b", "deepseek-r1", ("a", "b")),
        ("a</think>b", "deepseek-r1", ("a", "b")),
        ("a</think>b", "qwen3", ("", "a</think>b")),
        ("plain", "deepseek-r1", ("", "plain")),
        ("<think>never closed", "qwen3", ("never closed", "")),
    ],
)
def test_reasoning_is_split_from_the_answer(text: str, model_type: str, parts: tuple[str, str]) -> None:
    assert reasoning.split(text, model_type) == parts


def test_an_unknown_reasoning_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(bl.ArgumentError, match="deepseek-r1"):
        reasoning.split("x", "nope")


@bl.function
def program(s: bl.State, topic: str) -> Any:
    s += topic
    forks = s.fork(2)
    forks += bl.gen("x")
    forks.join()
    s += bl.select("c", ["a", "b"])
    return s["x"], s["c"]


def test_a_logged_run_replays_without_a_backend(tmp_path: Path) -> None:
    log = bl.Log()
    mock = bl.Mock(answers=lambda call: f"answer {call.context.branch}")
    first = program.run(topic="t", backend=mock, log=log).ret_value
    log.save(tmp_path / "log.jsonl")

    silent = bl.Mock(answers=[RuntimeError("must not be asked")], scores=RuntimeError("must not be asked"))
    again = program.run(topic="t", backend=silent, log=bl.Log.load(tmp_path / "log.jsonl")).ret_value
    assert again == first
    assert (silent.calls, silent.selects) == ([], [])


def test_a_changed_program_does_not_replay_in_silence(tmp_path: Path) -> None:
    log = bl.Log()
    program.run(topic="t", backend=bl.Mock(), log=log)
    log.save(tmp_path / "log.jsonl")
    with pytest.raises(bl.ProgramError, match="the log holds no call"):
        program.run(topic="other", backend=bl.Mock(), log=bl.Log.load(tmp_path / "log.jsonl"))


def test_two_runs_are_told_apart_call_by_call() -> None:
    logs = [bl.Log(), bl.Log(), bl.Log()]
    for log, answer, topic in zip(logs, ("v", "w", "v"), ("t", "t", "u"), strict=True):
        program.run(topic=topic, backend=bl.Mock(answers=[answer]), log=log)
    assert bl.diff(logs[0], logs[0]) == []
    for log in logs[:2]:  # equal calls are told apart by their number, and metas are not compared
        log.entries[-1].answer.setdefault("metas", []).append({"e2e_latency": id(log)})
    again = bl.Log([*logs[0].entries, *logs[0].entries])
    assert len(bl.diff(again, logs[0])) == len(logs[0].entries)
    changed = bl.diff(logs[0], logs[1])
    assert len(changed) == 2  # both branches' answers; the select's prompt is the same
    assert all("became" in line for line in changed)
    moved = bl.diff(logs[0], logs[2])
    assert {line[0] for line in moved} == {"-", "+"}


def test_the_picture_shows_every_block_and_escapes_text(tmp_path: Path) -> None:
    mock = bl.Mock(answers=["<b>bold</b>"])
    state = program.run(topic="t & u", backend=mock, trace=True)
    state.trace().save(tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    assert page.count("branch 0") == 1
    assert page.count("branch 1") == 1
    assert "&lt;b&gt;bold&lt;/b&gt;" in page
    assert "t &amp; u" in page
    assert "<script" not in page
    assert state.trace().totals()["calls"] == 3
    with pytest.raises(bl.ArgumentError, match="trace=True"):
        program.run(topic="t", backend=mock).trace()


def test_a_waiting_program_gives_its_thread_to_others() -> None:
    host = hosts.Host("test-host")
    gates = [Future[int]() for _ in range(3)]
    seen: list[int] = []
    done, parked = threading.Event(), threading.Semaphore(0)

    def body(index: int) -> None:
        parked.release()
        seen.append(hosts.wait(gates[index]))
        if len(seen) == 3:
            done.set()

    for index in range(3):
        host.start(functools.partial(body, index))
    for _ in gates:
        assert parked.acquire(timeout=30)
    host.start(parked.release)  # runs only once the third has been parked
    assert parked.acquire(timeout=30)
    for index in (2, 0, 1):
        gates[index].set_result(index)
    assert done.wait(30)
    assert seen == [2, 0, 1]
    host.stop()
    host.thread.join(30)
    assert not host.thread.is_alive()


@pytest.mark.parametrize(
    ("joint", "first", "parts"),
    [
        ("<|end|>\n<|user|>\n", "<|system|>\nYou are X<|end|>\n<|user|>\n", ("<|user|>\n", "<|end|>\n")),
        ("[/SYS][INST]", "<s>[INST]", ("[INST]", "[/SYS]")),
    ],
)
def test_the_markup_of_a_role_is_cut_at_its_beginning(joint: str, first: str, parts: tuple[str, str]) -> None:
    begin, end = _cut(joint, first)
    assert begin.endswith(parts[0])
    assert joint == end + begin
