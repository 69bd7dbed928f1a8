"""Starts ranks, each a process that sees one GPU, as pods do."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 90.0
ALONE_SECONDS = 20.0
"""What the other ranks get once one has ended."""
SHARED, PRIVATE, PLAIN = "shared /dev/shm", "private /dev/shm", "one container"


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may name, in order."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def _wait(processes: Sequence["subprocess.Popen[str]"]) -> None:
    """Until all have ended or are late. What they print fits into a pipe."""
    end, one_has_ended = time.monotonic() + LIMIT_SECONDS, False
    while time.monotonic() < end:
        left = [process for process in processes if process.poll() is None]
        if not left:
            return
        if len(left) < len(processes) and not one_has_ended:
            one_has_ended = True
            end = min(end, time.monotonic() + ALONE_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            left[0].wait(0.1)


def run_ranks(
    size: int, arguments: Sequence[str], *, place: str = PLAIN, symmetric: bool = False
) -> list[dict[str, Any] | None]:
    """What each of `size` ranks printed, None for one that printed nothing.

    `place`: PLAIN, or in IPC and PID namespaces of their own, as pods on a host's network are,
    with a /dev/shm each or one for all.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meet = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    shared = tempfile.mkdtemp(prefix="minisgl-", dir="/dev/shm")  # as the kubelet makes it
    processes = []
    for rank in range(size):
        command = [
            sys.executable, "-m", "tests.gpu.nccl_rank", f"--rank={rank}", f"--size={size}",
            f"--meet={meet}", *arguments,
        ]  # fmt: skip
        # NVLink multicast stays off where the environment says nothing: not every host has it.
        env = {"NCCL_NVLS_ENABLE": "0", **os.environ, "CUDA_VISIBLE_DEVICES": visible_gpus()[rank]}
        env["MINISGL_SYMMETRIC_MEMORY"] = "1" if symmetric else "0"
        if place != PLAIN:
            own = "mount -t tmpfs -o size=2g shm /dev/shm"
            mount = own if place == PRIVATE else f"mount --bind {shared} /dev/shm"
            command = [
                "unshare", "--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc",
                "sh", "-c", f'{mount} && exec "$@"', "sh", *command,
            ]  # fmt: skip
        processes.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
        )
    results: list[dict[str, Any] | None] = []
    try:
        _wait(processes)
        for process in processes:
            process.kill()
            out, _ = process.communicate()
            lines = [line for line in out.splitlines() if line.startswith("{")]
            results.append(json.loads(lines[-1]) if lines else None)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        shutil.rmtree(shared, ignore_errors=True)
    return results
