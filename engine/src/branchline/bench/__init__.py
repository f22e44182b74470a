"""`branchline bench`: a client that measures any OpenAI-compatible server; knows nothing of engines or gateways.

`options` is its table, `workload` what is sent, `client` how, `measure` what came of it, `plot` the picture.
"""
