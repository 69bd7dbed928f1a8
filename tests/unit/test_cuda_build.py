"""How CUDA kernels are compiled and kept. A stand-in plays the GPU, nvcc and TVM FFI."""

import logging
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from minisgl_kernels import build, cuda_build, embedding, norm, qk_rope_store
from minisgl_kernels.build import CSRC, KernelUnavailable
from minisgl_kernels.cuda_build import Family, collected, cuda_module, nvcc_command, prepare

BF16 = {"ELEMENT": "__nv_bfloat16"}
SOURCES = {
    "embedding": {"ROW_BYTES": 2048},
    "kv_store": {"ROW_BYTES": 2048},
    "norm": norm._macros(1024, torch.bfloat16),
    "qk_rope_store": qk_rope_store._macros(128, torch.float16, True),
    "silu_and_mul": {**BF16, "WIDTH_OF_ROW": 3072},
    "decode_inputs": {},
    "sample": {**BF16, "FEW": 256, "MANY": 1024},
    "filter_bounds": {**BF16, "THREADS": 512},
    "skinny_linear": {**BF16, "NORM": 1, "MODE": 2},
    "wide_linear": {"TOKENS": 96, "GROUPS": 2, "WAYS": 1, "SPLIT": 2, "MODE": 1},
}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with one Hopper GPU and an nvcc that notes each compile in `compiled`."""
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    nvcc, log = home / "bin" / "nvcc", tmp_path / "compiled"
    nvcc.write_text(
        "#!/bin/sh\n"
        'case "$1" in --version) echo nvcc 13.0; exit;; esac\n'
        f'echo "$@" >> {log}\n'
        'while [ "$1" != -o ]; do shift; done; echo library > "$2"\n'
    )
    nvcc.chmod(0o755)
    log.touch()
    fake = types.ModuleType("tvm_ffi")
    fake.__version__ = "0.1"
    fake.load_module = lambda path: types.SimpleNamespace(path=Path(path), run=lambda: "ran")
    libinfo = types.ModuleType("tvm_ffi.libinfo")
    libinfo.find_include_path = lambda: "/tvm/include"
    libinfo.find_libtvm_ffi = lambda: "/tvm/lib/libtvm_ffi.so"
    monkeypatch.setitem(sys.modules, "tvm_ffi", fake)
    monkeypatch.setitem(sys.modules, "tvm_ffi.libinfo", libinfo)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    capability = [9, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: tuple(capability))
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setenv(build.CACHE_ENV, str(tmp_path / "cache"))
    monkeypatch.delenv(cuda_build.DISABLE_PDL_ENV, raising=False)
    monkeypatch.delenv(build.DISABLE_ENV, raising=False)
    build.version.cache_clear()
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    (csrc / "kernel.cu").write_text("// a kernel\n")
    return types.SimpleNamespace(
        csrc=csrc, nvcc=nvcc, capability=capability,
        compiled=lambda: log.read_text().splitlines(),
    )  # fmt: skip


def test_each_set_of_macros_is_compiled_once_and_kept(machine):
    first = cuda_module("kernel", {"HIDDEN": 64}, csrc=machine.csrc)
    assert cuda_module("kernel", {"HIDDEN": 64}, csrc=machine.csrc).path == first.path
    assert len(machine.compiled()) == 1
    assert cuda_module("kernel", {"HIDDEN": 128}, csrc=machine.csrc).path != first.path
    assert ["-DHIDDEN=64" in line for line in machine.compiled()] == [True, False]


@pytest.mark.parametrize("change", ["source", "header", "flags", "gpu", "pdl", "nvcc"])
def test_whatever_decides_the_result_decides_where_it_is_kept(machine, monkeypatch, change):
    def path(flags=()):
        return cuda_module("kernel", {}, flags, csrc=machine.csrc).path

    before, flags = path(), ()
    if change == "source":
        (machine.csrc / "kernel.cu").write_text("// another\n")
    elif change == "header":
        (machine.csrc / "shared.cuh").write_text("// of all\n")
    elif change == "flags":
        flags = ("-fmad=false",)
    elif change == "gpu":
        machine.capability[:] = [10, 0]
    elif change == "pdl":
        monkeypatch.setenv(cuda_build.DISABLE_PDL_ENV, "1")
    else:
        machine.nvcc.write_text(machine.nvcc.read_text().replace("13.0", "13.1"))
        build.version.cache_clear()
    assert path(flags) != before
    assert len(machine.compiled()) == 2


@pytest.mark.parametrize(
    ("capability", "target", "pdl"),
    [((8, 0), "arch=compute_80,code=sm_80", 0), ((9, 0), "arch=compute_90a,code=sm_90a", 1)],
)
def test_the_target_is_the_gpu_at_hand(machine, capability, target, pdl):
    command = nvcc_command(capability, {})
    assert f"-gencode={target}" in command
    assert f"-DPDL={pdl}" in command


def test_an_old_gpu_has_no_kernels(machine):
    machine.capability[:] = [7, 5]
    with pytest.raises(KernelUnavailable, match=r"7\.5 is below 8\.0"):
        cuda_module("kernel", {}, csrc=machine.csrc)


def test_a_machine_without_nvcc_is_told_what_to_install(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    if os.access("/usr/local/cuda/bin/nvcc", os.X_OK):
        pytest.skip("this machine has an nvcc at its usual place")
    with pytest.raises(KernelUnavailable, match="install CUDA's compiler"):
        cuda_module("kernel", {}, csrc=machine.csrc)


def test_a_machine_without_tvm_ffi_is_told_what_to_install(machine, monkeypatch):
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    with pytest.raises(KernelUnavailable, match="install apache-tvm-ffi"):
        cuda_module("kernel", {}, csrc=machine.csrc)


@pytest.mark.parametrize("missing", ["gpu", "leave"])
def test_without_kernels_the_function_is_none_with_one_warning(
    machine, monkeypatch, caplog, missing
):
    if missing == "gpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    else:
        monkeypatch.setenv(build.DISABLE_ENV, "1")
    monkeypatch.setattr(embedding._family, "_usable", None)
    with caplog.at_level(logging.WARNING):
        assert [embedding.embedding_function() for _ in range(3)] == [None] * 3
    (record,) = caplog.records
    assert record.message.startswith("embedding runs in torch, because its CUDA kernel is missing:")


def test_with_kernels_the_function_is_the_kernels(machine, monkeypatch):
    monkeypatch.setattr(embedding._family, "_usable", None)
    assert embedding.embedding_function() is embedding.embedding


def test_a_family_has_one_module_for_each_signature(machine, monkeypatch):
    monkeypatch.setattr(cuda_build.cuda_module, "__kwdefaults__", {"csrc": machine.csrc})
    family = Family("kernel", "run", lambda size: {"SIZE": size})
    assert family[1,]() == "ran"
    assert family[1,] is family[1,]
    assert family[2,] is not family[1,]
    assert len(machine.compiled()) == 2


def test_variants_are_prepared_together_and_those_without_a_kernel_left_out(machine):
    family = Family("norm", "run", norm._macros)
    prepare((family, (hidden, torch.bfloat16)) for hidden in (64, 128, 65536, 256))
    assert len(machine.compiled()) == 3
    family[128, torch.bfloat16]()
    assert len(machine.compiled()) == 3


def test_kernels_that_are_collected_compute_nothing_and_are_told(machine, monkeypatch):
    monkeypatch.setattr(cuda_build.cuda_module, "__kwdefaults__", {"csrc": machine.csrc})
    family = Family("kernel", "run", lambda size: {"SIZE": size})
    with collected() as wanted:
        assert family[1,]("anything") is None
        family[2,]
    assert wanted == [(family, (1,)), (family, (2,))]
    assert machine.compiled() == []
    prepare(wanted)
    assert len(machine.compiled()) == 2
    assert family[1,]() == "ran"


def test_a_signature_without_a_kernel_is_refused_each_time_and_never_compiled(machine):
    family = Family("norm", "rms_norm", norm._macros)
    for _ in range(2):
        with pytest.raises(KernelUnavailable, match="no kernel for rows of 65536"):
            family[65536, torch.bfloat16]
        with pytest.raises(KernelUnavailable, match="no kernel for torch.int8"):
            family[64, torch.int8]
    assert machine.compiled() == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden", [1, 33, 64, 100, 128, 576, 1024, 5120, 8192, 8200, 16384])
def test_the_norms_threads_cover_the_row_without_idle_warps(hidden, dtype):
    macros = norm._macros(hidden, dtype)
    per_item = macros["THREADS"] * macros["WIDTH"]
    assert hidden % macros["WIDTH"] == 0
    assert macros["THREADS"] % 32 == 0
    assert macros["THREADS"] <= 1024
    assert hidden <= macros["ITEMS"] * per_item < hidden + 32 * macros["WIDTH"] * macros["ITEMS"]


@pytest.mark.parametrize("name", SOURCES)
def test_the_cuda_source_compiles(name, tmp_path):
    pytest.importorskip("tvm_ffi", reason="needs TVM FFI: pip install apache-tvm-ffi")
    try:
        command = nvcc_command((9, 0), SOURCES[name], ("-Werror=all-warnings",))
    except KernelUnavailable as error:
        pytest.skip(str(error))
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "out.so"), str(CSRC / f"{name}.cu")],
        capture_output=True, text=True, timeout=170,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
