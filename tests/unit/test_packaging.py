"""The distribution: what is in it, what its extras bring, and what may import what."""

import operator
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from minisgl_kernels.build import AHEAD_ENV

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE_ROOTS = ("operator", "services", "kernels")
PACKAGES = [
    ROOT / "operator" / "minisgl_operator",
    ROOT / "services" / "minisgl",
    ROOT / "kernels" / "minisgl_kernels",
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=;~! ]", r)[0].lower() for r in requirements}


def requirements_of(*extras: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "requirements.py"), *extras]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this tree. Built without isolation: the tests download nothing."""
    pytest.importorskip("hatchling", reason="needs hatchling: make setup")
    tree = tmp_path_factory.mktemp("tree")
    for name in SOURCE_ROOTS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(tree)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return zipfile.ZipFile(next((tree / "dist").glob("*.whl")))


def test_no_source_root_is_a_package() -> None:
    assert not [r for r in SOURCE_ROOTS if (ROOT / r / "__init__.py").exists()]


def test_the_folder_operator_does_not_shadow_the_standard_library() -> None:
    assert ROOT not in Path(operator.__file__).parents
    code = "import operator; print(operator.__file__)"
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert ROOT / "operator" not in Path(shown.stdout.strip()).parents


def test_the_wheel_holds_every_file_of_the_packages(wheel: zipfile.ZipFile) -> None:
    held = set(wheel.namelist())
    for package in PACKAGES:
        for path in package.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert path.relative_to(package.parent).as_posix() in held


def test_the_wheel_installs_nothing_but_the_packages(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {t for t in tops if not t.endswith(".dist-info")} == {
        package.name for package in PACKAGES
    }


def test_the_wheel_is_typed_and_has_kernel_sources(wheel: zipfile.ZipFile) -> None:
    held = wheel.namelist()
    assert "minisgl/py.typed" in held and "minisgl_kernels/py.typed" in held
    assert any(name.startswith("minisgl_kernels/csrc/") for name in held)


def test_a_plain_installation_has_what_the_roles_of_one_machine_need() -> None:
    roles = {r for role in ("gateway", "tokenizer", "engine") for r in EXTRAS[role]}
    assert roles <= set(PROJECT["dependencies"])


@pytest.mark.parametrize("role", ["operator", "gateway", "tokenizer"])
def test_only_engines_need_torch(role: str) -> None:
    needed = names(requirements_of(role, "redis").stdout.split("\n"))
    assert "msgspec" in needed
    assert not needed & {"torch", *names(EXTRAS["cuda"])}


def test_h50_h61_the_operator_requires_clients_without_known_faults() -> None:
    """kopf before 1.45 may stop to watch; kubernetes 36 sends no token from a pod."""
    needed = requirements_of("operator").stdout.split("\n")
    assert {"kopf>=1.45", "kubernetes>=37"} <= set(needed)


def test_an_extra_of_extras_is_resolved() -> None:
    needed = names(requirements_of("dev").stdout.split("\n"))
    assert {"pytest", "redis", "gguf", "matplotlib", "kopf"} <= needed
    assert "minisglang" not in needed


def test_an_unknown_extra_is_named() -> None:
    result = requirements_of("gatway")
    assert result.returncode == 2
    assert "'gatway'" in result.stderr and "gateway" in result.stderr


@pytest.mark.parametrize("file", ["cpu", "cuda"])
def test_the_constraints_pin_every_direct_requirement(file: str) -> None:
    lines = (ROOT / "constraints" / f"{file}.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[^ ]+", pin) for pin in pins)
    direct = names(PROJECT["dependencies"] + [r for e in EXTRAS.values() for r in e])
    direct -= {"minisglang"} | (names(EXTRAS["cuda"]) if file == "cpu" else {"triton"})
    assert names(pins) >= direct


@pytest.mark.parametrize("target", ["operator", "services", "engine-cpu", "engine-cuda"])
def test_an_image_runs_as_a_user_that_kubernetes_knows_not_to_be_root(target: str) -> None:
    text = (ROOT / "Dockerfile").read_text()
    (stage,) = re.findall(rf"^FROM \S+ AS {target}$(.*?)(?=^FROM |\Z)", text, re.M | re.S)
    assert re.findall(r"^USER (.*)$", stage, re.M)[-1] == "1000:1000"
    assert re.search(r'^ENTRYPOINT \["minisgl', stage, re.M)


def test_the_cuda_image_compiles_kernels_to_where_engines_look() -> None:
    stage = (ROOT / "Dockerfile").read_text().partition("AS engine-cuda")[2]
    assert f"ENV {AHEAD_ENV}=/" in stage
    compiled, readable = (
        stage.index(part)
        for part in (f'minisgl compile --folder "${AHEAD_ENV}"', f'chmod -R a+rX "${AHEAD_ENV}"')
    )
    assert stage.index("pip install --no-deps") < compiled < readable < stage.index("USER 1000")


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, minisgl, minisgl.messages, minisgl.config; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert shown.stdout.strip() == "False"
