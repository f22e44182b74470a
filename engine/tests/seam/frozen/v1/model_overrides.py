"""A provider of model overrides. Frozen: written for API version 1, never to be changed."""

from __future__ import annotations

import os
from collections.abc import Mapping

from branchline.engine.overrides.base import ModelFacts


def note() -> None:
    """Tells the test that the plugin is in use."""
    if "ACME_NOTES" in os.environ:
        with open(os.environ["ACME_NOTES"], "a", encoding="ascii") as notes:
            notes.write("model_overrides\n")


class Plugin:
    """Wishes of one checkpoint."""

    api_version = 1
    architectures = ()

    def applies(self, facts: ModelFacts) -> bool:
        return facts.context_length == 2048

    def options(self, facts: ModelFacts) -> Mapping[str, object]:
        note()
        return {"max_running_requests": 32}
