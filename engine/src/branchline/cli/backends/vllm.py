"""The serve backend `vllm`: `vllm serve` as an HTTP worker, for Hugging Face folders and hub ids."""

from __future__ import annotations

import os
from pathlib import Path

from branchline.cli.backends.base import Ask, Command, Detection, answers, program

ENV = "BRANCHLINE_VLLM_BIN"
_FLAGS = {"context_length": "--max-model-len", "max_running_requests": "--max-num-seqs", "dtype": "--dtype"}


class Vllm:
    """`vllm serve MODEL`."""

    api_version = 1
    scheme = "http"
    announces = False
    options = (*_FLAGS, "served_model_name")

    def detect(self, model: str) -> Detection:
        """A folder with a config.json or a hub id, and the program."""
        found = program("vllm", ENV, os.environ)
        if found is None:
            return Detection(0.0, f"vllm is not on PATH, nor named in {ENV}")
        path = Path(model).expanduser()
        if model.startswith("pypi:") or path.is_file():
            return Detection(0.0, "vllm serves Hugging Face folders and hub ids and this is neither")
        if path.is_dir() and not (path / "config.json").is_file():
            return Detection(0.0, "the folder has no config.json")
        return Detection(0.4, f"a Hugging Face {'folder' if path.is_dir() else 'hub id'}, and {found}")

    def launch(self, ask: Ask) -> Command:
        """All names that the model was given are served."""
        names = ask.given.get("served_model_name") or (ask.name,)
        words = [program("vllm", ENV, os.environ) or "vllm", "serve", ask.model, "--host", ask.host]
        words += ["--port", str(ask.port), "--served-model-name", *(names if isinstance(names, tuple) else (ask.name,))]
        for name, flag in _FLAGS.items():
            if name in ask.given:
                words += [flag, str(ask.given[name])]
        return Command((*words, *ask.arguments))

    def health(self, url: str) -> bool:
        """It listens once the model is loaded."""
        return answers(url + "/health")
