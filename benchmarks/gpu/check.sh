#!/usr/bin/env bash
# Checks kernels and executor on the GPU, torch and Triton at hand: one command, under six minutes, no network.
# usage: benchmarks/gpu/check.sh [--dry] [--out FILE.json]
#   --dry  small shapes on the CPU, kernels in Triton's interpreter: what can be rehearsed without a GPU
#   PYTHON names the interpreter (3.11 to 3.13); else .venv's, else python3
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="${PYTHON:-}"
if [[ -z "$python" ]]; then
  python="$root/.venv/bin/python"
  [[ -x "$python" ]] || python="$(command -v python3)"
fi
export PYTHONPATH="$root:$root/engine/src${PYTHONPATH:+:$PYTHONPATH}"
export TRITON_DEFAULT_FP_FUSION=1
limit=355
for argument in "$@"; do
  # A rehearsal counts its own work, not the clock: a busy machine makes it late, not incomplete.
  if [[ "$argument" == --dry ]]; then export TRITON_INTERPRET=1 OMP_NUM_THREADS=1 limit=1200; fi
done
exec timeout "$limit" "$python" -m benchmarks.gpu.check "$@"
