"""Stubs of proto/branchline/engine/v1/engine.proto, written by scripts/gen_proto.py. Do not edit."""
