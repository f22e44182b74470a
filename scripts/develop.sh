#!/usr/bin/env bash
# Makes the two packages importable from the clone: the built libraries go beside their Python sources,
# a .pth file and entry points into .venv. Quick; needs no network.
set -euo pipefail
cd "$(dirname "$0")/.."
so=engine/src/branchline/_native.abi3.so
cmp -s target/release/libbranchline_native.so "$so" || install -m 755 target/release/libbranchline_native.so "$so"
.venv/bin/python scripts/develop.py
