"""The gRPC service of one worker: proto/branchline/engine/v1/engine.proto on top of the step loop.

Owns the edge: validation, streams, authentication, health. Must not schedule nor touch the model. Importing
this package loads nothing.
"""
