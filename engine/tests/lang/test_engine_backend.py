"""`Engine`: what it starts, how it says that it could not, that it leaves nothing behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from branchline import lang as bl
from branchline.lang.backends import engine


def test_options_become_flags() -> None:
    assert engine._flags({"workers": 2, "log_level": "warn", "access_log": True, "offline": False}) == [
        "--workers", "2", "--log-level", "warn", "--access-log", "--no-offline",
    ]  # fmt: skip


def test_an_address_cannot_be_chosen() -> None:
    with pytest.raises(bl.ArgumentError, match="leave host and port out"):
        bl.Engine("model.gguf", port=8080)


def test_a_model_that_is_not_there_is_said_with_the_servers_own_words(tmp_path: Path) -> None:
    missing = tmp_path / "missing.gguf"
    with pytest.raises(bl.BackendError, match=r"ended with code \d+") as failed:
        bl.Engine(str(missing))
    assert str(missing) in str(failed.value)


def test_a_server_that_never_serves_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\necho only this\nexec sleep 600\n")
    silent.chmod(0o755)
    started: list[int] = []
    spawn = engine._spawn

    async def instead(command: list[str], log: object) -> object:
        process = await spawn([str(silent)], log)
        started.append(process.pid)
        return process

    monkeypatch.setattr(engine, "_spawn", instead)
    with pytest.raises(bl.BackendError, match=r"did not serve in time:\nonly this"):
        bl.Engine("model.gguf", startup_timeout_s=1.0)
    assert sys.platform != "linux" or not os.path.exists(f"/proc/{started[0]}")
