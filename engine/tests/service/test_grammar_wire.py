"""What the contract says of constraints, both ways: reasoning, enforcement, reports."""

from __future__ import annotations

from branchline.engine.service.generated import engine_pb2 as pb
from branchline.engine.service.validate import _grammar
from branchline.engine.service.wire import to_finish
from branchline.engine.types import Finish, FinishReason, GrammarAsk, GrammarKind, GrammarReport, ReasoningAsk


def test_an_ask_is_read_as_it_was_sent() -> None:
    marks = pb.Reasoning(begin="<think>", end="</think>", implicit=True, max_tokens=0)
    sent = pb.Grammar(regex="a+", reasoning=marks, enforcement=pb.ENFORCEMENT_BEST_EFFORT, report=True, tenant="t")
    assert _grammar(pb.GenerateRequest(grammar=sent)) == GrammarAsk(
        GrammarKind.REGEX, "a+", "", "t", ReasoningAsk("<think>", "</think>", True, 0), True, True
    )
    plain = _grammar(pb.GenerateRequest(grammar=pb.Grammar(choice='["a"]')))
    assert plain == GrammarAsk(GrammarKind.CHOICE, '["a"]')
    marks.ClearField("max_tokens")
    free = _grammar(pb.GenerateRequest(grammar=pb.Grammar(regex="a", reasoning=marks)))
    assert free is not None and free.reasoning is not None and free.reasoning.max_tokens is None


def test_a_report_is_sent_as_it_is_and_only_if_there_is_one() -> None:
    report = GrammarReport("b", "why", 1.5, 0.25, 9, 4, False, False, None)
    sent = to_finish(Finish(FinishReason.LENGTH, 9, grammar=report)).grammar
    assert (sent.backend, sent.reason, sent.compile_ms, sent.mask_p99_ms) == ("b", "why", 1.5, 0.25)
    assert (sent.constrained_tokens, sent.forced_tokens, sent.complete, sent.enforced) == (9, 4, False, False)
    assert not sent.HasField("valid")
    assert not to_finish(Finish(FinishReason.STOP, 1)).HasField("grammar")
