"""Branchline: serves language models along the prefixes their requests share.

Importing this package loads neither torch nor gRPC; `branchline.cli` and `branchline.engine` do on demand.
"""

__version__ = "0.1.0"
