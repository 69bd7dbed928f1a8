#!/usr/bin/env bash
# Style, types, layers, the Dockerfile and the chart. Runs all of them, also after one has failed.
#   lint.sh sources   all but the chart
#   lint.sh charts    the chart alone
set -uo pipefail
cd "$(dirname "$0")/.."
checks=${1:-all}
bin=.venv/bin
failed=()

check() {
    local name=$1 output
    shift
    if output=$("$@" 2>&1); then
        printf 'lint: %s: ok\n' "$name"
    else
        printf 'lint: %s: FAILED\n%s\n' "$name" "$output"
        failed+=("$name")
    fi
}

if [ $checks != charts ]; then
    check 'ruff check' $bin/ruff check .
    check 'ruff format' $bin/ruff format --check .
    check 'mypy' $bin/mypy
    check 'import layers' $bin/lint-imports --no-logo
    if [ -x $bin/hadolint ]; then
        check 'hadolint' $bin/hadolint --no-color Dockerfile
    else
        echo 'lint: hadolint: skipped, PyPI has no build of it for this machine'
    fi
fi
# helm is among the test cluster's programs.
PATH=$PATH:${CLUSTER_TOOLS:-${XDG_CACHE_HOME:-$HOME/.cache}/minisgl/cluster-tools}
for chart in helm/*/Chart.yaml; do
    [ $checks != sources ] && [ -e "$chart" ] || continue
    if command -v helm >/dev/null; then
        check "helm lint $(dirname "$chart")" helm lint --strict "$(dirname "$chart")"
    else
        echo 'lint: helm lint: skipped, there is no helm program on this machine'
    fi
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "lint: failed: ${failed[*]}"
    exit 1
fi
