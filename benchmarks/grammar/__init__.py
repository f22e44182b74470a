"""Runners that hold the grammar compiler to JSON Schema's own tests and to real schemas."""
