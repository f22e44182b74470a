"""The router wheel, built, installed into an empty environment and used there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

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
    build = [sys.executable, "-m", "maturin", "build", "--release", "--quiet", "--out", str(folder)]
    subprocess.run(build, cwd=ROOT / "bindings/python", check=True, timeout=1200)
    (wheel,) = folder.glob("branchline_router-*-cp311-abi3-*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True, timeout=120)
    pip = [str(folder / "env/bin/python"), "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(wheel)]
    subprocess.run(pip, check=True, timeout=120)
    return folder / "env/bin"


@pytest.mark.slow
def test_router_starts_serves_and_stops_in_every_form(environment: Path) -> None:
    done = subprocess.run(
        [str(environment / "python"), "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "ok"), done.stderr


@pytest.mark.slow
def test_console_script_is_the_binary(environment: Path) -> None:
    script = str(environment / "branchline-router")
    shown = subprocess.run([script, "--help"], capture_output=True, text=True, timeout=30, check=True)
    assert "--worker-urls" in shown.stdout
    refused = subprocess.run([script, "--prot", "1"], capture_output=True, text=True, timeout=30, check=False)
    assert refused.returncode == 2
    assert "did you mean 'port'" in refused.stderr


@pytest.mark.slow
def test_wheel_carries_licence_notices_stub_and_marker(environment: Path) -> None:
    site = next((environment.parent / "lib").glob("python3*/site-packages"))
    (info,) = site.glob("branchline_router-*.dist-info")
    names = {path.name for path in info.rglob("*")}
    assert {"LICENSE", "THIRD_PARTY_NOTICES.md"} <= names
    assert {"py.typed", "_native.pyi", "_options.py"} <= set(os.listdir(site / "branchline_router"))
