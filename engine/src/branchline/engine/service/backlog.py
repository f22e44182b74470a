"""Steps that a slow peer has not read yet, as one frame: what it is owed grows by ids and text, not by messages.

Owns which deltas may become one. A peer that stops for a while, as a process on a busy machine does, loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from branchline.engine.service.generated import engine_pb2 as pb

MAX_LAG = 32  # frames that wait before further steps are added to the last of them


class Backlog:
    """Adds deltas to a frame that waits; remembers where each sequence's last one stands in it."""

    def __init__(self) -> None:
        self._message: pb.AttachResponse | None = None
        self._last: dict[tuple[int, int], pb.SequenceDelta] = {}

    def merge(self, message: pb.AttachResponse, step: int, deltas: Iterable[pb.SequenceDelta]) -> None:
        """Make the message's frame say what `deltas` say after what it says already."""
        frame = message.frame
        if message is not self._message:
            self._message = message
            self._last = {(delta.handle, delta.index): delta for delta in frame.deltas}
        frame.step = step
        for delta in deltas:
            key = (delta.handle, delta.index)
            before = self._last.get(key)
            if before is not None and _continues(before, delta):
                _append(before, delta)
            else:
                self._last[key] = frame.deltas.add()
                self._last[key].CopyFrom(delta)


def _continues(before: pb.SequenceDelta, delta: pb.SequenceDelta) -> bool:
    """Whether both can be told as one: nothing that comes once, or after which nothing comes, stands between them."""
    once = ("prompt", "input_logprobs", "lease", "error")
    return (
        not any(delta.HasField(field) for field in once)
        and not before.HasField("finish")
        and not before.HasField("error")
        and before.HasField("logprobs") == delta.HasField("logprobs")
    )


def _append(before: pb.SequenceDelta, delta: pb.SequenceDelta) -> None:
    before.token_ids.extend(delta.token_ids)
    before.text += delta.text
    if delta.HasField("logprobs"):
        for column in ("token_ids", "logprobs", "top", "chosen"):
            getattr(before.logprobs, column).extend(getattr(delta.logprobs, column))
    if delta.HasField("finish"):
        before.finish.CopyFrom(delta.finish)
