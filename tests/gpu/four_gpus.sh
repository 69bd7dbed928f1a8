#!/bin/sh
# What several GPUs are measured by: `sh tests/gpu/four_gpus.sh FOLDER [PART...]`, from the
# repository's root. It takes the GPUs that there are, with 1, 2 and 4 ranks as far as they fit.
# Without a PART: serve, nccl, load and speed, in at most ten minutes; `ways` and `ranks` have to be
# named. Each part has a limit of its own, so that one that hangs costs no other its turn. Results are
# written as they come: what a limit cuts off is lost, not what came before it. Where kernels are not
# compiled yet, `speed` on four GPUs wants 330 seconds. Logs, JSON and pictures go to FOLDER. SERVING
# are more flags of tests/gpu/serving.py, SPEED of `tests/gpu/scaling.py speed`. The places of `nccl`
# need root, for their namespaces.
out=$1
shift
mkdir -p "$out"
began=$(date +%s)
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}" # multicast harms hosts that are not set up for it
run() { # SECONDS NAME COMMAND...
    seconds=$1 name=$2
    shift 2
    echo "=== $name"
    timeout -k 20 "$seconds" "$@" >"$out/$name.log" 2>&1
    echo "code $? after $(($(date +%s) - began)) s"
    grep -v '^$' "$out/$name.log" | tail -n 60 | cut -c 1-400
}
scaling="python3 -m tests.gpu.scaling"
for part in "${@:-all}"; do
    # shellcheck disable=SC2086 # flags are words
    case $part in
    serve) run "${SERVE_SECONDS:-280}" serve python3 -m tests.gpu.serving "$out" $SERVING ;;
    nccl) run 70 nccl python3 -m tests.gpu.nccl_speed "$out/nccl.json" ;;
    load) run 45 load $scaling load /tmp/checkpoint ;;
    speed) run "${SPEED_SECONDS:-200}" speed $scaling speed "$out" $SPEED ;;
    ways) run 90 ways $scaling speed "$out" --models qwen3-14b --ranks 2,4 --ways symmetric,torch --workloads decode-1,decode-32 ;;
    ranks) run 200 ranks python3 -m pytest -o addopts= -q -n 4 --dist loadgroup tests/gpu/test_nccl.py tests/gpu/test_tp.py ;;
    all) sh "$0" "$out" serve nccl load speed ;;
    *) echo "unknown part $part: serve, nccl, load, speed, ways, ranks, all" >&2 && exit 2 ;;
    esac
done
