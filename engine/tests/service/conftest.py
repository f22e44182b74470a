"""Certificates for the mutual TLS tests, made by openssl."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Certificates:
    """A self-signed certificate that is its own authority."""

    cert: str
    key: str

    @staticmethod
    def read(path: str) -> bytes:
        """A file's bytes."""
        return Path(path).read_bytes()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """For `localhost`."""
    tool = shutil.which("openssl")
    if tool is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    made = Certificates(str(folder / "cert.pem"), str(folder / "key.pem"))
    command = [tool, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", made.key, "-out", made.cert]
    subprocess.run(command, check=True, capture_output=True)
    return made
