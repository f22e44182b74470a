"""Hooks around a function: order, modes, refusals, failures and cost."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from branchline import registry
from branchline.engine.errors import InternalError, InvalidArgument, LoadError
from branchline.engine.hooks import POINTS, Chain, Fault, Mode, Placed, assemble
from branchline.engine.hooks import chain as chain_module


def hook(mode: str, function: Callable[..., Any], point: str = "sampling", priority: int = 0, **more: Any) -> type:
    """A class as a plugin writes it; the function takes self."""
    given = {"api_version": 1, "point": point, "point_version": 1, "mode": mode, "priority": priority, **more}
    return type("Made", (), {**given, "__call__": function})


@pytest.fixture
def registered() -> Iterator[Callable[[str, type], None]]:
    """Registers hooks for one test."""
    before = dict(registry.hooks._entries)
    yield lambda name, cls: registry.hooks.register(name)(cls) and None
    registry.hooks._entries.clear()
    registry.hooks._entries.update(before)


def placed(name: str, mode: Mode, function: Callable[..., Any], priority: int = 0, point: str = "sampling") -> Placed:
    return Placed(name, "acme 1", POINTS[point], mode, priority, function)


def test_a_point_without_hooks_gets_its_own_function_back() -> None:
    def own(logits: object, step: object) -> int:
        return 1

    assert Chain().bind("sampling", own) is own
    other = Chain([placed("x", Mode.BEFORE, print, point="scheduler.step")])
    assert other.bind("sampling", own) is own and other and not Chain()


def test_before_and_after_see_what_goes_in_and_comes_out_and_change_nothing() -> None:
    seen: list[Any] = []
    both = Chain(
        [
            placed("b", Mode.BEFORE, lambda *given: seen.append(("before", *given))),
            placed("a", Mode.AFTER, lambda *given: seen.append(("after", *given))),
        ]
    )
    assert both.bind("sampling", lambda x, y: x + y)(2, 3) == 5
    assert seen == [("before", 2, 3), ("after", 5, 2, 3)]


def test_around_may_change_both_and_replace_stands_in_the_place_of_the_engines_own() -> None:
    wrapped = Chain([placed("w", Mode.AROUND, lambda proceed, x, y: 10 * proceed(x + 1, y))])
    assert wrapped.bind("sampling", lambda x, y: x + y)(1, 1) == 30
    instead = Chain(
        [placed("r", Mode.REPLACE, lambda x, y: 7), placed("w", Mode.AROUND, lambda proceed, x, y: proceed(x, y) + 1)]
    )
    assert instead.bind("sampling", lambda x, y: pytest.fail("replaced"))(1, 1) == 8


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_order_is_priority_then_registration(order: tuple[int, ...]) -> None:
    seen: list[str] = []
    made = []
    for number in order:
        for mode in (Mode.BEFORE, Mode.AROUND, Mode.AFTER):
            made.append(placed(f"{mode}{number}", mode, _noting(seen, f"{mode}{number}", mode), priority=number // 2))
    Chain(made).bind("sampling", lambda *given: seen.append("own"))(1, 2)
    first = [number for number in order if number == 2] + [number for number in order if number != 2]
    assert seen == [
        *(f"before{number}" for number in first),
        *(f"around{number}" for number in first),
        "own",
        *(f"after{number}" for number in first),
    ]


def _noting(seen: list[str], name: str, mode: Mode) -> Callable[..., Any]:
    def note(*given: Any) -> Any:
        seen.append(name)
        return given[0](*given[1:]) if mode is Mode.AROUND else None

    return note


def test_a_second_replace_on_a_point_is_refused_and_both_are_named(registered: Callable[[str, type], None]) -> None:
    registered("one", hook("replace", lambda self, logits, step: []))
    registered("two", hook("replace", lambda self, logits, step: []))
    with pytest.raises(LoadError, match=r"'one' of .*'two' of .* all replace sampling.*--plugins-disable"):
        assemble()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"point": "engine.stepp"}, r"stands at 'engine.stepp'.*there are: engine.start, weights.loaded"),
        ({"point_version": 2}, "written for sampling version 2 and this is version 1"),
        ({"mode": "instead"}, "has mode 'instead'; sampling takes: before, after, around, replace"),
        ({"point": "engine.stop", "mode": "replace"}, "engine.stop takes: before, after, around"),
        ({"priority": "high"}, "has priority 'high', which is no integer"),
        ({"mode": "around"}, r"must take \(proceed, logits, step\) as the around hook of sampling"),
    ],
)
def test_a_hook_that_does_not_fit_its_point_ends_the_start_and_is_told_why(
    registered: Callable[[str, type], None], changed: dict[str, Any], words: str
) -> None:
    cls = hook("before", lambda self, logits, step: None)
    for name, value in changed.items():
        setattr(cls, name, value)
    registered("acme", cls)
    with pytest.raises(LoadError, match=words) as caught:
        assemble()
    assert "hook 'acme' of" in caught.value.message and "--plugins-disable acme" in caught.value.message


def test_a_hook_that_cannot_be_made_ends_the_start(registered: Callable[[str, type], None]) -> None:
    def broken() -> object:
        raise RuntimeError("no licence")

    registered("acme", broken)  # type: ignore[arg-type]
    with pytest.raises(LoadError, match=r"can't be made: RuntimeError: no licence"):
        assemble()
    registry.hooks._entries.clear()
    registered("acme", lambda: object())  # type: ignore[arg-type]
    with pytest.raises(LoadError, match="missing attribute 'point'"):
        assemble()


def test_a_hook_that_cannot_be_imported_is_logged_and_the_others_stand(
    registered: Callable[[str, type], None], caplog: pytest.LogCaptureFixture
) -> None:
    registry.hooks.register_lazy("gone", "no_such_module_xyz:Hook")
    registered("here", hook("before", lambda self, logits, step: None))
    assert [one.name for one in assemble().hooks] == ["here"]
    assert "no_such_module_xyz" in caplog.text


def fail(*given: Any) -> None:
    raise ValueError("boom")


@pytest.mark.parametrize("point", [name for name, one in POINTS.items() if one.fault is not Fault.START])
def test_a_failing_hook_is_named_with_its_point(point: str) -> None:
    bound = Chain([placed("acme", Mode.BEFORE, fail, point=point)]).bind(point, lambda *given: None)
    with pytest.raises(InternalError, match=re.escape(f"hook 'acme' of acme 1 failed at {point}: ValueError: boom")):
        bound(1)


@pytest.mark.parametrize("point", [name for name, one in POINTS.items() if one.fault is Fault.START])
def test_a_hook_that_fails_at_the_start_ends_it(point: str) -> None:
    with pytest.raises(LoadError, match="boom; repair it, or leave it out by --plugins-disable acme"):
        Chain([placed("acme", Mode.AFTER, fail, point=point)]).bind(point, lambda *given: None)(1)


def test_what_a_hook_refuses_keeps_its_own_status() -> None:
    def refuse(request: object) -> None:
        raise InvalidArgument("too long", field="token_ids")

    bound = Chain([placed("acme", Mode.BEFORE, refuse, point="request.admission")]).bind("request.admission", str)
    with pytest.raises(InvalidArgument, match="too long"):
        bound("r")


def test_an_around_hook_is_not_blamed_for_what_it_surrounds() -> None:
    one = placed("w", Mode.AROUND, lambda proceed, *given: proceed(*given))
    with pytest.raises(ValueError, match="boom"):
        Chain([one]).bind("sampling", fail)(1, 2)
    assert (one.cost.calls, one.cost.failures) == (1, 0)


def test_cost_counts_calls_and_failures_and_leaves_out_what_is_surrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count()
    monkeypatch.setattr(chain_module.time, "perf_counter", lambda: float(next(now)))
    outer = placed("outer", Mode.AROUND, lambda proceed, *given: proceed(*given))
    broken = placed("broken", Mode.BEFORE, fail)
    assert Chain([outer]).bind("sampling", lambda *given: [next(now) for _ in range(100)])(1, 2)
    assert outer.cost.calls == 1 and outer.cost.seconds == 2.0, "one tick on either side of proceed"
    with pytest.raises(InternalError):
        Chain([broken]).bind("sampling", fail)(1, 2)
    assert (broken.cost.calls, broken.cost.failures) == (1, 1)


def test_engines_whose_hooks_may_change_what_is_computed_are_told_apart() -> None:
    watching = Chain([placed("a", Mode.BEFORE, fail), placed("b", Mode.AROUND, fail, point="request.end")])
    changing = Chain([placed("a", Mode.REPLACE, fail)])
    assert watching.mark == "" and changing.mark.startswith("+hooks:")
    assert changing.mark != Chain([placed("b", Mode.REPLACE, fail)]).mark
