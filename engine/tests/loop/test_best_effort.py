"""Best effort: what no backend enforces exactly is enforced in part, and the finish says whether the text is right."""

from __future__ import annotations

import json
from dataclasses import replace

from branchline.engine.grammar.foundry import checked
from branchline.engine.grammar.refusal import GrammarUnsupported
from branchline.engine.types import GrammarAsk, GrammarKind, ReasoningAsk
from constrained import PROMPT, Constrained, ask, drive

UNIQUE = json.dumps({"type": "array", "items": {"type": "integer"}, "uniqueItems": True})
BEST = GrammarAsk(GrammarKind.JSON, UNIQUE, best_effort=True)


def test_what_is_not_enforced_is_checked_and_said() -> None:
    engine = Constrained(pages=900)
    for seed in range(6):
        engine.submit(f"r{seed}", PROMPT, grammar=BEST, temperature=1.0, seed=seed, max_tokens=20)
    drive(engine)
    assert engine.errors == {}
    verdicts = set()
    for answer in engine.answers.values():
        value = json.loads(answer.text)
        assert isinstance(value, list), "the type is enforced"
        assert answer.finish is not None and answer.finish.grammar is not None
        report = answer.finish.grammar
        whole = all(type(one) in (int, float) and one == int(one) for one in value)
        right = whole and len(set(map(repr, value))) == len(value)
        assert report.valid is right and not report.enforced and report.complete
        verdicts.add(right)
    assert False in verdicts


def test_without_best_effort_it_is_refused() -> None:
    engine = Constrained()
    engine.submit("r", PROMPT, grammar=ask(UNIQUE, GrammarKind.JSON), max_tokens=20)
    drive(engine)
    assert isinstance(engine.errors["r"], GrammarUnsupported) or "uniqueItems" in engine.errors["r"].message


def test_what_is_enforced_exactly_stays_so_and_says_it() -> None:
    engine = Constrained()
    exact = GrammarAsk(GrammarKind.JSON, '{"type": "integer", "maximum": 5}', best_effort=True)
    engine.submit("r", PROMPT, grammar=exact, max_tokens=20)
    drive(engine)
    finish = engine.answers["r", 0].finish
    assert (
        finish is not None and finish.grammar is not None and finish.grammar.enforced and finish.grammar.valid is None
    )
    assert json.loads(engine.answers["r", 0].text) <= 5


def test_a_finish_waits_for_its_check_and_the_request_is_not_forgotten() -> None:
    engine = Constrained(pages=300)
    held: list[tuple[str, str]] = []
    check = engine.compiler.check

    def hold(schema: str, value: str, done: object) -> int:
        held.append((schema, value))
        late.append(done)
        return 0

    late: list[object] = []
    engine.compiler.check = hold  # type: ignore[method-assign, assignment]
    block = replace(BEST, reasoning=ReasoningAsk("<t>", "</t>", implicit=True, max_tokens=6))
    engine.submit("r", PROMPT, grammar=block, temperature=1.0, max_tokens=24)
    for _ in range(200):
        engine.step()
        engine.settle()
        if held:
            break
    assert engine.loop.busy and engine.answers["r", 0].finish is None
    text = engine.answers["r", 0].text.partition("</t>")[2]
    assert held == [(UNIQUE, text)]
    check(*held[0], late[0])  # type: ignore[arg-type]
    drive(engine)
    finish = engine.answers["r", 0].finish
    assert finish is not None and finish.grammar is not None and finish.grammar.valid is not None


def test_the_check_reads_texts_and_schemas_of_any_kind() -> None:
    assert checked(UNIQUE, "[1, 2]") == {"valid": True} and checked(UNIQUE, "[1, 1]") == {"valid": False}
    assert checked(UNIQUE, "[1,") == {"valid": False}
    assert "fault" in checked('{"$ref": "https://example.invalid/x"}', "1")
