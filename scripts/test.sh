#!/usr/bin/env bash
# Lint, then all tests that this machine can run. The last line is pytest's own.
#
# Without arguments in parts, a run of pytest each: what shares nothing on two workers, unit tests
# first, while what a cluster needs is built; then what needs the machine for itself. The last line
# is that of the last part; it exits with 1 if any part failed. Arguments are for pytest, which then
# runs once.
set -uo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
failed=()

skip() { printf 'test: skipped: %s\n' "$*"; }

part() {
    echo "test: pytest $*"
    .venv/bin/python -m pytest "$@" || failed+=("pytest $*")
}

# What the test cluster needs: nothing is done for what is there. The tests go first.
tools=${XDG_CACHE_HOME:-$HOME/.cache}/minisgl/cluster-tools
mkdir -p "${tools%/*}"
build() {
    if [ -z "${CLUSTER_TOOLS:-}" ] && command -v go >/dev/null; then
        # Without root or containerd only the API server is needed.
        parts=()
        [ "$(id -u)" = 0 ] && command -v containerd >/dev/null || parts=(etcd k8s helm crds)
        nice -n 19 bash tests/cluster/build_tools.sh "$tools" "${parts[@]}" || return 1
    fi
    # Where there can be no cluster, its tests say why.
    [ $# -gt 0 ] || nice -n 19 .venv/bin/python -m tests.cluster images || true
}
set -m  # a process group of its own, so that all of it can be ended
build "$@" >"$tools.log" 2>&1 &
building=$!
set +m
trap 'kill -- -$building 2>/dev/null' EXIT

PATH=$PATH:${CLUSTER_TOOLS:-$tools}
command -v helm >/dev/null && checks=all || checks=sources  # its chart is checked when it is built
bash scripts/lint.sh $checks || failed+=(lint)

.venv/bin/python scripts/get_model.py >/dev/null \
    || skip 'the tests on a real model: it could not be fetched or converted (see above)'
command -v redis-server >/dev/null \
    || skip 'the tests on Redis. To run them: apt-get install redis-server'
command -v nginx >/dev/null \
    || skip 'the tests through nginx. To run them: apt-get install nginx'
[ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1 \
    || skip 'tests/gpu: there is no NVIDIA GPU'

if [ $# -eq 0 ]; then
    part tests/unit --ignore=tests/unit/chart -n 2 --dist worksteal
fi
wait $building || skip "what needs a part of the test cluster that could not be built, see $tools.log"
[ $checks = all ] || bash scripts/lint.sh charts || failed+=('lint of the chart')
if [ $# -eq 0 ]; then
    part tests/operator tests/integration tests/unit/chart -m 'not alone' -n 2 --dist loadscope
    part tests --ignore=tests/unit -m alone
else
    part "$@"
fi
if [ ${#failed[@]} -gt 0 ]; then
    # Before pytest's line it would scroll away, after it it would not be the last one.
    printf 'test: failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
