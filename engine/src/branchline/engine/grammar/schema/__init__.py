"""JSON Schema → a grammar that accepts exactly its values, or a refusal that names keyword and pointer."""

from branchline.engine.grammar.schema.compile import Compiled, SchemaOptions, compile_schema

__all__ = ["Compiled", "SchemaOptions", "compile_schema"]
