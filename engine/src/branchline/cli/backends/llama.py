"""The serve backend `llama-server`: llama.cpp's server as an HTTP worker, for GGUF files."""

from __future__ import annotations

import os
from pathlib import Path

from branchline.cli.backends.base import Ask, Command, Detection, answers, program

ENV = "BRANCHLINE_LLAMA_SERVER_BIN"
SLOTS = 4  # where a context length is given and max-running-requests is not


class LlamaServer:
    """`llama-server -m FILE`. Its context is shared by its slots, ours is a request's."""

    api_version = 1
    scheme = "http"
    announces = False
    options = ("context_length", "max_running_requests", "served_model_name", "threads")

    def detect(self, model: str) -> Detection:
        """A GGUF file, and the program."""
        found = program("llama-server", ENV, os.environ)
        if found is None:
            return Detection(0.0, f"llama-server is not on PATH, nor named in {ENV}")
        if not model.startswith("pypi:") and not Path(model).expanduser().is_file():
            return Detection(0.0, "llama-server serves GGUF files and this is none on this machine")
        if not model.startswith("pypi:") and not model.endswith(".gguf"):
            return Detection(0.0, "llama-server serves GGUF files and this is none")
        return Detection(0.5, f"a GGUF file, and {found}")

    def launch(self, ask: Ask) -> Command:
        """Raises LoadError for a package without a GGUF file."""
        from branchline.engine.model.load import resolve

        words = [program("llama-server", ENV, os.environ) or "llama-server", "-m", str(resolve(ask.model))]
        words += ["--host", ask.host, "--port", str(ask.port), "--alias", ask.name]
        if ask.threads:
            words += ["-t", str(ask.threads)]
        slots, length = ask.given.get("max_running_requests"), ask.given.get("context_length")
        if length is not None:
            slots = slots or SLOTS
            words += ["-c", str(int(str(length)) * int(str(slots)))]
        if slots is not None:
            words += ["-np", str(slots)]
        return Command((*words, *ask.arguments))

    def health(self, url: str) -> bool:
        """It answers 503 while it loads."""
        return answers(url + "/health")
