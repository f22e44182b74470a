"""What a serve backend is: it says whether it can serve a model, how it is started, and whether it is well.

Owns the contract and what HTTP programs have in common. A backend starts nothing itself: the launcher runs what it
says, relays its output, restarts it and stops it.
"""

from __future__ import annotations

import http.client
import shutil
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Detection:
    """Whether a backend can serve a model here. `confidence` 0: it can't; 1: it surely can. `reason` is for people."""

    confidence: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What is to be started. `port` 0: a free one, which the program tells in its ready line (only ours does)."""

    model: str
    name: str  # what requests call the model
    host: str
    port: int
    threads: int  # 0: the program's own choice
    given: Mapping[str, object] = field(default_factory=dict)  # engine options that the user gave, by name
    arguments: tuple[str, ...] = ()  # from --backend-arg, as they are; for our engine its whole option line


@dataclass(frozen=True, slots=True)
class Command:
    """A command line and what it needs in its environment beyond the launcher's own."""

    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


class ServeBackend(Protocol):
    """Made without arguments, once a `branchline serve`.

    `scheme` is how the gateway speaks to it: grpc for what speaks the engine contract, else http. `announces` says
    that it prints our engine's ready line. `options` are the engine options that it understands, by name.
    """

    api_version: int
    scheme: str
    announces: bool
    options: tuple[str, ...]

    def detect(self, model: str) -> Detection:
        """Whether it could serve the model on this machine. Must be quick, download nothing and not raise."""

    def launch(self, ask: Ask) -> Command:
        """How one worker is started. Raises LoadError if it can't be."""

    def health(self, url: str) -> bool:
        """Whether the worker there takes requests now. Must return within seconds."""


def program(name: str, variable: str, env: Mapping[str, str]) -> str | None:
    """A program's path: what the variable names, else the one on PATH."""
    return env.get(variable) or shutil.which(name, path=env.get("PATH"))


def answers(url: str) -> bool:
    """Whether GET answers 200. Whoever asks for a client's certificate counts as answering: we have none."""
    unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # its certificate names what clients use, not loopback
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=unverified))
    opener = urllib.request.build_opener(*handlers)  # loopback is never behind a proxy
    try:
        with opener.open(url, timeout=5) as answer:
            return int(answer.status) == 200
    except ssl.SSLError:
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)
    except (OSError, http.client.HTTPException):  # nobody, or somebody of another protocol
        return False
