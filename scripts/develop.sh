#!/usr/bin/env bash
# Makes the two packages importable from the clone: the built libraries go beside their Python sources,
# a .pth file and entry points into .venv. Quick; needs no network.
set -euo pipefail
cd "$(dirname "$0")/.."
place() { cmp -s "$1" "$2" || install -m 755 "$1" "$2"; }
place target/release/libbranchline_native.so engine/src/branchline/_native.abi3.so
place target/release/libbranchline_router_native.so bindings/python/python/branchline_router/_native.abi3.so
.venv/bin/python scripts/develop.py
