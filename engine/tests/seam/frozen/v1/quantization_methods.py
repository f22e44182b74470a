"""A quantisation method. Frozen: written for API version 1, never to be changed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from branchline.engine.model.source import LoadedModel
from branchline.engine.quantization.base import Matrix

if TYPE_CHECKING:
    import torch


def note() -> None:
    """Tells the test that the plugin is in use."""
    if "ACME_NOTES" in os.environ:
        with open(os.environ["ACME_NOTES"], "a", encoding="ascii") as notes:
            notes.write("quantization_methods\n")


class Plugin:
    """Leaves weights as they are."""

    api_version = 1
    name = "acme"
    executors = ("torch", "native", "acme")
    native_dtype = ""
    of_checkpoint = False

    def open(self, model: LoadedModel) -> LoadedModel:
        note()
        return model

    def matrix(self, weight: torch.Tensor) -> Matrix | None:
        return None
