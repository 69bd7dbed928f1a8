#!/bin/sh
# What needs two GPUs, in about seven minutes: `sh tests/gpu/two_gpus.sh FOLDER [PART...]`, from the
# repository's root. Each part has a limit of its own, so that one that hangs costs no other its turn.
# Logs and results go to FOLDER. Needs root, for the namespaces.
out=$1
shift
began=$(date +%s)
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}" # multicast harms hosts that are not set up for it
run() { # SECONDS NAME COMMAND...
    seconds=$1 name=$2
    shift 2
    echo "=== $name"
    timeout "$seconds" "$@" >"$out/$name.log" 2>&1
    echo "code $? after $(($(date +%s) - began)) s"
    grep -v '^$' "$out/$name.log" | tail -n 45
}
for part in "${@:-all}"; do
    case $part in speed | all) run 75 speed python3 -m tests.gpu.nccl_speed ;; esac
    case $part in tp | all)
        run 170 tp python3 -m tests.gpu.tp2 speed "$out" --runs tp1,tp2 --workloads nano,decode-1,decode-32
        ;;
    esac
    case $part in nccl | all) run 80 nccl python3 -m pytest -o addopts= -q tests/gpu/test_nccl.py ;; esac
    case $part in ranks | all) run 170 ranks python3 -m pytest -o addopts= -q -s tests/gpu/test_tp2.py ;; esac
    case $part in load | all) run 60 load python3 -m tests.gpu.tp2 load /tmp/checkpoint ;; esac
    case $part in ways | all)
        run 90 ways python3 -m tests.gpu.tp2 speed /tmp --runs tp2-symmetric,tp2-torch --workloads decode-1,decode-32
        ;;
    esac
done
