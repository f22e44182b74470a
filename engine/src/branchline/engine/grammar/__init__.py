"""Constraints on output: backends, their contract, and the manager that compiles off the loop."""

from branchline.registry import grammar_backends

# In the order in which `auto` asks them.
grammar_backends.register_lazy("llguidance", "branchline.engine.grammar.guidance:GuidanceBackend")
grammar_backends.register_lazy("outlines", "branchline.engine.grammar.outlines:OutlinesBackend")
