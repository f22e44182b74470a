"""Conformance suites for plugins: `@conformance("radix_cache_backends", "acme")` above a pytest test.

Each kind's suite says what its implementations must do whatever else they do; our own pass the same ones. The same as
a pytest plugin, with a fixture and an option, is `branchline.testing.plugin`. Must not be imported by anything that
serves. pytest is needed only to run tests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from branchline import registry
from branchline.cli import extensions
from branchline.testing import attention, backends, cache, eviction, grammar, guesses, hooks, options, platforms

if TYPE_CHECKING:
    import pytest

Check = Callable[..., None]

SUITES: dict[str, tuple[Check, ...]] = {
    "attention_backends": attention.CHECKS,
    "radix_cache_backends": cache.CHECKS,
    "eviction_policies": eviction.CHECKS,
    "grammar_backends": grammar.CHECKS,
    "speculative_algorithms": guesses.CHECKS,
    "quantization_methods": options.QUANTIZATION,
    "model_overrides": options.OVERRIDES,
    "platforms": platforms.CHECKS,
    "hooks": hooks.CHECKS,
    "serve_backends": backends.CHECKS,
}
"""What is checked beyond registration, by kind. The other kinds are checked for their members only."""


def is_registered(kind: str, name: str) -> None:
    """The name is registered, its module can be imported, and what it is has the kind's members."""
    store = find(kind)
    store.get(name)
    assert store.entry(name).state == "loaded"


def find(kind: str) -> registry.Registry[Callable[..., object]]:
    """The registry of a kind, with our own and all installed plugins in it. Raises KeyError for an unknown kind."""
    extensions.load([], {})
    return {one.kind: one for one in registry.all_registries()}[kind]


def checks(kind: str, what: str | Callable[..., object]) -> dict[str, Callable[[], None]]:
    """Every check of one implementation, ready to be called; a fault raises AssertionError.

    `what` is a registered name, or the factory itself (a class, say) where it needn't be registered to be tested.
    """
    found: dict[str, Callable[[], None]] = {}
    if isinstance(what, str):
        found["is_registered"] = partial(is_registered, kind, what)
    for check in SUITES.get(kind, ()):
        found[check.__name__] = partial(_built, check, kind, what)
    return found


def conformance(kind: str, what: str | Callable[..., object]) -> pytest.MarkDecorator:
    """Decorator: the test is run once a check, which it gets as `check` and calls. `what` as for `checks`."""
    import pytest

    each = checks(kind, what)
    return pytest.mark.parametrize("check", each.values(), ids=each.keys())


def _built(check: Check, kind: str, what: str | Callable[..., object]) -> None:
    store = find(kind)
    factory = store.get(what) if isinstance(what, str) else what
    name = what if isinstance(what, str) else getattr(what, "__name__", type(what).__name__)

    def make(*given: object, **named: object) -> object:
        product = factory(*given, **named)
        store.verify(name, product)
        return product

    check(make)
