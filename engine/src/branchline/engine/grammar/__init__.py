"""Constraints on output: backends, their contract, and the manager that compiles off the loop."""

from branchline.registry import grammar_backends

grammar_backends.register_lazy("llguidance", "branchline.engine.grammar.guidance:GuidanceBackend")
