"""The script that loads middleware into gateways: which key it shows, whom it asks, how it ends.

Only `branchline-router wasm push` is stood in for, by a program that notes what it was given.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from .helm import VALUES, Helm, pick

KEYS = "# ops\nuser u-key\nadmin sha256:00ff\nadmin  the-key\nadmin other\n"


def load(helm: Helm, folder: Path, host: str, keys: str | None, status: int = 0, **environment: str) -> tuple[int, str]:
    """Exit status of the script and what the stand-in noted: key and words of each call."""
    script = pick(helm.objects("-f", VALUES / "everything.yaml"), "ConfigMap", "-wasm")["data"]["load.sh"]
    if keys is not None:
        (folder / "keys").write_text(keys)
    tool = folder / "branchline-router"
    tool.write_text(f'#!/bin/sh\necho "${{BRANCHLINE_API_KEY:-none}} $*" >> {folder}/noted\nexit {status}\n')
    tool.chmod(0o755)
    (folder / "sleep").symlink_to("/bin/true")  # tries follow at once
    script = script.replace("/etc/branchline/keys/keys", str(folder / "keys"))
    done = subprocess.run(
        ["sh", "-c", script, "load.sh", host],
        env={"PATH": f"{folder}:/usr/bin:/bin", **environment}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done.returncode, (folder / "noted").read_text()


@pytest.mark.parametrize(
    ("keys", "environment", "key"),
    [
        (KEYS, {}, "the-key"),
        ("bare-key\n", {}, "bare-key"),
        ("admin sha256:00ff\nuser u\n", {}, "none"),
        (None, {}, "none"),
        (KEYS, {"BRANCHLINE_API_KEY": "given"}, "given"),
        (KEYS, {"BRANCHLINE_ROUTER_ADMIN_API_KEY": "admins"}, "admins"),
    ],
)
def test_the_first_admins_key_in_plain_is_shown(
    helm: Helm, tmp_path: Path, keys: str | None, environment: dict[str, str], key: str
) -> None:
    status, noted = load(helm, tmp_path, "10.0.0.7", keys, **environment)
    assert status == 0
    assert noted.splitlines() == [
        f'{key} wasm push /modules/gate.wasm --name gate --settings {{"order":5}} --url http://10.0.0.7:8081',
        f"{key} wasm push /modules/canary.wasm --name canary --settings {{}} --url http://10.0.0.7:8081",
    ]


def test_an_ipv6_address_is_put_in_brackets(helm: Helm, tmp_path: Path) -> None:
    assert "--url http://[::1]:8081" in load(helm, tmp_path, "::1", None)[1]


def test_a_name_leads_to_its_addresses(helm: Helm, tmp_path: Path) -> None:
    noted = load(helm, tmp_path, "localhost", None)[1]
    assert "localhost" not in noted and ("http://127.0.0.1:8081" in noted or "http://[::1]:8081" in noted)


def test_a_module_that_cannot_be_loaded_fails_the_job_after_thirty_tries(helm: Helm, tmp_path: Path) -> None:
    status, noted = load(helm, tmp_path, "10.0.0.7", None, status=1)
    assert status == 1 and len(noted.splitlines()) == 30
