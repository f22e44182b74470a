"""What the language refuses, and how it says so: options a backend lacks, senseless blocks, broken answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from branchline import lang as bl
from branchline.lang.backends.base import CHATML, PLAIN, GenCall, Prompt, Scores, SelectCall
from branchline.lang.errors import Place
from branchline.lang.ir import Sampling, Seq, Text, flatten


class Bare(bl.Backend):
    """A backend that can do nothing but generate."""

    name = "bare"

    def generate(self, call: GenCall) -> Any:
        async def pieces() -> Any:
            from branchline.lang.backends.base import Piece

            yield Piece("bare", 0, {})

        return pieces()


@bl.function
def ask(s: bl.State, block: Any) -> Any:
    s += "Q"
    s += block
    return s["a"]


def test_a_bare_backend_generates() -> None:
    assert ask.run(block=bl.gen("a"), backend=Bare()).ret_value == "bare"


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (bl.gen("a", regex="[0-9]+"), "regex cannot be enforced by bare"),
        (bl.gen("a", json_schema={"type": "object"}), "json_schema cannot be enforced by bare"),
        (bl.gen("a", ebnf='root ::= "a"'), "ebnf cannot be enforced by bare"),
        (bl.gen("a", dtype=int), "regex cannot be enforced by bare"),
        (bl.gen("a", type=float), "regex cannot be enforced by bare"),
        (bl.gen("a", top_k=3), "top_k is not possible on bare"),
        (bl.gen("a", seed=3), "seed is not possible on bare"),
        (bl.gen("a", n=2), "n is not possible on bare"),
        (bl.gen("a", stop_regex="x+"), "stop_regex is not possible on bare"),
        (bl.gen("a", return_logprob=True), "return_logprob is not possible on bare"),
        (bl.select("a", ["x", "y"]), "choices_method 'token_length_normalized' is not possible on bare"),
        (bl.select("a", ["x", "y"], choices_method="exact"), "choices_method 'exact' is not possible on bare"),
    ],
)
def test_what_a_backend_cannot_do_is_refused_before_it_is_asked(block: Any, words: str) -> None:
    with pytest.raises(bl.UnsupportedError) as refused:
        ask.run(block=block, backend=Bare())
    assert words in str(refused.value)


def test_a_select_of_one_choice_needs_no_backend() -> None:
    assert ask.run(block=bl.select("a", ["only"]), backend=Bare()).ret_value == "only"


def test_a_program_option_that_the_backend_lacks_is_refused_too() -> None:
    with pytest.raises(bl.UnsupportedError, match="min_p is not possible on bare"):
        ask.run(block=bl.gen("a"), backend=Bare(), min_p=0.1)


def test_runtime_refuses_a_stop_by_regular_expression_before_sending() -> None:
    with pytest.raises(bl.UnsupportedError, match="stop_regex is not possible on Runtime"):
        ask.run(block=bl.gen("a", stop_regex="x+"), backend=bl.Runtime("http://127.0.0.1:9"))


def test_a_picture_for_a_backend_without_eyes_is_an_error_with_its_line() -> None:
    @bl.function
    def look(s: bl.State) -> None:
        s += bl.user(bl.image("cat.png") + "What is it?")

    with pytest.raises(bl.ProgramError, match="bare takes no images") as raised:
        look.run(backend=Bare())
    assert raised.value.place is not None
    assert raised.value.place.file == __file__


def test_pictures_reach_a_backend_that_takes_them_with_their_message() -> None:
    mock = bl.Mock()

    @bl.function
    def look(s: bl.State) -> None:
        s += bl.user(bl.image("cat.png") + "What is it?") + bl.assistant(bl.gen("a"))

    look.run(backend=mock)
    prompt = mock.calls[0].prompt
    assert prompt.images == ("cat.png",)
    assert prompt.messages[0].images == ("cat.png",)
    assert (prompt.messages[-1].role, prompt.open_role) == ("assistant", "assistant")


@pytest.mark.parametrize("thing", [3, ["a"], {"a": 1}, b"bytes", object()])
def test_what_is_no_block_cannot_be_appended(thing: Any) -> None:
    @bl.function
    def wrong(s: bl.State) -> None:
        s += thing

    with pytest.raises(bl.ArgumentError, match="cannot append"):
        wrong.run(backend=bl.Mock())


def test_blocks_join_to_flat_sequences() -> None:
    both = "a" + bl.gen("x") + "" + None + ("b" + bl.select("y", ["c"]))
    assert isinstance(both, Seq)
    kinds = [type(block).__name__ for block in flatten(both)]
    assert kinds == ["Text", "Gen", "Text", "Select"]
    assert flatten("") == ()
    assert flatten("t") == (Text("t"),)


def test_options_of_a_block_win_over_those_of_the_program() -> None:
    base = Sampling(temperature=0.1, top_p=0.9, stop=("x",))
    merged = Sampling(temperature=0.7, max_tokens=3).over(base)
    assert merged.given() == {"temperature": 0.7, "top_p": 0.9, "stop": ("x",), "max_tokens": 3}
    mock = bl.Mock()
    ask.run(block=bl.gen("a", temperature=0.7), backend=mock, temperature=0.1, max_new_tokens=5, stop="y")
    given = mock.calls[0].sampling
    assert (given.temperature, given.max_tokens, given.stop) == (0.7, 5, ("y",))


def test_roles_are_written_as_the_backend_says() -> None:
    @bl.function
    def chat(s: bl.State) -> None:
        s += bl.user("hi") + bl.assistant(bl.gen("a"))

    plain = chat.run(backend=bl.Mock(answers=["yo"], style=PLAIN))
    assert plain.text() == "USER: hi\nASSISTANT: yo\n"
    chatml = chat.run(backend=bl.Mock(answers=["yo"], style=CHATML))
    assert chatml.text() == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n"


def test_a_role_that_the_template_lacks_is_an_error() -> None:
    from branchline.lang.backends.base import Markup

    style = Markup(begin={"user": "U:"}, end={"user": "\n"})

    @bl.function
    def chat(s: bl.State) -> None:
        s += bl.system("be good")

    with pytest.raises(bl.ProgramError, match="has no role 'system'"):
        chat.run(backend=bl.Mock(style=style))


def test_a_backend_that_scores_too_few_choices_is_at_fault() -> None:
    class Short(bl.Mock):
        async def score(self, call: SelectCall) -> Any:
            return Scores((await super().score(call)).choices[:1])

    with pytest.raises(bl.ProgramError, match="scored 1 of 2 choices"):
        ask.run(block=bl.select("a", ["x", "y"]), backend=Short())


def test_a_backend_that_sends_a_sequence_too_many_is_at_fault() -> None:
    from branchline.lang.backends.base import Piece

    class Wild(bl.Mock):
        async def generate(self, call: GenCall) -> Any:
            yield Piece("a", 0)
            yield Piece("b", 1)

    with pytest.raises(bl.ProgramError, match="sequence 1 of 1"):
        ask.run(block=bl.gen("a"), backend=Wild())


def test_a_program_error_says_variable_branch_line_and_cause() -> None:
    error = bl.ProgramError(ValueError("boom"), place=Place("prog.py", 7), branch=(1, 0), variable="x")
    assert str(error) == "variable 'x' of branch 1.0 (prog.py:7) failed: ValueError: boom"
    assert isinstance(error.cause, ValueError)
    assert str(bl.ProgramError(ValueError("boom"), place=None)) == "a block failed: ValueError: boom"


def test_a_lease_that_cannot_be_had_is_asked_for_and_done_without() -> None:
    class Poor(bl.Mock):
        async def plant(self, prompt: Prompt, ttl_ms: int, context: Any) -> None:
            self.planted.append(prompt.text)

    mock = Poor(answers=["v"])

    @bl.function
    def tree(s: bl.State) -> Any:
        s += "root"
        forks = s.fork(2)
        forks += bl.gen("a")
        forks.join()
        return s["a"]

    assert tree.run(backend=mock).ret_value == ["v", "v"]
    assert mock.planted == ["root"]
    assert [call.context.lease for call in mock.calls] == [None, None]


def test_async_reads_give_what_plain_ones_do() -> None:
    async def main() -> list[Any]:
        @bl.function
        async def chat(s: bl.State) -> list[Any]:
            s += "Q" + bl.gen("a")
            pieces = [pair async for pair in s.text_async_iter("a", return_meta_data=True)]
            return [await s.async_text(), await s.get("a"), "".join(piece for piece, _ in pieces)]

        return list((await chat.run_async(backend=bl.Mock(answers=["answer"]))).ret_value)

    assert asyncio.run(main()) == ["Qanswer", "answer", "answer"]


@pytest.mark.parametrize("mode", ["cancel", "raise", ""])
def test_unknown_ways_of_failing_are_refused(mode: str) -> None:
    with pytest.raises(bl.ArgumentError, match="on_error"):
        ask.run(block=bl.gen("a"), backend=bl.Mock(), on_error=mode or "never") if mode != "raise" else ask.run_batch(
            [{}], backend=bl.Mock(), on_error="state"
        )


@pytest.mark.parametrize("threads", [0, -1, "many", 1.5])
def test_a_senseless_number_of_threads_is_refused(threads: Any) -> None:
    with pytest.raises(bl.ArgumentError, match="num_threads"):
        ask.run_batch([{"block": bl.gen("a")}], backend=bl.Mock(), num_threads=threads)
