"""Near their limit constrained answers are led to an end, and masks that are late change nothing but when."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import numpy as np
import pytest
from branchline.engine.errors import InvalidArgument
from branchline.engine.grammar.guidance import GuidanceObject
from branchline.engine.types import FinishReason, GrammarAsk, GrammarKind, LogprobParams, ReasoningAsk
from constrained import PROMPT, Constrained, ask, drive

from tests.cases.loader import case

DEEP = json.dumps(
    {
        "type": "object",
        "properties": {
            "opt": {
                "type": "object",
                "properties": {f"k{n}": {"type": "string"} for n in range(6)},
                "required": ["k5"],
            },
            "list": {"type": "array", "items": {"type": "integer"}},
            "name": {"type": "string"},
        },
        "required": ["name"],
    }
)
KINDS = {
    "deep": ask(DEEP, GrammarKind.JSON),
    "any": ask('{"type": "object"}', GrammarKind.JSON),
    "list": ask('{"type": "array", "items": {"type": ["string", "number", "null"]}}', GrammarKind.JSON),
    "choice": ask('["yes", "no, not at all, never ever", "perhaps"]', GrammarKind.CHOICE),
    "regex": ask("([a-f]+, )*[0-9]{3}!", GrammarKind.REGEX),
    "digits": ask('{"type": "array", "items": {"type": "string", "pattern": "[0-9]{3}"}}', GrammarKind.JSON),
}


def fits(name: str, text: str) -> bool:
    """Whether a text is a whole one of the constraint."""
    if name == "choice":
        return text in json.loads(KINDS[name].text)
    if name == "regex":
        return re.fullmatch(KINDS[name].text, text) is not None
    value = json.loads(text)
    if name == "deep":
        assert isinstance(value["name"], str) and ("opt" not in value or "k5" in value["opt"])
    if name == "digits":
        assert all(re.search("[0-9]{3}", one) for one in value)
    return isinstance(value, list if name in ("list", "digits") else dict)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("forced", [True, False])
def test_no_answer_is_cut_off_that_has_room_for_a_whole_text(temperature: float, forced: bool) -> None:
    engine = Constrained(pages=900, forced_tokens=forced)
    for name, one in KINDS.items():
        for most in (14, 19, 30, 47):
            for seed in range(2):
                options = {"temperature": temperature, "seed": seed, "max_tokens": most}
                engine.submit(f"{name} {most} {seed}", PROMPT, grammar=one, **options)
    drive(engine)
    assert engine.errors == {}
    for (key, _), answer in engine.answers.items():
        assert fits(key.split()[0], answer.text), (key, answer.text)
        assert answer.finish is not None and answer.finish.reason is FinishReason.STOP, (key, answer.text)


def test_reasoning_leaves_room_for_the_answer() -> None:
    engine = Constrained(pages=400)
    for most in (24, 40, 60):
        grammar = GrammarAsk(GrammarKind.JSON, DEEP, reasoning=ReasoningAsk("<t>", "</t>", implicit=True))
        engine.submit(f"r{most}", PROMPT, grammar=grammar, temperature=1.0, max_tokens=most)
    drive(engine)
    assert engine.errors == {}
    for most in (24, 40, 60):
        answer = engine.answers[f"r{most}", 0]
        assert fits("deep", answer.text.partition("</t>")[2]), answer.text
        assert len(answer.token_ids) <= most and len(answer.token_ids) > most - 20


@pytest.mark.parametrize(
    "asked, most",
    [(KINDS["choice"], 1), (ask(DEEP, GrammarKind.JSON), 2), (ask('{"const": "abcdefgh"}', GrammarKind.JSON), 2)],
    ids=["choice", "object", "const"],
)
def test_a_limit_below_the_known_minimum_is_refused_with_both_numbers(asked: GrammarAsk, most: int) -> None:
    engine = Constrained()
    engine.submit("r", PROMPT, grammar=asked, max_tokens=most)
    drive(engine)
    error = engine.errors["r"]
    assert isinstance(error, InvalidArgument) and error.field == "sampling.max_tokens"
    assert re.fullmatch(
        f"max_tokens is {most} and the constraint's shortest text has [0-9]+ tokens: raise it", error.message
    )


def test_what_is_cut_off_says_so() -> None:
    engine = Constrained()
    engine.submit("cut", PROMPT, grammar=ask("[ab]{30}"), max_tokens=12)
    engine.submit("whole", PROMPT, grammar=ask("[ab]{12}"), max_tokens=12)
    told = GrammarAsk(GrammarKind.REGEX, "abc[de]{4}", report=True)
    engine.submit("told", PROMPT, grammar=told, max_tokens=12)
    drive(engine)
    cut, whole, asked = (engine.answers[name, 0].finish for name in ("cut", "whole", "told"))
    assert cut is not None and cut.reason is FinishReason.LENGTH
    assert cut.grammar is not None and not cut.grammar.complete
    assert whole is not None and whole.grammar is None
    assert asked is not None and asked.grammar is not None
    report = asked.grammar
    assert (report.backend, report.complete, report.constrained_tokens) == ("llguidance", True, 7)
    assert report.reason and report.mask_p99_ms > 0 and report.compile_ms >= 0 and report.forced_tokens >= 2


TOLD: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.3, "logit_bias": ((5, 2.0),)},
    "filtered": {"temperature": 1.0, "top_k": 3, "top_p": 0.8},
    "least": {"temperature": 0.7, "min_p": 0.1, "min_tokens": 3},
}


def outcomes(patience_s: float | None, **options: Any) -> tuple[dict[Any, Any], int]:
    """Everything said in a run over all kinds, and its steps."""
    engine = Constrained(pages=1500, mask_patience_s=patience_s, **options)
    for name, one in KINDS.items():
        for how, sampling in TOLD.items():
            report = LogprobParams(output=True, top_k=2)
            engine.submit(f"{name} {how}", PROMPT, grammar=one, logprobs=report, seed=3, max_tokens=24, **sampling)
    drive(engine)
    assert engine.errors == {}
    said = {
        key: (one.token_ids, one.text, one.output.logprobs, one.output.top, one.finish.reason if one.finish else None)
        for key, one in engine.answers.items()
    }
    return said, engine.loop.stats().steps


@pytest.mark.parametrize("forced", [True, False])
def test_verified_tokens_and_their_logprobs_equal_masked_ones(monkeypatch: pytest.MonkeyPatch, forced: bool) -> None:
    masked, fewest = outcomes(None, forced_tokens=forced)
    fill = GuidanceObject._fill
    late = threading.Event()

    def slow(self: GuidanceObject, words: Any) -> None:
        if threading.current_thread().name.startswith("grammar-mask"):
            late.wait(0.002)  # never set: a mask that takes its time
        fill(self, words)

    monkeypatch.setattr(GuidanceObject, "_fill", slow)
    verified, steps = outcomes(0.0, forced_tokens=forced)
    assert masked.keys() == verified.keys()
    for key, said in masked.items():
        assert said[0] == verified[key][0] and said[1] == verified[key][1] and said[4] == verified[key][4], key
        np.testing.assert_allclose(said[2], verified[key][2], rtol=1e-5, err_msg=str(key))
        assert said[3] == verified[key][3], key
    assert steps > fewest


def test_a_row_whose_mask_is_late_waits_and_its_neighbours_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Constrained(pages=400, mask_patience_s=0.0)
    gate, held = threading.Event(), []
    fill = GuidanceObject._fill

    def slow(self: GuidanceObject, words: Any) -> None:
        if threading.current_thread().name.startswith("grammar-mask") and not gate.is_set():
            held.append(1)
            gate.wait(30)
        fill(self, words)

    engine.submit("late", PROMPT, grammar=ask("[a-d]{8}"), temperature=1.0, top_k=4, seed=1, max_tokens=8)
    for _ in range(200):
        if engine.loop.stats().running:
            break
        engine.step()
        engine.settle()
    monkeypatch.setattr(GuidanceObject, "_fill", slow)
    engine.submit("free", PROMPT, max_tokens=10, ignore_eos=True)
    engine.submit("seen", PROMPT, grammar=ask("[ -~]{6}"), max_tokens=6)
    for _ in range(60):
        engine.step()
        engine.settle()
    assert held and engine.answers["free", 0].finish is not None
    assert engine.answers["seen", 0].finish is not None and len(engine.answers["seen", 0].text) == 6
    gate.set()
    drive(engine)
    assert re.fullmatch("[a-d]{8}", engine.answers["late", 0].text)
    alone = Constrained()
    alone.submit("late", PROMPT, grammar=ask("[a-d]{8}"), temperature=1.0, top_k=4, seed=1, max_tokens=8)
    drive(alone)
    assert alone.answers["late", 0].token_ids == engine.answers["late", 0].token_ids


def test_grammar_forced_tokens_same_output() -> None:
    given, right = (case("grammar-forced-tokens-same-output")[key] for key in ("given", "right"))
    most = given["sampling_params"]["max_new_tokens"]
    runs = []
    for flags in given["flags"]:
        said: dict[Any, Any] = {}
        for number, request in enumerate(given["requests"]):
            kind = GrammarKind.REGEX if "regex" in request else GrammarKind.JSON
            engine = Constrained(pages=300, forced_tokens=flags["forced_tokens"])
            for prompt in given["prompts"]:
                ids = [byte % 95 for byte in prompt.encode()]
                grammar = ask(request.get("regex") or request["json_schema"], kind)
                engine.submit(prompt, ids, grammar=grammar, logprobs=LogprobParams(output=True), max_tokens=most)
            drive(engine)
            assert engine.errors == {}
            for (prompt, _), answer in engine.answers.items():
                assert len(answer.output.logprobs) == len(answer.token_ids)
                assert answer.finish is not None and answer.finish.completion_tokens == len(answer.token_ids)
                said[number, prompt] = (answer.text, answer.token_ids)
            said[number] = engine.loop.stats().steps
        runs.append(said)
    for number, _ in enumerate(given["requests"]):
        assert all(runs[0][number, prompt] == runs[1][number, prompt] for prompt in given["prompts"]), right
        assert runs[1][number] <= runs[0][number]
    assert all(runs[1][number] < runs[0][number] for number in (0, 1))
