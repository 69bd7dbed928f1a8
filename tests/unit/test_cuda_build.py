"""How CUDA kernels are compiled and kept. A stand-in plays the GPU, nvcc and TVM FFI."""

import logging
import os
import re
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from minisgl.cli.main import main
from minisgl_kernels import (
    activation,
    block_table,
    build,
    cuda_build,
    decode_inputs,
    embedding,
    filter_bounds,
    kv_store,
    norm,
    nvcc,
    qk_rope_store,
    skinny_linear,
    wide_linear,
)
from minisgl_kernels.build import CSRC, KernelUnavailable
from minisgl_kernels.cuda_build import (
    Family,
    collected,
    cuda_module,
    prepare,
)
from minisgl_kernels.nvcc import joined_text, nvcc_command

BF16 = {"ELEMENT": "__nv_bfloat16"}
JOINED = (
    activation, block_table, decode_inputs, embedding, filter_bounds, kv_store, norm,
    qk_rope_store, skinny_linear, wide_linear,
)  # fmt: skip
SOURCES = {
    "embedding": {"ROW_BYTES": 2048},
    "kv_store": {"ROW_BYTES": 2048},
    "norm": norm._macros(1024, torch.bfloat16),
    "qk_rope_store": qk_rope_store._macros(128, torch.float16, True),
    "silu_and_mul": {**BF16, "WIDTH_OF_ROW": 3072},
    "decode_inputs": {},
    "sample": {**BF16, "THREADS": 256},
    "filter_bounds": {**BF16, "THREADS": 512},
    "skinny_linear": {**BF16, "NORM": 1, "MODE": 2},
    "wide_linear": {"TOKENS": 96, "GROUPS": 2, "WAYS": 1, "SPLIT": 2, "MODE": 1},
}


