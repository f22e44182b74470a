"""One rule of registration in both packages: each test runs on the engine's registry and on the router's."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import branchline_router.cli as router_cli
import pytest
from branchline import registry as engine_registry
from branchline_router import registry as router_registry

ROOT = Path(__file__).resolve().parents[2]
BOTH = [
    pytest.param(engine_registry, "branchline", id="engine"),
    pytest.param(router_registry, "branchline_router", id="router"),
]


class Wanted(Protocol):
    """What the registries under test want."""

    def push(self, text: str) -> list[str]:
        """Take."""


def fresh(module: Any) -> Any:
    return module.Registry("things", "thing", Wanted)


def test_the_routers_rules_are_written_from_the_engines() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts/gen_registry.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("module", "package"), BOTH)
def test_duplicates_reserved_names_and_overrides_follow_one_rule(
    module: Any, package: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = fresh(module)
    one.register_lazy("ours", f"{package}.nothing:here")

    def first() -> None: ...
    def second() -> None: ...
    def third() -> None: ...

    one.register("acme")(first)
    one.register("acme")(first)
    with pytest.raises(module.RegistryError, match=r"duplicate.*choose another name, or say override=True"):
        one.register("acme")(second)
    with pytest.raises(module.RegistryError, match="reserved"):
        one.register("ours")(second)
    with caplog.at_level(logging.WARNING):
        one.register("acme", override=True)(second)
    assert "overridden" in caplog.text and one.get("acme") is second
    with pytest.raises(module.RegistryError, match="overridden twice"):
        one.register("acme", override=True)(third)


@pytest.mark.parametrize(("module", "package"), BOTH)
def test_messages_name_the_call_that_registers(module: Any, package: str) -> None:
    one = fresh(module)
    one.register("acme")(lambda: None)
    with pytest.raises(module.RegistryError) as caught:
        one.get("acmee")
    for part in (
        "unknown thing 'acmee'",
        "did you mean 'acme'",
        f"@{package}.registry.things.register('acmee', api_version=1)",
        "--plugin or BRANCHLINE_PLUGINS",
        "'branchline.things'",
        "before options are built",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(("module", "package"), BOTH)
def test_conformance_versions_and_names_are_checked(module: Any, package: str) -> None:
    one = fresh(module)

    class Bad:
        def push(self) -> None: ...

    with pytest.raises(module.RegistryError, match=r"does not conform to Wanted.*misses parameter 'text'"):
        one.register("bad")(Bad)
    with pytest.raises(module.RegistryError, match="API version"):
        one.register("bad", api_version=2)(lambda: None)
    with pytest.raises(module.RegistryError, match="non-empty string"):
        one.register("")(lambda: None)
    with pytest.raises(module.RegistryError, match="must be a class or factory, not int"):
        one.register("three")(3)


@pytest.mark.parametrize(("module", "package"), BOTH)
def test_a_failing_import_is_shown_with_its_cause(
    module: Any, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"bad_{package}.py").write_text("import no_such_module_xyz\n")
    one = fresh(module)
    one.register_lazy("bad", f"bad_{package}:Bad")
    with pytest.raises(module.RegistryError, match="no_such_module_xyz"):
        one.get("bad")
    assert one.entry("bad").state == "failed" and one.names() == ()


def test_the_routers_kinds_hold_every_built_in_parser() -> None:
    tools, reasoning = router_registry.all_registries()
    assert {"hermes", "mistral", "llama3_json", "pythonic", "deepseek_v3", "json"} <= set(tools.names())
    assert set(reasoning.names()) >= {"qwen3", "deepseek_r1"}
    assert all(entry.origin.builtin for name, entry in ((e.name, e) for e in tools.entries()) if name == "hermes")
    make: Callable[..., Any] = tools.get("hermes")
    parser = make([])
    events = parser.push('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>') + parser.finish()
    assert events == [("call", "f"), ("arguments", '{"a": 1}')]
    with pytest.raises(router_registry.RegistryError, match="reserved"):
        tools.register("hermes")(lambda tools: None)


def test_the_native_message_for_an_unknown_parser_is_the_registrys() -> None:
    import branchline_router

    with pytest.raises(branchline_router.ConfigError) as native:
        branchline_router.Router(port=0, tool_call_parser="zzz")
    with pytest.raises(router_registry.RegistryError) as ours:
        router_registry.tool_parsers.get("zzz")
    assert str(ours.value) in str(native.value)


def test_the_command_line_reads_plugins_before_options() -> None:
    assert router_cli.split(["--plugin", "a", "--port", "1", "--plugin=b"], {}) == (
        ["a", "b"], [], ["--port", "1"],
    )  # fmt: skip
    assert router_cli.split(["--port", "1"], {"BRANCHLINE_PLUGINS": "a, b"}) == (["a", "b"], [], ["--port", "1"])
    assert router_cli.split(["--plugins-disable", "c"], {"BRANCHLINE_PLUGINS_DISABLE": "d"}) == ([], ["c"], [])
    listing = router_cli.listing()
    assert "tool_parsers:" in listing and "hermes  loaded  branchline-router" in listing


def test_a_plugin_named_on_the_command_line_adds_a_parser_that_options_can_name(tmp_path: Path) -> None:
    (tmp_path / "acme.py").write_text(
        "from branchline_router import registry\n"
        "@registry.reasoning_parsers.register('acme')\n"
        "class Acme:\n"
        "    def __init__(self, opened, closed): pass\n"
        "    def push(self, text): return [('text', text)]\n"
        "    def finish(self): return []\n"
    )

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "branchline_router.cli", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    listed = run("--plugin", "acme", "plugins")
    assert listed.returncode == 0 and "acme  loaded  acme -" in listed.stdout
    refused = run("--reasoning-parser", "acme", "--port", "x")
    assert refused.returncode == 2 and "unknown reasoning parser 'acme'" in refused.stderr
    taken = run("--plugin", "acme", "--reasoning-parser", "acme", "--port", "x")
    assert "reasoning" not in taken.stderr and "'x' is not a port" in taken.stderr
    missing = run("--plugin", "no_such_plugin")
    assert missing.returncode == 2 and "no_such_plugin" in missing.stderr


@pytest.mark.parametrize(("module", "package"), BOTH)
def test_a_plugin_of_an_older_version_is_told_what_changed_since(module: Any, package: str) -> None:
    changes = {2: ("push takes bytes",), 3: ("finish is gone", "close is new")}
    one = module.Registry("things", "thing", api_version=3, changes=changes)
    with pytest.raises(module.RegistryError) as caught:
        one.register("old", api_version=1)(lambda: None)
    assert str(caught.value).endswith(
        "version 2 changed: push takes bytes; version 3 changed: finish is gone, close is new"
    )
    with pytest.raises(module.RegistryError) as caught:
        one.register("older", api_version=2)(lambda: None)
    assert "version 2 changed" not in str(caught.value) and "finish is gone" in str(caught.value)
    with pytest.raises(module.RegistryError, match=r"API version 4; this is API version 3: install") as caught:
        one.register("newer", api_version=4)(lambda: None)
    assert "changed" not in str(caught.value)
    with pytest.raises(module.RegistryError, match="API version 1"):
        one.register("states_none")(lambda: None)
    one.register("new", api_version=3)(lambda: None)
    assert one.names() == ("new",) and "api_version=3" in one.unknown("x")


@pytest.mark.parametrize(("module", "package"), BOTH)
def test_what_states_its_version_itself_is_held_to_it(module: Any, package: str) -> None:
    one = module.Registry("things", "thing")

    class Newer:
        api_version = 2

    with pytest.raises(module.RegistryError, match="API version 2"):
        one.register("newer")(Newer)
    one.register_lazy("lazily", f"{__name__}:LAZY")
    with pytest.raises(module.RegistryError, match=r"'lazily' from .* API version 2"):
        one.get("lazily")


class LAZY:
    """Found by an entry point, where a version can be stated nowhere else."""

    api_version = 2
