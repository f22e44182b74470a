"""One real API server for all tests of a session; where it can't be had the tests say why and are skipped."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.e2e.stack import BIN
from tests.e2e.tiny import tiny  # noqa: F401  (a fixture)
from tests.k8s.cluster import missing

from .plane import Door, Plane, Space
from .pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """HTTP workers at every loopback address."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def discovering() -> None:
    """Skips where the router was built without a Kubernetes client; `make test` builds it whole."""
    command = [str(BIN / "branchline-router"), "--service-discovery", "--selector", "a=b", "--port", "0"]
    lost = {**os.environ, "KUBECONFIG": "/nonexistent", "KUBERNETES_SERVICE_HOST": ""}
    told = subprocess.run(command, env=lost, capture_output=True, text=True, timeout=60)
    if "has no Kubernetes client" in told.stderr + told.stdout:
        pytest.skip("this router was built without discovery: cargo build --features branchline-gateway/whole")


@pytest.fixture(scope="session")
def plane(discovering: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    """A running API server."""
    lacking = missing("kube-apiserver")
    if lacking:
        pytest.skip(lacking)
    plane = Plane(tmp_path_factory.mktemp("plane"))
    yield plane
    plane.close()


@pytest.fixture
def space(plane: Plane) -> Space:
    """A namespace of its own."""
    return plane.space()


@pytest.fixture
def door(plane: Plane) -> Iterator[Door]:
    """A door before the API server."""
    door = Door(plane.url)
    yield door
    door.close()
