"""What every serve backend must do: say whether it can serve, quickly and without raising, and word a launch."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable

from branchline.cli.backends import Ask, ServeBackend

MODELS = ("no-such.gguf", "org/name", "pypi:no-such-package", "", "/")


def detection_answers_for_any_model_with_a_reason(make: Callable[[], ServeBackend]) -> None:
    """From 0 to 1, the same when asked again; a model that is nowhere raises nothing."""
    backend = make()
    for model in MODELS:
        found = backend.detect(model)
        assert math.isfinite(found.confidence) and 0 <= found.confidence <= 1, f"{found.confidence} for {model!r}"
        assert found.reason, f"no reason for {model!r}"
        assert backend.detect(model) == found


def a_launch_is_told_model_and_port(make: Callable[[], ServeBackend]) -> None:
    """And what the user handed through."""
    backend = make()
    assert backend.scheme in ("grpc", "http")
    ask = Ask(model="org/name", name="name", host="127.0.0.1", port=18999, threads=1, arguments=("--handed",))
    if backend.detect(ask.model).confidence > 0:
        words = " ".join(backend.launch(ask).words)
        assert "org/name" in words and "18999" in words and "--handed" in words


def nobody_is_not_well(make: Callable[[], ServeBackend]) -> None:
    """A port where nobody listens."""
    backend = make()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # bound and not listening
        assert not backend.health(f"{backend.scheme}://127.0.0.1:{probe.getsockname()[1]}")


CHECKS = (detection_answers_for_any_model_with_a_reason, a_launch_is_told_model_and_port, nobody_is_not_well)
