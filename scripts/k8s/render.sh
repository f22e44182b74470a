#!/usr/bin/env bash
# Renders deploy/k8s/manifests from the chart, one file for each of deploy/k8s/examples; --check only compares.
set -euo pipefail
cd "$(dirname "$0")/../.."
helm=$(scripts/k8s/helm.sh)
stale=0
for values in deploy/k8s/examples/*.yaml; do
  name=$(basename "$values")
  target=deploy/k8s/manifests/$name
  text=$(printf '# Rendered from deploy/k8s/chart with deploy/k8s/examples/%s by scripts/k8s/render.sh; do not edit.\n' "$name"
    "$helm" template branchline deploy/k8s/chart --namespace branchline --kube-version 1.37.0 --no-hooks -f "$values")
  if [ "${1:-}" != --check ]; then
    printf '%s\n' "$text" >"$target"
  elif [ "$text" != "$(cat "$target" 2>/dev/null)" ]; then
    echo "$target is stale: run scripts/k8s/render.sh" >&2
    stale=1
  fi
done
exit $stale
