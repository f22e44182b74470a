"""The serve backend `branchline`: our own engine, reached over gRPC."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit

from branchline.cli.backends.base import Ask, Command, Detection
from branchline.engine import options as tables
from branchline.engine.config import EngineConfig
from branchline.engine.errors import EngineError


class OwnEngine:
    """`branchline engine`."""

    api_version = 1
    scheme = "grpc"
    announces = True
    options = tuple(row.name for row in tables.table(EngineConfig))

    def detect(self, model: str) -> Detection:
        """A local checkpoint is read as far as its header; others are taken to be servable."""
        if not model.startswith("pypi:") and not Path(model).expanduser().exists():
            return Detection(0.6, "the model is not on this machine; the engine fetches it and knows its family then")
        from branchline.engine.encoder import is_encoder
        from branchline.engine.model.load import inspect_model, resolve

        try:
            if is_encoder(resolve(model)):
                return Detection(1.0, "our engine embeds and ranks with models of this family")
            found = inspect_model(model)
        except EngineError as error:
            return Detection(0.0, error.message)
        if found.spec.fallback:
            return Detection(0.2, f"our engine has no family for {found.spec.architecture}: slowly, by transformers")
        return Detection(1.0, f"our engine has {found.spec.architecture}")

    def launch(self, ask: Ask) -> Command:
        """Its option line is the launcher's."""
        words = [sys.executable, "-m", "branchline.cli", "engine", ask.model, *ask.arguments]
        words += [f"--host={ask.host}", f"--port={ask.port}"]
        return Command((*words, f"--threads={ask.threads}") if ask.threads else tuple(words))

    def health(self, url: str) -> bool:
        """Whether it listens; the gateway asks for more."""
        place = urlsplit(url)
        try:
            with socket.create_connection((place.hostname, place.port), timeout=5):
                return True
        except OSError:
            return False
