"""The kinds of programs that SGLang's own documentation shows run after changing the import."""
# ruff: noqa: ANN001, ANN201, ANN202  (programs stand as their documentation writes them: without types)

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from branchline import lang as sgl  # was: import sglang as sgl
from branchline.lang.backends.base import GenCall
from pydantic import BaseModel


def scripted(**answers: str) -> sgl.Mock:
    """Answers each gen by its variable's name."""
    return sgl.Mock(answers=lambda call: answers[call.gen.name or ""])


def sent(mock: sgl.Mock) -> list[GenCall]:
    return sorted(mock.calls, key=lambda call: call.context.branch)


def test_questions_of_several_turns() -> None:
    @sgl.function
    def turns(s, question_1, question_2):  # type: ignore[no-untyped-def]
        s += sgl.system("You are a helpful assistant.")
        s += sgl.user(question_1)
        s += sgl.assistant(sgl.gen("answer_1", max_tokens=256))
        s += sgl.user(question_2)
        s += sgl.assistant(sgl.gen("answer_2", max_tokens=256))

    mock = scripted(answer_1="Paris", answer_2="Rome")
    state = turns.run(question_1="France?", question_2="Italy?", backend=mock)
    assert [item["role"] for item in state.messages()] == ["system", "user", "assistant", "user", "assistant"]
    assert (state["answer_1"], state["answer_2"]) == ("Paris", "Rome")
    assert mock.calls[1].prompt.text.startswith(mock.calls[0].prompt.text + "Paris")


def test_a_tool_is_chosen_by_control_flow() -> None:
    @sgl.function
    def tool_use(s, question):  # type: ignore[no-untyped-def]
        s += "To answer this question: " + question + ". "
        s += "I need to use a " + sgl.gen("tool", choices=["calculator", "search engine"]) + ". "
        if s["tool"] == "calculator":
            s += "The math expression is" + sgl.gen("expression")
        elif s["tool"] == "search engine":
            s += "The key word to search is" + sgl.gen("word")

    mock = sgl.Mock(answers=lambda call: {"expression": " 2+2", "word": " cats"}[call.gen.name or ""])
    assert tool_use.run(question="2+2", backend=mock)["expression"] == " 2+2"
    mock.scores = {"calculator": [-5.0], "search engine": [-0.1]}
    state = tool_use.run(question="cats", backend=mock)
    assert state["word"] == " cats"
    assert "expression" not in state


def test_tips_are_expanded_in_parallel() -> None:
    @sgl.function
    def tip_suggestion(s):  # type: ignore[no-untyped-def]
        s += "Here are two tips for staying healthy: 1. Balanced Diet. 2. Regular Exercise.\n\n"
        forks = s.fork(2)
        for i, f in enumerate(forks):
            f += f"Now, expand tip {i + 1} into a paragraph:\n"
            f += sgl.gen("detailed_tip", max_tokens=256, stop="\n\n")
        s += "Tip 1:" + forks[0]["detailed_tip"] + "\n"
        s += "Tip 2:" + forks[1]["detailed_tip"] + "\n"
        s += "In summary" + sgl.gen("summary")

    mock = sgl.Mock(answers=lambda call: f" {call.gen.name}{list(call.context.branch)}")
    state = tip_suggestion.run(backend=mock)
    assert state.text().endswith("Tip 1: detailed_tip[0]\nTip 2: detailed_tip[1]\nIn summary summary[]")
    assert mock.meter.held == 0


def test_a_regular_expression_restrains_an_answer() -> None:
    address = r"((25[0-5]|2[0-4]\d|[01]?\d\d?).){3}(25[0-5]|2[0-4]\d|[01]?\d\d?)"

    @sgl.function
    def regular_expression_gen(s):  # type: ignore[no-untyped-def]
        s += "Q: What is the IP address of the Google DNS servers?\n"
        s += "A: " + sgl.gen("answer", temperature=0, regex=address)

    mock = scripted(answer="8.8.8.8")
    assert regular_expression_gen.run(backend=mock)["answer"] == "8.8.8.8"
    assert mock.calls[0].gen.regex == address


def test_a_character_is_written_as_json() -> None:
    class Character(BaseModel):
        name: str
        house: str

    @sgl.function
    def character_gen(s, name):  # type: ignore[no-untyped-def]
        s += name + " is a character. Please fill in the following information.\n"
        s += sgl.gen("json_output", max_tokens=256, json_schema=json.dumps(Character.model_json_schema()))

    text = '{"name": "Ada", "house": "Blue"}'
    state = character_gen.run("Ada", backend=scripted(json_output=text))
    assert Character.model_validate_json(state["json_output"]).house == "Blue"


@sgl.function
def text_qa(s, question):  # type: ignore[no-untyped-def]
    s += "Q: " + question + "\n"
    s += "A:" + sgl.gen("answer", stop="\n")


