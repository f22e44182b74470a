#!/usr/bin/env bash
# Builds both wheels into target/wheels, from the same target folder as everything else. Needs no network after setup.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-target/wheels}
start=$SECONDS
say() { printf '==> [%4ds] %s\n' $((SECONDS - start)) "$*"; }
mkdir -p "$out"
rm -f "$out"/branchline-*.whl "$out"/branchline_router-*.whl
for package in engine/native bindings/python; do
  say "building the wheel of $package"
  .venv/bin/maturin build --release --locked -m "$package/Cargo.toml" --out "$out"
done
say "done:"
ls -l "$out"/*.whl
