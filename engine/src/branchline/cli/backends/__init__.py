"""Serve backends: programs that `branchline serve` may run behind its gateway, ours among them.

Registers lazily; imports no backend before it is asked for.
"""

from branchline import registry
from branchline.cli.backends.base import Ask, Command, Detection, ServeBackend

__all__ = ["Ask", "Command", "Detection", "ServeBackend"]

for _name, _target in (
    ("branchline", "own:OwnEngine"),
    ("llama-server", "llama:LlamaServer"),
    ("vllm", "vllm:Vllm"),
):
    registry.serve_backends.register_lazy(_name, f"branchline.cli.backends.{_target}", api_version=1)
