"""Runs a C++ program that uses a kernel under the sanitizers for addresses and undefined things."""

import shutil
import subprocess
from pathlib import Path

import pytest

from minisgl_kernels import build

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("c++", "g++", "clang++")), reason="no C++ compiler"
)


def run_sanitized(program: str, folder: Path) -> None:
    """Compile and run the source `program`; it must end with 0. Skips without sanitizers."""
    source, binary = folder / "main.cpp", folder / "main"
    source.write_text(program)
    flags = ["-std=c++17", "-O2", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover"]
    built = subprocess.run(
        [*build.compiler(), *flags, f"-I{build.CSRC}", "-o", binary, source],
        capture_output=True, text=True, timeout=170,
    )  # fmt: skip
    if built.returncode:
        if "sanitize" in built.stderr or "asan" in built.stderr:
            pytest.skip(f"the toolchain has no sanitizers: {built.stderr.splitlines()[:1]}")
        pytest.fail(built.stderr)
    ran = subprocess.run([binary], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
