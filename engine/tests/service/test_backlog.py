"""Steps that a peer has not read become one frame that says the same."""

from __future__ import annotations

from branchline.engine.service.backlog import Backlog
from branchline.engine.service.generated import engine_pb2 as pb


def step(number: int, *deltas: pb.SequenceDelta) -> pb.AttachResponse:
    return pb.AttachResponse(frame=pb.StepFrame(step=number, deltas=deltas))


def delta(handle: int, token: int, *, index: int = 0) -> pb.SequenceDelta:
    made = pb.SequenceDelta(handle=handle, index=index, token_ids=[token], text=chr(97 + token))
    made.logprobs.token_ids.append(token)
    made.logprobs.logprobs.append(-float(token))
    made.logprobs.top.add(token_ids=[token, token + 1])
    return made


def test_ids_text_and_logprobs_of_a_sequence_go_on_in_its_last_delta() -> None:
    message, backlog = step(1, delta(1, 0), delta(1, 5, index=1)), Backlog()
    backlog.merge(message, 2, [delta(1, 1), delta(1, 6, index=1)])
    last = delta(1, 2)
    last.finish.reason = pb.FINISH_REASON_LENGTH
    backlog.merge(message, 3, [last])
    first, second = message.frame.deltas
    assert message.frame.step == 3
    assert (list(first.token_ids), first.text, list(first.logprobs.logprobs)) == ([0, 1, 2], "abc", [0, -1, -2])
    assert [list(top.token_ids) for top in first.logprobs.top] == [[0, 1], [1, 2], [2, 3]]
    assert first.finish.reason == pb.FINISH_REASON_LENGTH
    assert (list(second.token_ids), second.HasField("finish")) == ([5, 6], False)


def test_what_comes_once_or_after_an_end_stays_by_itself() -> None:
    message, backlog = step(1, delta(1, 0)), Backlog()
    ended = delta(1, 1)
    ended.finish.reason = pb.FINISH_REASON_STOP
    begun = delta(2, 3)
    begun.prompt.prompt_tokens = 4
    backlog.merge(message, 2, [ended, begun])
    backlog.merge(message, 3, [pb.SequenceDelta(handle=1, error=pb.Error(message="late")), delta(2, 4)])
    told = [(made.handle, list(made.token_ids)) for made in message.frame.deltas]
    assert told == [(1, [0, 1]), (2, [3, 4]), (1, [])]
    assert message.frame.deltas[2].error.message == "late"


def test_another_frame_starts_anew() -> None:
    backlog, first, second = Backlog(), step(1, delta(1, 0)), step(2, delta(1, 1))
    backlog.merge(first, 1, [delta(1, 9)])
    backlog.merge(second, 3, [delta(1, 2)])
    assert list(first.frame.deltas[0].token_ids) == [0, 9]
    assert list(second.frame.deltas[0].token_ids) == [1, 2]
