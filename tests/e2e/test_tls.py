"""TLS on every leg of the real stack: client to gateway and gateway to engine, each end showing a certificate."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from .stack import Engine, Gateway, wait_until
from .test_serve import complete, served
from .tiny import TinyModels


@dataclass(frozen=True)
class Pair:
    """Paths of a certificate and its key."""

    cert: str
    key: str


class Authority:
    """Signs certificates for `localhost` with the system's openssl."""

    def __init__(self, folder: Path) -> None:
        tool = shutil.which("openssl")
        if tool is None:
            pytest.skip("openssl is not installed")
        self._tool, self._folder = tool, folder
        self._own = Pair(str(folder / "ca.crt"), str(folder / "ca.key"))
        self.cert = self._own.cert
        self._run("req", "-x509", *self._new_key(self._own), "-days", "2", "-subj", "/CN=authority")

    def signs(self, name: str) -> Pair:
        """A new pair, or the old one's paths with new contents."""
        made = Pair(str(self._folder / f"{name}.crt"), str(self._folder / f"{name}.key"))
        request = [*self._new_key(made), "-days", "2", "-subj", f"/CN={name}"]
        request += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-addext", "basicConstraints=CA:FALSE"]
        self._run("req", "-x509", *request, "-CA", self._own.cert, "-CAkey", self._own.key)
        return made

    @staticmethod
    def _new_key(pair: Pair) -> list[str]:
        return ["-newkey", "rsa:2048", "-nodes", "-keyout", pair.key, "-out", pair.cert]

    def _run(self, *arguments: str) -> None:
        subprocess.run([self._tool, *arguments], check=True, capture_output=True)


def client(gateway: Gateway, authority: Authority, shows: Pair | None) -> httpx.Client:
    """Speaks to the gateway over TLS and trusts the authority alone."""
    context = ssl.create_default_context(cafile=authority.cert)
    if shows is not None:
        context.load_cert_chain(shows.cert, shows.key)
    return httpx.Client(base_url=f"https://localhost:{gateway.port}", verify=context, timeout=60)


def test_a_request_goes_over_tls_all_the_way_and_strangers_are_turned_away(tiny: TinyModels, tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    worker, router, user = ours.signs("engine"), ours.signs("router"), ours.signs("user")
    server = ("--tls-cert", worker.cert, "--tls-key", worker.key, "--tls-client-ca", ours.cert)
    engine = Engine(*server, model=str(tiny.llama("plain")))
    port = engine.address.rpartition(":")[2]
    flags = ("--tls-cert-path", router.cert, "--tls-key-path", router.key, "--tls-client-ca-path", ours.cert)
    flags += ("--ca-cert-path", ours.cert, "--client-cert-path", user.cert, "--client-key-path", user.key)
    gateway = Gateway(*flags, workers=[f"grpcs://localhost:{port}"])
    try:
        with client(gateway, ours, user) as known:

            def ready() -> bool:
                try:
                    return known.get("/health", timeout=5).status_code == 200
                except httpx.TransportError:
                    return False

            wait_until(ready, 60, f"gateway ready\n{gateway.process.output}")
            body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
            answer = known.post("/generate", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["meta_info"]["completion_tokens"] == 4
        with client(gateway, ours, None) as stranger, pytest.raises(httpx.TransportError):
            stranger.get("/health")
        with httpx.Client(base_url=gateway.url) as plain, pytest.raises(httpx.TransportError):
            plain.get("/health")
    finally:
        gateway.stop()
        engine.stop()


@pytest.mark.parametrize("mutual", [False, True], ids=["tls", "client certificates too"])
def test_serve_over_tls_becomes_ready_and_says_where(tiny: TinyModels, tmp_path: Path, mutual: bool) -> None:
    ours = Authority(tmp_path)
    router, user = ours.signs("router"), ours.signs("user")
    flags = ("--tls-cert-path", router.cert, "--tls-key-path", router.key)
    flags += ("--tls-client-ca-path", ours.cert) if mutual else ()
    with served(str(tiny.llama("plain")), *flags) as (plain, process):
        assert f"curl https://127.0.0.1:{plain.base_url.port}/" in process.output
        context = ssl.create_default_context(cafile=ours.cert)
        if mutual:
            context.load_cert_chain(user.cert, user.key)
        with httpx.Client(base_url=f"https://localhost:{plain.base_url.port}", verify=context, timeout=60) as known:
            # Without a certificate of ours to show, `serve` can only see that the gateway listens.
            wait_until(lambda: known.get("/readiness").status_code == 200, 60, f"ready\n{process.output}")
            assert complete(known)
