"""A sequence that one engine began goes on at another as if nothing had happened: cut after every token.

Both engines promise the same bits, as the tiny executor does. Ids, text, stops, limits and ends must be those of
the uninterrupted run.
"""

from __future__ import annotations

import pytest
from branchline.engine.errors import InvalidArgument
from branchline.engine.types import Delta, LogprobParams, Request, Resume, SamplingParams
from harness import Answer, Engine, text_of

PROMPT = (3, 1, 4, 1, 5)
HOWS: dict[str, dict[str, object]] = {
    "greedy": {"max_tokens": 12},
    "sampled with a seed": {"max_tokens": 12, "temperature": 1.0, "seed": 11},
    "penalties": {
        "max_tokens": 12, "temperature": 1.0, "seed": 5, "frequency_penalty": 1.5, "presence_penalty": 1.0,
        "repetition_penalty": 1.4,
    },
    "ends masked at first": {"max_tokens": 12, "temperature": 1.5, "seed": 3, "min_tokens": 8},
    "three sequences": {"max_tokens": 8, "temperature": 1.0, "seed": 9, "n": 3},
}  # fmt: skip


def whole(sampling: dict[str, object]) -> tuple[list[Answer], list[list[Delta]]]:
    """The uninterrupted answers, and the deltas of each sequence."""
    engine = Engine()
    engine.submit("whole", PROMPT, **sampling)
    engine.finish()
    count = int(str(sampling.get("n", 1)))
    deltas = [[d for _, frame in engine.frames for d in frame if d.index == index] for index in range(count)]
    return [engine.answers["whole", index] for index in range(count)], deltas


def resumed(sampling: dict[str, object], index: int, before: list[Delta]) -> Engine:
    """Another engine that goes on after these deltas."""
    engine = Engine(seed=12345)
    emitted = tuple(token for delta in before for token in delta.token_ids)
    sent = sum(len(delta.text.encode()) for delta in before)
    params = SamplingParams(**{"temperature": 0.0, "seed": 1, **sampling, "n": 1})  # type: ignore[arg-type]
    engine.loop.submit(Request("more", PROMPT, params, resume=Resume(emitted, sent, index)), engine.take)
    engine.finish()
    return engine


def same(one: Answer, before: list[Delta], more: Answer) -> None:
    """The joined answer is the uninterrupted one."""
    assert [token for delta in before for token in delta.token_ids] + more.token_ids == one.token_ids
    assert "".join(delta.text for delta in before) + more.text == one.text
    assert one.finish is not None and more.finish is not None
    for name in ("reason", "completion_tokens", "matched_token_id", "matched_stop"):
        assert getattr(more.finish, name) == getattr(one.finish, name), name


@pytest.mark.parametrize("how", HOWS)
def test_a_cut_after_any_token_changes_nothing(how: str) -> None:
    answers, deltas = whole(HOWS[how])
    for index, answer in enumerate(answers):
        for cut in range(len(deltas[index])):
            before = deltas[index][:cut]
            engine = resumed(HOWS[how], index, before)
            same(answer, before, engine.answers["more", 0])


def test_a_stop_string_across_the_cut_is_found_and_swallowed() -> None:
    (free,), _ = whole({"max_tokens": 12})
    for begin in range(2, 8):
        stop = text_of(free.token_ids[begin : begin + 3])
        sampling: dict[str, object] = {"max_tokens": 12, "stop": (stop,)}
        (answer,), (deltas,) = whole(sampling)
        assert answer.finish is not None and answer.finish.matched_stop == stop
        for cut in range(len(deltas)):
            same(answer, deltas[:cut], resumed(sampling, 0, deltas[:cut]).answers["more", 0])


def test_output_logprobs_go_on_and_the_prompt_is_reported_at_its_own_length() -> None:
    engine = Engine()
    engine.submit("whole", PROMPT, logprobs=LogprobParams(output=True, top_k=2), max_tokens=6)
    engine.finish()
    one = engine.answers["whole", 0]
    other = Engine()
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=6)
    resume = Resume(tuple(one.token_ids[:3]), 3, 0)
    request = Request("more", PROMPT, params, LogprobParams(output=True, top_k=2), resume=resume)
    other.loop.submit(request, other.take)
    other.finish()
    more = other.answers["more", 0]
    assert more.output.token_ids == one.output.token_ids[3:]
    assert more.output.logprobs == pytest.approx(one.output.logprobs[3:])
    assert other.prompts["more"] == (len(PROMPT), 0)


def test_what_has_ended_or_was_never_sent_is_not_resumed() -> None:
    engine = Engine()
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=9, stop=("!",), stop_token_ids=(7,))
    for resume, field in [
        (Resume((7,), 0, 0), "resume.emitted_token_ids"),
        (Resume((1,), 0, 0), "resume.emitted_token_ids"),  # "!" is its text
        (Resume((2,), 9, 0), "resume.emitted_text_bytes"),
        (Resume((2,) * 10_000, 0, 0), "token_ids"),
    ]:
        with pytest.raises(InvalidArgument) as caught:
            engine.loop.submit(Request("more", PROMPT, params, resume=resume), engine.take)
        assert caught.value.field == field
    engine.submit("next", PROMPT, max_tokens=2)
    engine.finish()
    assert len(engine.answers["next", 0].token_ids) == 2
