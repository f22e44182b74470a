"""helm, once for all tests of the chart."""

from __future__ import annotations

import pytest

from .helm import Helm, find


@pytest.fixture(scope="session")
def helm() -> Helm:
    return find()
