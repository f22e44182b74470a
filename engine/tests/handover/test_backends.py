"""Every transfer backend that is installed moves bytes and says when it can't; a missing one is refused in words."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator

import pytest
from branchline import registry
from branchline.engine.errors import LoadError
from branchline.engine.handover import KvTransferBackend, TransferContext, TransferFailed, build_backends

PIECE = 1 << 16
CONTEXT = TransferContext("127.0.0.1", 4 * PIECE, PIECE, timeout_s=10)
NIXL = ["nixl", "nixl_cu12", "nixl_cu13"]
INSTALLED = {
    "stream": True,
    "mooncake": importlib.util.find_spec("mooncake") is not None,
    "nixl": any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13")),
}


@pytest.fixture(params=sorted(INSTALLED))
def two(request: pytest.FixtureRequest) -> Iterator[tuple[KvTransferBackend, KvTransferBackend]]:
    """A sender and a puller of one kind."""
    if not INSTALLED[request.param]:
        pytest.skip(f"{request.param} is not installed")
    pair = tuple(build_backends(request.param, CONTEXT)[request.param] for _ in range(2))
    yield pair
    for one in pair:
        one.close()
        one.close()


def test_bytes_come_over_as_they_were(two: tuple[KvTransferBackend, KvTransferBackend]) -> None:
    sender, puller = two
    for size in (1, 4096, PIECE):
        data = os.urandom(size)
        payload = sender.hold(data)
        assert payload is not None
        assert puller.fetch(sender.address, payload, size) == data
        sender.drop(payload)


def test_what_is_held_is_bounded_and_free_again_once_dropped(two: tuple[KvTransferBackend, KvTransferBackend]) -> None:
    sender, puller = two
    for _ in range(3):
        held = []
        while (payload := sender.hold(os.urandom(PIECE))) is not None:
            held.append(payload)
        assert len(held) == 4
        for payload in held:
            assert len(puller.fetch(sender.address, payload, PIECE)) == PIECE
            sender.drop(payload)


def test_a_peer_that_is_gone_is_a_failed_transfer(two: tuple[KvTransferBackend, KvTransferBackend]) -> None:
    sender, puller = two
    if sender.inline:
        pytest.skip("its bytes are in the message")
    with pytest.raises(TransferFailed):
        puller.fetch("127.0.0.1:1" if ":" in sender.address else "bm9ib2R5", b"\0" * 16, 0)
    payload = sender.hold(b"x")
    assert payload is not None
    with pytest.raises(TransferFailed):
        puller.fetch(sender.address, payload, PIECE)
    with pytest.raises(TransferFailed):
        puller.fetch(sender.address, b"short", 1)


@pytest.mark.parametrize(("name", "modules"), [("mooncake", ["mooncake.engine"]), ("nixl", NIXL)])
def test_a_backend_that_is_not_installed_is_refused_and_the_words_say_what_to_do(
    name: str, modules: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.setitem(sys.modules, f"{module}._api", None)
    with pytest.raises(LoadError, match=r"install .* or use --kv-transfer-backend stream"):
        build_backends(name, CONTEXT)


def test_auto_goes_without_mooncake_if_it_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    made = build_backends("auto", CONTEXT)
    assert list(made) == ["stream"]


def test_the_built_in_backend_is_always_offered_and_last() -> None:
    assert list(build_backends("stream", CONTEXT)) == ["stream"]
    if INSTALLED["mooncake"]:
        made = build_backends("auto", CONTEXT)
        assert list(made) == ["mooncake", "stream"]
        for one in made.values():
            one.close()


def test_a_plugin_may_bring_a_backend() -> None:
    with pytest.raises(registry.RegistryError, match="unknown kv transfer backend 'acme'"):
        build_backends("acme", CONTEXT)
