"""A model family of Llama's shape. Frozen: written for API version 1, never to be changed."""

from __future__ import annotations

import dataclasses
import os

from branchline.engine.model.families import llama
from branchline.engine.model.spec import ModelSpec


def note() -> None:
    """Tells the test that the plugin is in use."""
    if "ACME_NOTES" in os.environ:
        with open(os.environ["ACME_NOTES"], "a", encoding="ascii") as notes:
            notes.write("models\n")


def Plugin(config: dict[str, object]) -> ModelSpec:
    """The family AcmeForCausalLM."""
    note()
    return dataclasses.replace(llama(config), architecture="AcmeForCausalLM")
