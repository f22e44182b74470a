"""Registration rules: duplicates, reserved names, overrides, conformance, versions, and the words about them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest
from branchline import registry
from branchline.registry import Registry, RegistryError

from tests.cases.loader import case

KINDS = [one.kind for one in registry.all_registries()]


class Store(Protocol):
    """What the registry under test wants."""

    size: int

    def put(self, key: str, value: int) -> None:
        """Keep."""

    def get(self, key: str) -> int:
        """Give back."""


class Good:
    size = 1

    def put(self, key: str, value: int) -> None: ...

    def get(self, key: str, default: int = 0) -> int:
        return default


@pytest.fixture
def stores() -> Registry[Callable[..., object]]:
    return Registry("stores", "store", Store)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An importable folder of plugin modules."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path


def test_a_registered_class_is_found_with_its_origin(stores: Registry[Callable[..., object]]) -> None:
    stores.register("good")(Good)
    assert stores.get("good") is Good
    assert stores.names() == ("good",)
    assert stores.entry("good").origin.file == __file__


def test_registering_the_same_object_twice_changes_nothing(stores: Registry[Callable[..., object]]) -> None:
    stores.register("good")(Good)
    stores.register("good")(Good)
    assert len(stores.entries()) == 1


def test_every_missing_extra_and_wrong_member_is_named_at_registration(stores: Registry[Callable[..., object]]) -> None:
    class Bad:
        get = 3

        def put(self, key: str, extra: int) -> None: ...

    with pytest.raises(RegistryError) as caught:
        stores.register("bad")(Bad)
    words = str(caught.value)
    for part in ("'get' must be a method, not int", "misses parameter 'value'", "extra required parameter 'extra'"):
        assert part in words
    assert "does not conform to Store" in words and stores.names() == ()


def test_what_a_factory_makes_is_checked_with_its_attributes(stores: Registry[Callable[..., object]]) -> None:
    class Sizeless(Good):
        size: int

        def __getattribute__(self, name: str) -> object:
            if name == "size":
                raise AttributeError(name)
            return super().__getattribute__(name)

    stores.verify("good", Good())
    with pytest.raises(RegistryError, match="missing attribute 'size'"):
        stores.verify("sizeless", Sizeless())
    with pytest.raises(RegistryError, match="missing method 'get'"):
        stores.verify("none", object())


@pytest.mark.parametrize("version", [0, 2, "1"])
def test_another_api_version_is_refused(stores: Registry[Callable[..., object]], version: int) -> None:
    with pytest.raises(RegistryError, match="API version"):
        stores.register("good", api_version=version)(Good)


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_name_must_be_a_word(stores: Registry[Callable[..., object]], name: str) -> None:
    with pytest.raises(RegistryError, match="non-empty string"):
        stores.register(name)(Good)


def test_only_callables_are_registered(stores: Registry[Callable[..., object]]) -> None:
    with pytest.raises(RegistryError, match="must be a class or factory, not int"):
        stores.register("three")(3)  # type: ignore[type-var]


@pytest.mark.parametrize("kind", KINDS)
def test_seam_duplicate_names(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """seam-duplicate-names, on a fresh registry of each kind with one built-in name."""
    assert case("seam-duplicate-names")["right"]["same_in_all_registries"]
    one: Registry[Callable[..., object]] = Registry(kind, kind)
    one.register_lazy("ours", "branchline.engine.nothing:here")

    def first() -> None: ...
    def second() -> None: ...
    def third() -> None: ...
    def fourth() -> None: ...

    one.register("acme")(first)
    with pytest.raises(RegistryError) as caught:
        one.register("acme")(second)
    assert str(caught.value).count(__file__) == 2 and "duplicate" in str(caught.value)
    with pytest.raises(RegistryError, match="reserved") as caught:
        one.register("ours")(second)
    assert "branchline" in str(caught.value) and __file__ in str(caught.value)
    with caplog.at_level(logging.WARNING):
        one.register("acme", override=True)(third)
    assert one.get("acme") is third and "overridden" in caplog.text
    assert one.entry("acme").replaced is not None
    with pytest.raises(RegistryError, match="overridden twice") as caught:
        one.register("acme", override=True)(fourth)
    assert str(caught.value).count(__file__) == 2
    with pytest.raises(RegistryError) as caught:
        one.get("nope")
    for part in ("'acme', 'ours'", f"branchline.registry.{kind}.register('nope', api_version=1)", "--plugin",
                 f"'branchline.{kind}'", "before options are built"):  # fmt: skip
        assert part in str(caught.value)


def test_a_close_name_is_proposed() -> None:
    one: Registry[Callable[..., object]] = Registry("models", "model")
    one.register("LlamaForCausalLM")(Good)
    assert "did you mean 'LlamaForCausalLM'?" in one.unknown("LLamaForCausalLm")


def test_seam_import_error_is_shown(package: Path) -> None:
    """seam-import-error-is-shown."""
    given, right = case("seam-import-error-is-shown")["given"], case("seam-import-error-is-shown")["right"]
    assert given["ask_for"] == list(right)
    (package / "good.py").write_text("class GoodForCausalLM: ...\n")
    (package / "bad.py").write_text("import no_such_module_xyz\nclass BadForCausalLM: ...\n")
    one: Registry[Callable[..., object]] = Registry("models", "model")
    one.register_lazy("GoodForCausalLM", "good:GoodForCausalLM")
    one.register_lazy("BadForCausalLM", "bad:BadForCausalLM")
    assert one.get("GoodForCausalLM").__name__ == "GoodForCausalLM"
    for _ in range(2):  # the second look-up says the same as the first
        with pytest.raises(RegistryError) as caught:
            one.get("BadForCausalLM")
        assert "bad.py" in str(caught.value) and "no_such_module_xyz" in str(caught.value)
    with pytest.raises(RegistryError) as caught:
        one.get("NopeForCausalLM")
    assert "GoodForCausalLM" in str(caught.value)
    assert "failed to import: 'BadForCausalLM'" in str(caught.value) and "bad.py" in str(caught.value)
    assert one.names() == ("GoodForCausalLM",) and one.entry("BadForCausalLM").state == "failed"


def test_looking_at_a_lazy_name_imports_nothing(package: Path) -> None:
    (package / "loud.py").write_text("raise RuntimeError('imported')\n")
    one: Registry[Callable[..., object]] = Registry("models", "model")
    one.register_lazy("loud", "loud:Model")
    assert one.entry("loud").state == "lazy"
    assert one.entry("loud").origin.file == str(package / "loud.py")
    assert one.names() == ("loud",)


@pytest.mark.parametrize("target", ["module", ":object", "module:", ""])
def test_a_lazy_target_must_name_module_and_object(target: str) -> None:
    one: Registry[Callable[..., object]] = Registry("models", "model")
    with pytest.raises(RegistryError, match="'module:object'"):
        one.register_lazy("x", target)


def test_a_decorator_in_a_lazily_named_module_is_the_same_registration(package: Path) -> None:
    (package / "selfish.py").write_text(
        "from branchline import registry\n@registry.models.register('SelfishForCausalLM')\nclass Selfish: ...\n"
    )
    registry.models.register_lazy("SelfishForCausalLM", "selfish:Selfish")
    try:
        assert registry.models.get("SelfishForCausalLM").__name__ == "Selfish"
    finally:
        registry.models._entries.pop("SelfishForCausalLM")
