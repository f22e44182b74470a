"""Our own implementations pass the suites that plugins get; faulty ones are told what is wrong."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
from branchline import registry
from branchline.cli import extensions
from branchline.engine.cache.reference import ReferenceCache
from branchline.engine.speculative.base import Proposal
from branchline.engine.speculative.ngram import NgramDrafts
from branchline.testing import SUITES, cache, checks, conformance, guesses, options

extensions.load([], {})
NEEDS_MODEL = {("speculative_algorithms", "draft")}  # a second model, which the e2e tests give it
NEEDS_PACKAGE = {("attention_backends", "flashinfer"): "flashinfer"}
OURS = [
    (one.kind, entry.name)
    for one in registry.all_registries()
    for entry in one.entries()
    if entry.origin.builtin and (one.kind, entry.name) not in NEEDS_MODEL
]


def absent(kind: str, name: str) -> pytest.MarkDecorator:
    package = NEEDS_PACKAGE.get((kind, name), "")
    missing = bool(package) and importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed: {name} is not tried")


EACH = [
    pytest.param(check, id=f"{kind}-{name}-{title}", marks=absent(kind, name))
    for kind, name in OURS
    for title, check in checks(kind, name).items()
]


@pytest.mark.parametrize("check", EACH)
def test_our_own_pass(check: Callable[[], None]) -> None:
    check()


def test_the_decorator_runs_each_check_once() -> None:
    mark = conformance("radix_cache_backends", "native").mark
    assert mark.args[0] == "check" and len(mark.args[1]) == len(cache.CHECKS) + 1
    assert set(SUITES) <= {one.kind for one in registry.all_registries()}


class LosesPages(ReferenceCache):
    def free(self, pages: object, epoch: int = 0) -> None:
        """Forget to."""


class EvictsLocked(ReferenceCache):
    def lock(self, node: int) -> None:
        """Pretend to."""

    def unlock(self, node: int) -> None:
        """Pretend to."""


class ForgetsNamespaces(ReferenceCache):
    def match(self, namespace: bytes, token_ids: object, limit: int) -> tuple[int, list[int]]:
        return super().match(b"", token_ids, limit)  # type: ignore[arg-type]


@pytest.mark.parametrize("faulty", [LosesPages, EvictsLocked, ForgetsNamespaces])
def test_a_faulty_cache_is_caught(faulty: type[ReferenceCache]) -> None:
    caught = []
    for check in cache.CHECKS:
        try:
            check(faulty)  # type: ignore[arg-type]
        except Exception:  # an assertion, or what the audit says
            caught.append(check.__name__)
    assert caught


class TooLong(NgramDrafts):
    def propose(self, asked: list[object]) -> list[Proposal]:  # type: ignore[override]
        return [Proposal([1] * 9) for _ in asked]


def test_guesses_beyond_the_limit_are_caught() -> None:
    with pytest.raises(AssertionError):
        guesses.each_ask_gets_one_proposal_within_its_limit(TooLong)  # type: ignore[arg-type]


class Invents:
    api_version = 1
    architectures = ("MineForCausalLM",)

    def applies(self, facts: object) -> bool:
        return True

    def options(self, facts: object) -> dict[str, object]:
        return {"no_such_option": 1}


def test_an_override_of_an_unknown_option_is_caught() -> None:
    with pytest.raises(AssertionError, match="'no_such_option' is no option"):
        options.options_are_known_and_in_range_for_any_checkpoint(Invents)  # type: ignore[arg-type]