def test_a_batch_of_questions() -> None:
    mock = sgl.Mock(answers=lambda call: call.prompt.text[3:5])
    states = text_qa.run_batch(
        [{"question": "UK?"}, {"question": "FR?"}, {"question": "JP?"}], backend=mock, progress_bar=True
    )
    assert [state["answer"] for state in states] == ["UK", "FR", "JP"]


def test_an_answer_is_streamed() -> None:
    state = text_qa.run(question="UK?", temperature=0.1, stream=True, backend=scripted(answer=" London"))
    assert "".join(state.text_iter()) == "Q: UK?\nA: London"


def test_an_answer_is_streamed_asynchronously() -> None:
    async def main() -> str:
        state = text_qa.run(question="UK?", stream=True, backend=scripted(answer=" London"))
        return "".join([piece async for piece in state.text_async_iter(var_name)])

    var_name = "answer"
    assert asyncio.run(main()) == " London"


def test_the_default_backend_and_options_of_a_run_are_used() -> None:
    mock = scripted(answer="x")
    sgl.set_default_backend(mock)
    try:
        text_qa.run(question="UK?", max_new_tokens=32, temperature=0.3, top_p=0.9)
        text_qa.bind(question="FR?").run()
    finally:
        sgl.set_default_backend(None)
    assert mock.calls[0].sampling.given() == {"max_tokens": 32, "temperature": 0.3, "top_p": 0.9, "stop": ("\n",)}
    assert mock.calls[1].prompt.text.startswith("Q: FR?")


def test_roles_are_written_by_context_managers_and_by_markers() -> None:
    @sgl.function
    def managers(s):  # type: ignore[no-untyped-def]
        with s.user():
            s += "Hi"
        with s.assistant():
            s += sgl.gen("a")

    @sgl.function
    def markers(s):  # type: ignore[no-untyped-def]
        s += sgl.user_begin() + "Hi" + sgl.user_end()
        s += sgl.assistant_begin() + sgl.gen("a") + sgl.assistant_end()

    texts = [program.run(backend=scripted(a="Hello")).text() for program in (managers, markers)]
    assert texts[0] == texts[1]
    assert texts[0].count("Hello") == 1


def test_a_judge_scores_its_dimensions_in_parallel() -> None:
    dimensions = ["Clarity", "Originality", "Evidence"]

    @sgl.function
    def multi_dimensional_judge(s, article):  # type: ignore[no-untyped-def]
        s += "Evaluate this article: " + article + "\n"
        forks = s.fork(len(dimensions))
        for f, dimension in zip(forks, dimensions, strict=True):
            f += "Dimension: " + dimension + ". " + sgl.gen("judgment", stop="END")
        forks.join()
        s += "".join(f"{d}: {j}\n" for d, j in zip(dimensions, s["judgment"], strict=True))
        s += "Grade: " + sgl.select("grade", ["A", "B", "C"])

    mock = sgl.Mock(answers=lambda call: f"good {call.context.branch[0]}")
    state = multi_dimensional_judge.run("Words.", backend=mock)
    assert state["judgment"] == ["good 0", "good 1", "good 2"]
    assert state["grade"] == "A"
    assert [call.context.fork_width for call in sent(mock)] == [3, 3, 3]


def test_thoughts_are_split_from_the_answer() -> None:
    @sgl.function
    def reasoning_gen(s, question):  # type: ignore[no-untyped-def]
        s += sgl.user(question) + "\n"
        s += sgl.assistant(sgl.separate_reasoning(sgl.gen("answer"), model_type="deepseek-r1"))

    state = reasoning_gen.run("3+2?", backend=scripted(answer="<think>three and two</think>5"))
    assert (state["answer"], state["answer_reasoning_content"]) == ("5", "three and two")


def test_examples_are_repeated_before_a_question() -> None:
    shots = [("2+2?", "4"), ("3+3?", "6")]

    @sgl.function
    def few_shot_qa(s, question):  # type: ignore[no-untyped-def]
        for q, a in shots:
            s += "Q: " + q + "\nA: " + a + "\n"
        s += "Q: " + question + "\nA: " + sgl.gen_int("answer", stop="\n")

    state = few_shot_qa.run("4+4?", backend=scripted(answer="8"))
    assert state["answer"] == "8"


@pytest.mark.parametrize("value", [None, 4])
def test_api_speculation_is_refused_and_leaving_it_out_gives_the_same_program(value: int | None) -> None:
    def body(s: Any) -> None:
        s += sgl.gen("a")

    if value is None:
        assert sgl.function(num_api_spec_tokens=None)(body).run(backend=scripted(a="x"))["a"] == "x"
        return
    with pytest.raises(sgl.ArgumentError, match="num_api_spec_tokens"):
        sgl.function(num_api_spec_tokens=value)(body)