class Loaded:
    """A library of the stand-in: each function says which one it is."""

    def __init__(self, path: Path) -> None:
        self._text = path.read_text()

    def __getattr__(self, name: str):
        function, key = name.rsplit("_", 1)
        behind = self._text.partition(f"EXPORT_SUFFIX _{key}\n")[2]
        return lambda: (function, behind.splitlines()[0])


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with one Hopper GPU and an nvcc that notes each compile in `compiled`; a library is
    its source, and what was loaded stands in `loaded`."""
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    program, log = home / "bin" / "nvcc", tmp_path / "compiled"
    program.write_text(
        "#!/bin/sh\n"
        'case "$1" in --version) echo nvcc 13.0; exit;; esac\n'
        f'echo "$@" >> {log}\n'
        'while [ "$1" != -o ]; do shift; done\n'
        'if grep -q BROKEN "$3"; then echo "$3: error: broken" >&2; exit 1; fi\n'
        'cat "$3" > "$2"\n'
    )
    program.chmod(0o755)
    log.touch()
    fake = types.ModuleType("tvm_ffi")
    fake.__version__ = "0.1"
    loaded: list[Path] = []
    fake.load_module = lambda path: loaded.append(Path(path)) or Loaded(Path(path))
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
    monkeypatch.delenv(nvcc.DISABLE_PDL_ENV, raising=False)
    monkeypatch.delenv(build.DISABLE_ENV, raising=False)
    monkeypatch.delenv(build.AHEAD_ENV, raising=False)
    build.version.cache_clear()
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    (csrc / "kernel.cu").write_text("// a kernel\n")
    return types.SimpleNamespace(
        csrc=csrc, nvcc=program, capability=capability, loaded=loaded,
        compiled=lambda: log.read_text().splitlines(),
    )  # fmt: skip


def test_each_set_of_macros_is_compiled_once_and_kept(machine):
    for size in (64, 64, 128):
        module = cuda_module("kernel", {"HIDDEN": size}, csrc=machine.csrc)
        assert module.norm() == ("norm", f"#define HIDDEN {size}")
    first, again, other = machine.loaded
    assert first == again != other
    assert len(machine.compiled()) == 2


@pytest.mark.parametrize("change", ["source", "header", "flags", "gpu", "pdl", "nvcc"])
def test_whatever_decides_the_result_decides_where_it_is_kept(machine, monkeypatch, change):
    def path(flags=()):
        cuda_module("kernel", {}, flags, csrc=machine.csrc)
        return machine.loaded[-1]

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
        monkeypatch.setenv(nvcc.DISABLE_PDL_ENV, "1")
    else:
        machine.nvcc.write_text(machine.nvcc.read_text().replace("13.0", "13.1"))
        build.version.cache_clear()
    assert path(flags) != before
    assert len(machine.compiled()) == 2


def test_a_host_with_another_cpu_or_python_takes_what_is_kept(machine, monkeypatch):
    for cpu in ("one", "another"):
        monkeypatch.setattr(build, "_cpu", lambda cpu=cpu: ("x86_64", cpu))
        monkeypatch.setattr(build.sysconfig, "get_config_var", lambda _, cpu=cpu: cpu)
        cuda_module("kernel", {}, csrc=machine.csrc)
    assert len(machine.compiled()) == 1


@pytest.mark.parametrize(
    ("capability", "target", "pdl"),
    [((8, 0), "arch=compute_80,code=sm_80", 0), ((9, 0), "arch=compute_90a,code=sm_90a", 1)],
)
def test_the_target_is_the_gpu_at_hand(machine, capability, target, pdl):
    command = nvcc_command(capability)
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
    assert family[1,]() == ("run", "#define SIZE 1")
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
    assert family[1,]() == ("run", "#define SIZE 1")


@pytest.fixture
def joined(machine, monkeypatch):
    """A family whose variants are compiled together, on a host of two cores."""
    monkeypatch.setattr(cuda_build, "CSRC", machine.csrc)
    monkeypatch.setattr(cuda_build.cuda_module, "__kwdefaults__", {"csrc": machine.csrc})
    monkeypatch.setattr(cuda_build, "usable_cpus", lambda: 2)
    return Family("kernel", "run", lambda size: {"SIZE": size}, joined=True)


def test_joined_variants_are_compiled_as_one_source_for_each_core(machine, joined):
    prepare((joined, (size,)) for size in (1, 2, 3, 4, 5, 1, 2))
    assert len(machine.compiled()) == 2
    assert [joined[size,]() for size in range(1, 6)] == [
        ("run", f"#define SIZE {size}") for size in range(1, 6)
    ]
    assert len(set(machine.loaded)) == 5
    assert len({path.stat().st_ino for path in machine.loaded}) == 2


def test_sources_of_several_families_are_joined_and_alike_variants_once(
    machine, joined, monkeypatch
):
    (machine.csrc / "other.cu").write_text("// another kernel\n")
    other = Family("other", "run", lambda width: {"WIDTH": width}, joined=True)
    again = Family("other", "also", lambda width: {"WIDTH": width}, joined=True)
    flagged = Family("other", "run", lambda width: {"WIDTH": width}, ("-fmad=false",), joined=True)
    monkeypatch.setattr(cuda_build, "usable_cpus", lambda: 1)
    prepare((family, (3,)) for family in (joined, other, again, flagged))
    assert ["-fmad=false" in line for line in machine.compiled()] == [False, True]
    assert joined[3,]() == ("run", "#define SIZE 3")
    assert again[3,]() == ("also", "#define WIDTH 3")
    (text,) = {path.read_text() for path in machine.loaded if path.name == "kernel.so"}
    assert text.count('#include "other.cu"') == 1
    assert text.index("#undef SIZE") < text.index("#define WIDTH")


def test_a_source_has_no_more_than_so_many_variants(machine, joined, monkeypatch):
    monkeypatch.setattr(cuda_build, "MAX_JOINED", 3)
    prepare((joined, (size,)) for size in range(10))
    assert len(machine.compiled()) == 4


def test_what_was_compiled_together_is_found_one_by_one_at_the_next_start(machine, joined):
    prepare((joined, (size,)) for size in range(6))
    again = Family("kernel", "run", lambda size: {"SIZE": size}, joined=True)
    prepare((again, (size,)) for size in (5, 0, 3))
    assert again[3,]() == ("run", "#define SIZE 3")
    assert len(machine.compiled()) == 2


@pytest.mark.parametrize("module", JOINED, ids=lambda module: module.__name__.rpartition(".")[2])
def test_no_header_of_a_joined_source_depends_on_its_macros(module):
    families = [one for one in vars(module).values() if isinstance(one, Family)]
    assert all(family.joined for family in families)
    name = families[0]._source
    seen, todo = set(), [CSRC / f"{name}.cu"]
    while todo:
        found = re.findall(r'^#include "(.*)"', todo.pop().read_text(), re.MULTILINE)
        new = {CSRC / header for header in found} - seen
        seen |= new
        todo += new
    assert seen
    words = set(re.findall(r"\w+", " ".join(header.read_text() for header in seen)))
    assert words.isdisjoint(SOURCES.get(name, {}))


def test_only_what_is_missing_is_compiled(machine, joined):
    joined[2,]
    again = Family("kernel", "run", lambda size: {"SIZE": size}, joined=True)
    prepare((again, (size,)) for size in (1, 2, 3, 4))
    assert sum(path.read_text().count("#define SIZE 2\n") for path in set(machine.loaded)) == 1


def test_a_variant_that_does_not_compile_takes_no_other_with_it(machine, joined):
    prepare((joined, (size,)) for size in (1, 2, "BROKEN", 4))
    assert joined[1,]() == ("run", "#define SIZE 1")
    assert joined[4,]() == ("run", "#define SIZE 4")
    with pytest.raises(KernelUnavailable, match="cannot compile kernel.cu: .*error: broken"):
        joined["BROKEN",]


def test_a_cache_that_cannot_be_written_costs_no_more_compiles(
    machine, joined, monkeypatch, tmp_path, caplog
):
    (tmp_path / "cache").write_text("not a directory")
    build._temporary_root.cache_clear()
    prepare((joined, (size,)) for size in range(4))
    assert len(machine.compiled()) == 2
    assert all(build._temporary_root() in path.parents for path in machine.loaded)
    assert len({record.message for record in caplog.records}) == len(caplog.records) == 1


def test_where_files_have_no_links_each_variant_has_a_copy(machine, joined, monkeypatch):
    def refuse(*_):
        raise OSError("not supported")

    monkeypatch.setattr(os, "link", refuse)
    prepare((joined, (size,)) for size in range(4))
    assert len(machine.compiled()) == 2
    assert [joined[size,]()[1] for size in range(4)] == [f"#define SIZE {i}" for i in range(4)]


def ahead(machine, monkeypatch, joined, folder):
    """Four variants in a folder, compiled where there is no GPU."""
    with monkeypatch.context() as without:
        without.setattr(torch.cuda, "is_available", lambda: False)
        variants = [(joined, (size,)) for size in range(4)]
        assert cuda_build.compile_ahead(variants, (9, 0), folder) == 4
    monkeypatch.setenv(build.AHEAD_ENV, str(folder))
    return len(machine.compiled())


def test_what_was_compiled_ahead_is_not_compiled_again(machine, joined, monkeypatch, tmp_path):
    before = ahead(machine, monkeypatch, joined, tmp_path / "ahead")
    prepare((joined, (size,)) for size in range(5))
    assert len(machine.compiled()) == before + 1
    assert [joined[size,]()[1] for size in range(5)] == [f"#define SIZE {i}" for i in range(5)]
    assert sum(tmp_path / "ahead" in path.parents for path in machine.loaded) == 4


def test_what_was_compiled_ahead_for_another_gpu_is_left_alone(
    machine, joined, monkeypatch, tmp_path
):
    before = ahead(machine, monkeypatch, joined, tmp_path / "ahead")
    machine.capability[:] = [10, 0]
    joined[1,]
    assert len(machine.compiled()) == before + 1


def test_a_file_compiled_ahead_that_does_not_load_is_replaced(
    machine, joined, monkeypatch, tmp_path, caplog
):
    before = ahead(machine, monkeypatch, joined, tmp_path / "ahead")
    load = sys.modules["tvm_ffi"].load_module

    def load_some(path):
        if "/ahead/" in path:
            raise RuntimeError("Failed to load dynamic shared library: file too short")
        return load(path)

    monkeypatch.setattr(sys.modules["tvm_ffi"], "load_module", load_some)
    assert joined[1,]() == ("run", "#define SIZE 1")
    assert len(machine.compiled()) == before + 1
    assert "does not load" in caplog.text


def test_the_command_compiles_ahead_what_a_models_trial_times(machine, tmp_path, capsys):
    model = Path(__file__).parents[1] / "gpu" / "configs" / "qwen3-0.6b"
    folder = tmp_path / "ahead"
    assert main(["compile", "--model", str(model), "--folder", str(folder)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    count = len(list(folder.rglob("wide_linear.so")))
    assert count > 100
    assert line.startswith(f"{folder}: {count} kernels, in ")
    assert all(path.stat().st_mode & 0o055 == 0o055 for path in folder.iterdir())
    assert sum(path.read_text().count("#define TOKENS 96\n") for path in folder.rglob("*.so")) > 10


def test_the_command_says_what_is_missing(machine, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    assert main(["compile", "--folder", str(tmp_path / "ahead")]) == 1
    assert "install apache-tvm-ffi" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_ahead_is_an_error(machine, joined, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        cuda_build.compile_ahead([(joined, (1,))], (9, 0), tmp_path / "file" / "folder")


def test_sets_that_overlap_are_made_once_and_nobody_waits_for_ever(machine):
    made = []

    def make(wanted, path):
        made.extend(result.key for result in wanted)
        path.write_text("library")

    results = [build.Result(f"{i:02d}", "some.so") for i in range(20)]
    parts = [results[i::3] + results[: 4 * i] for i in range(4)]
    with ThreadPoolExecutor(8) as pool:
        futures = [
            pool.submit(build.build_results, order, make)
            for part in parts for order in (part, part[::-1])
        ]  # fmt: skip
        for future in futures:
            future.result(timeout=60)
    assert sorted(made) == [result.key for result in results]


def test_a_build_that_breaks_off_leaves_nothing_that_the_next_one_takes(machine):
    results = [build.Result(f"{i:02d}", "some.so") for i in range(3)]

    def broken(wanted, path):
        path.write_text("half")
        raise KernelUnavailable("no")

    with pytest.raises(KernelUnavailable):
        build.build_results(results, broken)
    root = build.cache_root()
    assert {path.name for path in root.rglob("*") if path.is_file()} == {"lock"}
    build.build_results(results, lambda wanted, path: path.write_text("whole"))
    assert {result.within(root).read_text() for result in results} == {"whole"}


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
        command = nvcc_command((9, 0), ("-Werror=all-warnings",))
    except KernelUnavailable as error:
        pytest.skip(str(error))
    source = tmp_path / "joined.cu"
    source.write_text(joined_text([(CSRC / f"{name}.cu", SOURCES[name], "0")]))
    _compile([*command, f"-I{CSRC}"], source, tmp_path)


def test_all_joined_sources_compile_as_one(tmp_path):
    pytest.importorskip("tvm_ffi", reason="needs TVM FFI: pip install apache-tvm-ffi")
    try:
        command = nvcc_command((9, 0), ("-Werror=all-warnings",))
    except KernelUnavailable as error:
        pytest.skip(str(error))
    source = tmp_path / "joined.cu"
    variants = [(CSRC / f"{name}.cu", macros, name) for name, macros in SOURCES.items()]
    variants.append((CSRC / "norm.cu", norm._macros(128, torch.bfloat16), "more"))
    source.write_text(joined_text(variants))
    library = _compile([*command, f"-I{CSRC}"], source, tmp_path)
    exported = re.findall(rb"__tvm_ffi_(\w+)", library.read_bytes())
    assert {b"sample_sample", b"rms_norm_norm", b"rms_norm_more"} <= set(exported)


def _compile(command: list[str], source: Path, folder: Path) -> Path:
    out = folder / "out.so"
    done = subprocess.run(
        [*command, "-o", str(out), str(source)], capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr
    return out
