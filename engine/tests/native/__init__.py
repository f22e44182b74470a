"""Tests of the native module through Python."""
