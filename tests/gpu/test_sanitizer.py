"""Each kernel of the project's own under compute-sanitizer: memory accesses and races."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from tests.gpu.kernel_calls import CALLS, main

ROOT = Path(__file__).resolve().parents[2]
TOOL = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")


@pytest.mark.skipif(TOOL is None, reason="needs compute-sanitizer, which comes with CUDA")
@pytest.mark.parametrize("check", ["memcheck", "racecheck"])
def test_no_kernel_touches_memory_that_is_not_its_own_or_races(check):
    main([])  # compiled here, so that the tool watches kernels alone
    assert TOOL is not None
    done = subprocess.run(
        [TOOL, f"--tool={check}", "--error-exitcode=9", sys.executable, "-m",
         "tests.gpu.kernel_calls"],
        cwd=ROOT, env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    if "Device not supported" in done.stdout + done.stderr:
        pytest.skip("compute-sanitizer cannot watch this device")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "0 hazards" in done.stdout, done.stdout
    assert done.stdout.count("called ") == len(CALLS)
