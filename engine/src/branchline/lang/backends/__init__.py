"""Backends of the language, each in its own module; vendors' packages are imported when a backend is made."""
