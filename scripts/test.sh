#!/usr/bin/env bash
# Lint, then all tests that this machine can run. The last line is pytest's own.
set -uo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

lint=0
bash scripts/lint.sh || lint=$?

skip() { printf 'test: skipped: %s\n' "$*"; }
.venv/bin/python scripts/get_model.py >/dev/null \
    || skip 'the tests on a real model: it could not be fetched or converted (see above)'
command -v redis-server >/dev/null \
    || skip 'the tests on Redis. To run them: apt-get install redis-server'
command -v nginx >/dev/null \
    || skip 'the tests through nginx. To run them: apt-get install nginx'
if [ -z "${CLUSTER_TOOLS:-}" ] && command -v go >/dev/null; then
    tools=${XDG_CACHE_HOME:-$HOME/.cache}/minisgl/cluster-tools
    mkdir -p "${tools%/*}"
    # Nothing is done when they are there. Without root or containerd only the API server is needed.
    parts=()
    [ "$(id -u)" = 0 ] && command -v containerd >/dev/null || parts=(etcd k8s helm crds)
    bash tests/cluster/build_tools.sh "$tools" "${parts[@]}" >/dev/null 2>"$tools.log" \
        || skip "what needs a part of the test cluster that could not be built, see $tools.log"
fi
[ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1 \
    || skip 'tests/gpu: there is no NVIDIA GPU'

.venv/bin/python -m pytest "$@"
status=$?
if [ $lint -ne 0 ]; then
    # Before pytest's line it would scroll away, after it it would not be the last one.
    echo 'test: the lint checks failed: see above' >&2
    [ $status -ne 0 ] || status=1
fi
exit $status
