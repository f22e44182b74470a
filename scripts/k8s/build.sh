#!/usr/bin/env bash
# Builds kube-apiserver (and kube-controller-manager, if named) from the Go modules pinned beside this script, once: binaries
# are kept by the hash of go.sum in the user's cache folder. Prints that folder last. Exit 3: no Go here, nothing was built.
# usage: scripts/k8s/build.sh [--where] [kube-apiserver] [kube-controller-manager]
set -euo pipefail
cd "$(dirname "$0")"
where=0
if [ "${1:-}" = --where ]; then where=1; shift; fi
commands=("$@")
[ ${#commands[@]} -gt 0 ] || commands=(kube-apiserver)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/branchline
bin=$cache/k8s-$(sha256sum go.sum | cut -c1-16)
if [ $where = 1 ]; then echo "$bin"; exit 0; fi

say() { printf '==> k8s tools: %s\n' "$*" >&2; }

missing=()
for command in "${commands[@]}"; do
  case $command in
    kube-apiserver | kube-controller-manager) ;;
    *) echo "'$command' is not built here; name kube-apiserver or kube-controller-manager" >&2; exit 2 ;;
  esac
  if [ -x "$bin/$command" ]; then say "$command is cached"; else missing+=("$command"); fi
done
[ ${#missing[@]} -gt 0 ] || { echo "$bin"; exit 0; }
if ! command -v go >/dev/null; then
  say "Go is not installed: ${missing[*]} can't be built, and tests against a real API server are skipped"
  exit 3
fi

mkdir -p "$bin"
# One build at a time: two would need twice the memory and compile the same packages.
exec 9>"$cache/k8s.lock"
flock 9
version=$(sed -n 's/^.*k8s\.io\/kubernetes v\([0-9.]*\).*$/\1/p' go.mod | head -n 1)
[ -n "$version" ] || { echo 'go.mod names no version of k8s.io/kubernetes' >&2; exit 1; }
package=k8s.io/component-base/version
# Unset, the server calls itself a version that its own feature gates refuse.
flags="-s -w -X $package.gitVersion=v$version -X $package.gitMajor=1 -X $package.gitMinor=$(cut -d. -f2 <<<"$version")"
flags+=" -X $package.gitTreeState=clean -X $package.gitCommit=unknown -X $package.buildDate=1970-01-01T00:00:00Z"
export CGO_ENABLED=0 GOFLAGS=-buildvcs=false GOTOOLCHAIN=local
for command in "${missing[@]}"; do
  [ ! -x "$bin/$command" ] || continue
  start=$SECONDS
  say "building $command $version (about 6 minutes on 2 idle cores, once)"
  # Each line is one compiled package: counted, so that a long build is seen to go on.
  nice -n 10 go build -v -p 2 -trimpath -ldflags "$flags" -o "$bin/.$command.new" "k8s.io/kubernetes/cmd/$command" 2>&1 |
    awk -v name="$command" '/^[A-Za-z0-9.\/_~-]+$/ { if (++n % 200 == 0) { print "==> k8s tools: " name ": " n " packages" > "/dev/stderr" } next } { print > "/dev/stderr" }'
  mv "$bin/.$command.new" "$bin/$command"
  say "built $command in $((SECONDS - start)) s"
done
echo "$bin"
