"""EndpointSlices of a Service as a source of workers, in a network namespace of its own (see slices.py)."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.stack import Process
from tests.k8s.cluster import missing


def why_not() -> str:
    """What keeps the test from running here; empty if nothing does."""
    lacking = missing("kube-apiserver")
    if lacking:
        return lacking
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return "no unshare or ip here: apt-get install util-linux iproute2"
    tried = subprocess.run(["unshare", "-rn", "ip", "link", "set", "lo", "up"], capture_output=True, text=True)
    return f"no network namespace can be made here: {tried.stderr.strip()}" if tried.returncode else ""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("discovering")
def test_endpoints_of_a_service_are_workers_while_they_are_ready(tmp_path: Path) -> None:
    lacking = why_not()
    if lacking:
        pytest.skip(lacking)
    process = Process(["unshare", "-rn", sys.executable, "-m", "tests.k8s.discovery.slices", str(tmp_path)])
    try:
        process.wait_for_line("the router followed all slices", 360)
    finally:
        process.stop(signal.SIGTERM)
