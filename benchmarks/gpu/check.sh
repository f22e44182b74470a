#!/usr/bin/env bash
# Checks the torch executor on whatever GPU, torch and packages are at hand. Needs no network and changes nothing.
# usage: benchmarks/gpu/check.sh [--dry] [--out FILE.json]      --dry runs tiny shapes on the CPU
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="${PYTHON:-}"
if [[ -z "$python" ]]; then
  python="$root/.venv/bin/python"
  [[ -x "$python" ]] || python="$(command -v python3)"
fi
export PYTHONPATH="$root/engine/src${PYTHONPATH:+:$PYTHONPATH}"
exec timeout 360 "$python" "$root/benchmarks/gpu/check.py" "$@"
