#!/bin/sh
# Everything that needs two GPUs, in about six minutes: `sh tests/gpu/two_gpus.sh FOLDER`, from the
# repository's root. Each part has a limit of its own, so that one that hangs costs no other its turn.
# Logs and results go to FOLDER. Needs root, for the namespaces.
out=$1
run() { # SECONDS NAME COMMAND...
    seconds=$1 name=$2
    shift 2
    echo "=== $name"
    timeout "$seconds" "$@" >"$out/$name.log" 2>&1
    echo "code $? after $(($(date +%s) - began)) s"
    grep -v '^$' "$out/$name.log" | tail -n 45
}
began=$(date +%s)
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}" # multicast harms hosts that are not set up for it
nvidia-smi topo -m | head -n 4
run 75 nccl_speed python3 -m tests.gpu.nccl_speed
run 170 tp python3 -m tests.gpu.tp2 speed "$out" --runs tp1,tp2 --workloads nano,decode-1,decode-32
run 80 tests_nccl python3 -m pytest -o addopts= -q tests/gpu/test_nccl.py
timeout 90 python3 -m tests.gpu.tp2 load /tmp/checkpoint >"$out/load.log" 2>&1 &
run 120 tests_tp2 python3 -m pytest -o addopts= -q -s tests/gpu/test_tp2.py
wait
echo "=== load"
cat "$out/load.log"
run 90 tp_ways python3 -m tests.gpu.tp2 speed /tmp --runs tp2-symmetric,tp2-torch --workloads decode-1,decode-32
