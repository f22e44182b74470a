"""Settings of every Python test that must hold before torch is imported."""

from __future__ import annotations

import os

# Waiting threads that spin stall each other when tests share the cores with anything else.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
