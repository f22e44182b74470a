#!/usr/bin/env bash
# Builds helm from the Go module pinned in helm/, once: the binary is kept by the hash of go.sum in the user's cache folder.
# Prints its path last. Exit 3: no Go here, nothing was built. BRANCHLINE_HELM names another one to use instead. usage: scripts/k8s/helm.sh [--where]
set -euo pipefail
if [ -n "${BRANCHLINE_HELM:-}" ]; then echo "$BRANCHLINE_HELM"; exit 0; fi
cd "$(dirname "$0")/helm"
cache=${XDG_CACHE_HOME:-$HOME/.cache}/branchline
helm=$cache/helm-$(sha256sum go.sum | cut -c1-16)/helm
if [ "${1:-}" = --where ]; then echo "$helm"; exit 0; fi
say() { printf '==> k8s tools: %s\n' "$*" >&2; }
if [ -x "$helm" ]; then say "helm is cached"; echo "$helm"; exit 0; fi
if ! command -v go >/dev/null; then
  say "Go is not installed: helm can't be built, and tests of the chart are skipped"
  exit 3
fi
mkdir -p "$(dirname "$helm")"
# One Go build at a time: two would need twice the memory.
exec 9>"$cache/k8s.lock"
flock 9
if [ ! -x "$helm" ]; then
  start=$SECONDS
  say "building helm (about 2 minutes on 2 idle cores, once)"
  # The version that it reports is not set, so it must be told the cluster's where it can't ask (--kube-version).
  export CGO_ENABLED=0 GOFLAGS=-buildvcs=false GOTOOLCHAIN=local
  if ! nice -n 10 go build -p 2 -trimpath -ldflags "-s -w" -o "$helm.new" helm.sh/helm/v3/cmd/helm >&2; then
    say "helm could not be built: tests of the chart are skipped"
    exit 3
  fi
  mv "$helm.new" "$helm"
  say "built helm in $((SECONDS - start)) s"
fi
echo "$helm"
