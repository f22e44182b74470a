"""The router wheel, built, installed into an empty environment and used there."""

from __future__ import annotations

import importlib.metadata
import signal
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.wheels.building import ROOT, VERSION, build, check_stub, install, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

PROGRAM = """
import asyncio, os, threading, urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import branchline_router as b

class Fake(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200); self.send_header("content-length", "2"); self.end_headers(); self.wfile.write(b"{}")
    do_GET = do_POST = answer
    def log_message(self, *_): pass

fake = ThreadingHTTPServer(("127.0.0.1", 0), Fake)
threading.Thread(target=fake.serve_forever, daemon=True).start()
urls = [f"http://127.0.0.1:{fake.server_port}"]

def post(url):
    for _ in range(200):
        try:
            return urllib.request.urlopen(url + "/v1/completions", data=b'{"prompt":"x"}').read()
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            threading.Event().wait(0.05)

options = dict(port=0, worker_urls=urls, policy=b.PolicyType.ROUND_ROBIN, log_level="off")
with b.Router(**options) as router:
    assert post(router.url) == b"{}"
    try:
        router.start(); raise SystemExit("started twice")
    except b.StateError:
        pass
    taken = int(router.url.rsplit(":", 1)[1])
    try:
        b.Router(port=taken, log_level="off").start(); raise SystemExit("took a port in use")
    except b.StartError as error:
        assert "in use" in str(error), error
    child = os.fork()
    if child == 0:
        try:
            router.stop()
        except b.ForkError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
assert router.url is None
router.stop()
try:
    b.Router(prot=1); raise SystemExit("took an unknown option")
except b.ConfigError as error:
    assert "did you mean 'port'" in str(error), error

async def main():
    async with b.Router(**options) as router:
        assert await asyncio.to_thread(post, router.url) == b"{}"
asyncio.run(main())
print("ok")
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an empty environment with the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = build("bindings/python", folder)
    assert wheel.name.startswith(f"branchline_router-{VERSION}-cp311-abi3-")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".pyc")]
    return install(wheel, folder / "env")


@pytest.fixture(scope="module")
def site(environment: Path) -> Path:
    (found,) = environment.parent.glob("lib/python3*/site-packages")
    return found


def test_router_starts_serves_and_stops_in_every_form(environment: Path) -> None:
    done = run(environment / "python", "-W", "error", "-c", PROGRAM, cwd=environment, LANG="C")
    assert done.stdout.strip() == "ok", done.stderr


def test_console_script_is_the_binary(environment: Path) -> None:
    script = environment / "branchline-router"
    assert run(script, "--version", LANG="C").stdout == f"branchline-router {VERSION}\n"
    assert "--worker-urls" in run(script, "--help", LANG="C").stdout
    assert "did you mean '--port'" in run(script, "--prot", "1", code=2, LANG="C").stderr


def test_console_script_serves_until_a_signal_and_leaves_with_zero(environment: Path) -> None:
    command = [str(environment / "branchline-router"), "--port", "0", "--log-level", "info"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "http://127.0.0.1:" in line:
                break
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        assert process.wait(60) == 0


def test_the_wheels_router_builds_and_runs_middleware(environment: Path, tmp_path: Path) -> None:
    script, module = environment / "branchline-router", tmp_path / "noop.wasm"
    run(script, "wasm", "build", ROOT / "examples/middleware/noop/noop.wat", "-o", module, LANG="C")
    assert '"action": "continue"' in run(script, "wasm", "test", module, LANG="C").stdout


def test_wheel_carries_licence_notices_stub_and_marker(site: Path) -> None:
    (info,) = site.glob("branchline_router-*.dist-info")
    assert importlib.metadata.Distribution.at(info).version == VERSION
    names = {path.name for path in info.rglob("*")}
    assert {"LICENSE", "THIRD_PARTY_NOTICES.md"} <= names
    files = {path.name for path in (site / "branchline_router").iterdir()}
    assert {"py.typed", "_native.pyi", "_native.abi3.so", "_options.py"} <= files


def test_stub_of_the_native_module_says_what_was_built(site: Path) -> None:
    check_stub("branchline_router._native", site)
