"""Running stacks, one for each set of flags, shared by all tests of a session."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

import pytest

from .stack import MODEL, Stack
from .tiny import tiny  # noqa: F401  (a fixture)

Starter = Callable[..., Stack]
KEEP = 3  # stacks alive at once; each engine with the real model takes about 1.5 GB


@pytest.fixture(scope="session")
def stacks() -> Iterator[Starter]:
    """`stacks(*engine_flags, model=…, gateway_flags=…)` gives a running stack, the same for the same arguments."""
    alive: OrderedDict[tuple[object, ...], Stack] = OrderedDict()

    def start(*engine_flags: str, model: str = MODEL, engines: int = 1, gateway_flags: tuple[str, ...] = ()) -> Stack:
        key = (engine_flags, model, engines, gateway_flags)
        found = alive.get(key)
        if found is not None and all(engine.process.child.poll() is None for engine in found.engines):
            alive.move_to_end(key)
            return found
        if found is not None:
            alive.pop(key).close()
        while len(alive) >= KEEP:
            alive.popitem(last=False)[1].close()
        alive[key] = Stack(*engine_flags, model=model, engines=engines, gateway_flags=gateway_flags)
        return alive[key]

    yield start
    for stack in alive.values():
        stack.close()


@pytest.fixture
def stack(stacks: Starter) -> Iterator[Stack]:
    """The default stack, checked afterwards: nothing left running, no page lost."""
    running = stacks()
    yield running
    running.assert_idle(10)


@pytest.fixture
def stack_page1(stacks: Starter) -> Iterator[Stack]:
    """Page size 1."""
    running = stacks("--page-size", "1")
    yield running
    running.assert_idle(10)
