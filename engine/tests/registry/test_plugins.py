"""Plugins from entry points and flags, in a real process each, through the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from branchline import registry
from branchline.cli import extensions
from branchline.registry import Plugins, RegistryError

from tests.cases.loader import case

SOURCE = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with an installed distribution `acme` 1.2.3, to be put on PYTHONPATH."""
    info = tmp_path / "acme-1.2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.2.3\n")
    (info / "top_level.txt").write_text("acme_cache\n")
    (info / "RECORD").write_text("")
    return tmp_path


def entry_points(site: Path, text: str) -> None:
    (site / "acme-1.2.3.dist-info" / "entry_points.txt").write_text(text)


def branchline(site: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command with the folder importable."""
    path = os.pathsep.join((str(SOURCE), str(site)))
    return subprocess.run(
        [sys.executable, "-m", "branchline.cli", *arguments],
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **env},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


CACHE = """
import sys
print("loaded acme", file=sys.stderr)
from branchline.engine.cache.reference import ReferenceCache
class AcmeCache(ReferenceCache): ...
"""


def test_seam_cli_accepts_registered(site: Path) -> None:
    """seam-cli-accepts-registered: an entry point is a choice; an unknown name lists it, and exits 2."""
    right = case("seam-cli-accepts-registered")["right"]
    assert right["results"][2].startswith("exits 2")
    (site / "acme_cache.py").write_text(CACHE)
    entry_points(site, "[branchline.radix_cache_backends]\nacme = acme_cache:AcmeCache\n")
    listed = branchline(site, "plugins")
    assert "acme" in listed.stdout and "1.2.3" in listed.stdout and listed.returncode == 0
    accepted = branchline(site, "engine", "no-such-model.gguf", "--radix-cache-backend", "acme")
    assert "no-such-model.gguf" in accepted.stderr and "radix" not in accepted.stderr
    refused = branchline(site, "engine", "m", "--radix-cache-backend", "nope")
    assert refused.returncode == 2 and "'acme'" in refused.stderr and "register('nope'" in refused.stderr
    loaded = branchline(site, "plugins", "--import")
    assert loaded.stderr.count("loaded acme") == right["plugin_loaded_in_each_process"]


def test_a_plugin_named_by_flag_or_environment_registers_before_options_are_checked(site: Path) -> None:
    (site / "mine.py").write_text(
        "from branchline import registry\nfrom branchline.engine.cache.reference import ReferenceCache\n"
        "def register():\n    registry.radix_cache_backends.register('mine')(type('Mine', (ReferenceCache,), {}))\n"
    )
    for arguments, env in ((("--plugin", "mine:register"), {}), ((), {"BRANCHLINE_PLUGINS": "mine:register"})):
        done = branchline(site, "engine", "no-such.gguf", "--radix-cache-backend", "mine", *arguments, **env)
        assert "no-such.gguf" in done.stderr and "unknown radix" not in done.stderr


def test_a_named_plugin_that_fails_is_fatal_with_its_traceback(site: Path) -> None:
    (site / "broken.py").write_text("import no_such_module_xyz\n")
    done = branchline(site, "engine", "m", "--plugin", "broken")
    assert done.returncode == 2
    for part in ("'broken'", "no_such_module_xyz", "Traceback", "broken.py"):
        assert part in done.stderr


def test_a_failing_entry_point_is_reported_and_does_not_stop_others(site: Path) -> None:
    (site / "broken.py").write_text("1 / 0\n")
    (site / "acme_cache.py").write_text(CACHE)
    entry_points(
        site,
        "[branchline.plugins]\nbad = broken\n[branchline.radix_cache_backends]\nacme = acme_cache:AcmeCache\n",
    )
    done = branchline(site, "plugins")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stdout and "broken.py" in done.stdout and "acme" in done.stdout
    refused = branchline(site, "engine", "m", "--radix-cache-backend", "nope")
    assert "ZeroDivisionError" in refused.stderr


def test_seam_override_is_visible(site: Path) -> None:
    """seam-override-is-visible: one override is shown; two of the same name fail, both named."""
    assert case("seam-override-is-visible")["right"]["two"].startswith("start fails, both named")
    for name in ("one", "two"):
        (site / f"{name}.py").write_text(
            "from branchline import registry\nfrom branchline.engine.cache.reference import ReferenceCache\n"
            f"class Cache_{name}(ReferenceCache): ...\n"
            f"registry.radix_cache_backends.register('native', override=True)(Cache_{name})\n"
        )
    shown = branchline(site, "plugins", "--plugin", "one")
    assert "overrides branchline 0.1.0" in shown.stdout and shown.returncode == 0
    both = branchline(site, "engine", "m", "--plugin", "one", "--plugin", "two")
    assert both.returncode == 2
    assert "overridden twice" in both.stderr and "one.py" in both.stderr and "two.py" in both.stderr


def test_plugins_are_loaded_once_however_often_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counted.py").write_text("calls = []\ndef register():\n    calls.append(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugins = Plugins()
    for _ in range(3):
        plugins.load(["counted:register"])
    import counted  # type: ignore[import-not-found]

    assert counted.calls == [1]
    with pytest.raises(RegistryError, match="nowhere_at_all"):
        plugins.load(["nowhere_at_all"])


def test_a_plugin_is_left_out_by_the_name_of_its_distribution_or_of_its_entry_point(
    site: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (site / "acme_cache.py").write_text("raise RuntimeError('imported')\n")
    entry_points(site, "[branchline.plugins]\nacme_all = acme_cache\n[branchline.executors]\none = acme_cache:One\n")
    monkeypatch.syspath_prepend(site)
    for given, left_out in (
        (["Acme"], {"acme_all", "one"}), (["acme-all", "one"], {"acme_all", "one"}), (["all"], {"acme_all", "one"}),
    ):  # fmt: skip
        plugins = Plugins()
        plugins.load(disable=given)
        assert {one.name for one in plugins.disabled} == left_out and not plugins.failures
        assert all(str(one.origin).startswith("acme 1.2.3") for one in plugins.disabled)
    assert "one" not in registry.executors.names() and "acme_cache" not in sys.modules and not caplog.text
    plugins = Plugins()
    plugins.load(disable=["one", "acmee"])
    assert [failure.name for failure in plugins.failures] == ["acme_all = acme_cache"]
    assert "'acmee', which no installed plugin has" in caplog.text


def test_plugins_disable_is_obeyed_and_shown_by_every_command(site: Path) -> None:
    (site / "acme_cache.py").write_text(CACHE)
    entry_points(site, "[branchline.radix_cache_backends]\nacme = acme_cache:AcmeCache\n")
    shown = branchline(site, "plugins", "--plugins-disable", "acme", "--json")
    (row,) = [one for one in json.loads(shown.stdout)["registered"] if one["name"] == "acme"]
    assert row["state"] == "disabled" and row["distribution"] == "acme" and shown.returncode == 0
    refused = branchline(site, "engine", "m", "--radix-cache-backend", "acme", BRANCHLINE_PLUGINS_DISABLE="other, acme")
    assert refused.returncode == 2 and "unknown radix cache backend 'acme'" in refused.stderr
    assert "'other', which no installed plugin has" in refused.stderr


def test_named_plugins_come_from_flag_then_environment_then_file(tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_text('plugin = ["c"]\n')
    env = {"BRANCHLINE_PLUGINS": "b, d"}
    assert extensions.named(["--plugin", "a", "--config", str(file)], env) == ["a"]
    assert extensions.named(["--config", str(file)], env) == ["b", "d"]
    assert extensions.named(["--config", str(file)], {}) == ["c"]
    assert extensions.named(["--plugin"], {}) == []
    file.write_text('plugins-disable = "d"\n')
    assert extensions.disabled(["--config", str(file)], {}) == ["d"]
    assert extensions.disabled(["--plugins-disable", "e", "--config", str(file)], {}) == ["e"]


def test_our_own_implementations_are_registered_as_builtin() -> None:
    extensions.load([], {})
    for one in registry.all_registries():
        ours = [entry for entry in one.entries() if entry.origin.builtin]
        assert ours or one.kind == "hooks", f"no built-in {one.noun}"
        assert all(Path(entry.origin.file).is_file() for entry in ours)


def test_the_registry_can_be_filled_without_importing_torch() -> None:
    code = (
        "import sys; from branchline.cli import extensions; extensions.load([], {}); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SOURCE)}, timeout=60, check=False
    )
    assert done.returncode == 0
