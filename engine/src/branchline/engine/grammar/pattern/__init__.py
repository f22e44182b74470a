"""Regular expressions: read once, checked, and written for the engines that enforce them."""

from branchline.engine.grammar.pattern.parse import Pattern, parse
from branchline.engine.grammar.pattern.short import short
from branchline.engine.grammar.pattern.write import Quoting, write

__all__ = ["Pattern", "Quoting", "parse", "short", "write"]
