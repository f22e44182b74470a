"""A Device that is late, remembers and forbids: what a GPU would get wrong in silence fails here with its reason.

Copies from the device arrive only when a later mark is waited for. A capture keeps the operations themselves, and a
replay repeats exactly these on exactly that memory, as a GPU does: Python runs no second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST_READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "_unique2", "masked_select", "item"}
HOST_MADE = ("from_numpy", "tensor", "as_tensor", "frombuffer")


class RuleBroken(AssertionError):
    """Something that is not allowed on a device."""


@dataclass(eq=False)
class _Copy:
    """A queued copy. `data` is what must still be in the source, or what will be in the target."""

    memory: torch.Tensor
    data: torch.Tensor
    fetched: bool


class Tape(TorchDispatchMode):
    """Records every operation; refuses those that look at values on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See TorchDispatchMode."""
        name = func.overloadpacket.__name__
        by_bool = name in ("index", "index_put_") and any(
            one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]
        )
        if name in HOST_READS or by_bool:
            raise RuleBroken(f"{name} waits for the device inside a capture")
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        """The same operations on the same memory."""
        for func, args, kwargs, out in self.calls:
            new = func(*args, **kwargs)
            if func._schema.is_mutable:
                continue
            for target, value in zip(tree_leaves(out), tree_leaves(new), strict=True):
                if isinstance(target, torch.Tensor) and target.data_ptr() != value.data_ptr():
                    target.copy_(value)


@dataclass
class Recorder:
    """Device on the CPU. `log` has "upload", "fetch", "capture", "replay" and what tests add, in order."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    log: list[str] = field(default_factory=list)
    queue: list[_Copy] = field(default_factory=list)
    owned: list[torch.Tensor] = field(default_factory=list)
    capturing: bool = False

    def pinned(self, count: int) -> torch.Tensor:
        """See Device."""
        made = torch.zeros(count, dtype=torch.uint8)
        self.owned.append(made)
        return made

    def send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See Device."""
        self._outside("send")
        self._is_pinned(source)
        self.log.append("upload")
        target.copy_(source)
        self.queue.append(_Copy(source, source.clone(), fetched=False))

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See Device."""
        self._outside("fetch")
        self._is_pinned(target)
        self.log.append("fetch")
        self.queue.append(_Copy(target, source.clone(), fetched=True))
        target.fill_(0xAB)

    def mark(self) -> _Mark:
        """See Device."""
        self._outside("mark")
        return _Mark(self, list(self.queue))

    def capture(self, run: Callable[[], None]) -> _Replayed:
        """See Device."""
        self._outside("capture")
        self.log.append("capture")
        run()
        tape = Tape()
        self.capturing = True
        try:
            with no_host_values(), tape:
                run()
        finally:
            self.capturing = False
        return _Replayed(self, tape)

    def settle(self, copies: list[_Copy]) -> None:
        """These are done."""
        for copy in copies:
            if copy not in self.queue:
                continue
            self.queue.remove(copy)
            if copy.fetched:
                with torch.inference_mode():
                    copy.memory.copy_(copy.data)
            elif not torch.equal(copy.memory, copy.data):
                raise RuleBroken("pinned memory was written while a copy from it was in flight")

    def _outside(self, what: str) -> None:
        if self.capturing:
            raise RuleBroken(f"{what} inside a capture")

    def _is_pinned(self, memory: torch.Tensor) -> None:
        at = memory.untyped_storage().data_ptr()
        if all(one.untyped_storage().data_ptr() != at for one in self.owned):
            raise RuleBroken("a copy that is not to wait needs pinned memory")


@dataclass(eq=False)
class _Mark:
    recorder: Recorder
    copies: list[_Copy]

    def wait(self) -> None:
        """See Mark."""
        self.recorder._outside("wait")
        self.recorder.settle(self.copies)


@dataclass(eq=False)
class _Replayed:
    recorder: Recorder
    tape: Tape

    def replay(self) -> None:
        """See Graph."""
        self.recorder._outside("replay")
        self.recorder.log.append("replay")
        self.tape.replay()


@contextmanager
def no_host_values() -> Iterator[None]:
    """Neither tensors from host values, which a replay would not see change, nor values read on the host."""

    def refuse(name: str) -> Callable[..., Any]:
        def refused(*_: Any, **__: Any) -> Any:
            raise RuleBroken(f"{name} inside a capture")

        return refused

    with pytest.MonkeyPatch.context() as patch:
        for name in HOST_MADE:
            patch.setattr(torch, name, refuse(name))
        for name in ("tolist", "numpy", "item", "cpu"):
            patch.setattr(torch.Tensor, name, refuse(name))
        yield
