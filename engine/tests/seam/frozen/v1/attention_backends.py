"""An attention backend. Frozen: written for API version 1, never to be changed."""

from __future__ import annotations

import os

import torch
from branchline.engine.attention.base import AttentionShape
from branchline.engine.attention.reference import ReferenceAttention


def note() -> None:
    """Tells the test that the plugin is in use."""
    if "ACME_NOTES" in os.environ:
        with open(os.environ["ACME_NOTES"], "a", encoding="ascii") as notes:
            notes.write("attention_backends\n")


class Acme(ReferenceAttention):
    """The plain one."""


def Plugin(shape: AttentionShape, device: torch.device) -> Acme:
    """One a model."""
    note()
    return Acme(shape, device)
