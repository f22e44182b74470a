"""The conformance suites as a pytest plugin: a fixture for tests, and an option that needs no test file at all.

    pytest_plugins = ["branchline.testing.plugin"]
    conformance_of = ("grammar_backends", AcmeBackend)  # or "acme", its registered name

    def test_conformance(conformance_check):
        conformance_check()

Loaded where it is named only (`pytest_plugins`, `-p`): an entry point would load it, and have all of Branchline's
assertions rewritten, in every test run beside which Branchline happens to be installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest

from branchline.testing import checks, find

FIXTURE, MEMBER, OPTION = "conformance_check", "conformance_of", "--conformance"
HOW = f'write {MEMBER} = ("grammar_backends", "acme") beside the test, or give {OPTION} grammar_backends=acme'
Asked = tuple[str, str | Callable[..., object]]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option."""
    parser.getgroup("branchline").addoption(
        OPTION,
        action="append",
        metavar="KIND=NAME",
        help="what tests with conformance_check are run on instead of what they name: a kind and a registered name, "
        "or KIND=MODULE:FACTORY. Without tests of your own: --pyargs branchline.testing.suite",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a check and implementation."""
    if FIXTURE not in metafunc.fixturenames:
        return
    given = metafunc.config.getoption(OPTION, None) or []
    try:
        asked = [_parsed(one) for one in given] or _named(metafunc)
        found = [(kind, what, checks(kind, _known(kind, what))) for kind, what in asked]
    except ValueError as error:
        raise pytest.Collector.CollectError(str(error)) from None
    several = len(found) > 1
    metafunc.parametrize(
        FIXTURE,
        [
            pytest.param(check, id=f"{_title(kind, what)}-{name}" if several else name)
            for kind, what, each in found
            for name, check in each.items()
        ],
    )


def _named(metafunc: pytest.Metafunc) -> list[Asked]:
    """What the test's class or module says: one pair, or several. Raises ValueError."""
    said = getattr(metafunc.cls, MEMBER, None) or getattr(metafunc.module, MEMBER, None)
    if said is None:
        raise ValueError(f"{metafunc.function.__name__} asks for {FIXTURE} and nothing says of what: {HOW}")
    pairs = said if isinstance(said, list) else [said]
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ValueError(f"{MEMBER} has {pair!r}, which is no (kind, name or factory): {HOW}")
        if not (isinstance(pair[1], str) or callable(pair[1])):
            raise ValueError(f"{MEMBER} has {pair[1]!r}, which is neither a name nor a factory: {HOW}")
    return pairs


def _parsed(text: str) -> Asked:
    """One value of the option. Raises ValueError."""
    kind, sign, name = text.partition("=")
    if not (kind and sign and name):
        raise ValueError(f"{OPTION} {text!r} is not KIND=NAME: {HOW}")
    module, colon, member = name.partition(":")
    if not colon:
        return kind, name
    try:
        factory: Callable[..., object] = getattr(importlib.import_module(module), member)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{OPTION} {text!r}: {name!r} is not to be had ({error}); give MODULE:FACTORY") from error
    return kind, factory


def _known(kind: str, what: str | Callable[..., object]) -> str | Callable[..., object]:
    """The same, if the kind exists and the name is registered. Raises ValueError."""
    try:
        store = find(kind)
    except KeyError:
        raise ValueError(f"there is no kind {kind!r}: `branchline plugins` lists them") from None
    if isinstance(what, str) and what not in store.names():
        raise ValueError(store.unknown(what))
    return what


def _title(kind: str, what: str | Callable[..., object]) -> str:
    return f"{kind}={what if isinstance(what, str) else getattr(what, '__name__', type(what).__name__)}"
