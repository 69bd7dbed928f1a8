"""What each image installs exists for each of its platforms, in the versions of constraints/.

uv resolves it by the metadata in a package index; nothing is installed, and no wheel is downloaded
whole. Wheels alone count: the images have no compiler for what requirements bring.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UV = shutil.which("uv", path=str(Path(sys.executable).parent))
PYTHON_OF_UBUNTU = {"24.04": "3.12"}
BOTH = ("x86_64", "aarch64")
NO_INDEX = re.compile(r"error sending request|connect|timed out|dns error", re.IGNORECASE)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(UV is None, reason="needs uv: make setup"),
]


@dataclass(frozen=True, slots=True)
class Stage:
    """What a stage of the Dockerfile installs."""

    python: str
    glibc: str
    roles: tuple[str, ...]
    constraints: Path


def stages() -> dict[str, Stage]:
    """By name those stages of the Dockerfile that install requirements."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)", text, re.MULTILINE))
    found = {}
    for part in re.split(r"^(?=FROM )", text, flags=re.MULTILINE)[1:]:
        base, name = re.match(r"FROM (\S+) AS (\S+)", part).groups()  # type: ignore[union-attr]
        roles = re.search(r"scripts/requirements\.py ([a-z ]+) >", part)
        if roles is None:
            continue
        constraints = re.search(r"pip install -c (\S+) -r", part)
        assert constraints, f"stage {name} installs without constraints"
        # The builder is made of Python's image.
        image = arguments["CUDA_IMAGE" if base == "${CUDA_IMAGE}" else "PYTHON_IMAGE"]
        ubuntu = re.search(r"ubuntu([\d.]+)", image)
        if ubuntu:
            python, glibc = PYTHON_OF_UBUNTU[ubuntu[1]], "2_39"
        else:
            python, glibc = re.search(r":(\d+\.\d+)-slim-bookworm", image)[1], "2_36"  # type: ignore[index]
        found[name] = Stage(python, glibc, tuple(roles[1].split()), ROOT / constraints[1])
    return found


STAGES = stages()


def pins(file: Path) -> dict[str, str]:
    lines = (line.split("==") for line in file.read_text().splitlines() if "==" in line[:60])
    return {name: version for name, version in lines if not name.startswith("#")}


def resolve(stage: Stage, machine: str, folder: Path) -> dict[str, str]:
    """The version of each package that the stage installs on such a machine."""
    script = [sys.executable, str(ROOT / "scripts" / "requirements.py"), *stage.roles]
    wanted = folder / "wanted.txt"
    wanted.write_text(subprocess.run(script, capture_output=True, text=True, check=True).stdout)
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    environment = dict(os.environ)
    if certificates.exists():
        environment.setdefault("SSL_CERT_FILE", str(certificates))
    if index := os.environ.get("PIP_INDEX_URL"):
        environment.setdefault("UV_DEFAULT_INDEX", index)
    done = subprocess.run(
        [
            str(UV), "pip", "compile", str(wanted), f"--constraint={stage.constraints}",
            f"--python-version={stage.python}", "--only-binary=:all:", "--no-annotate",
            f"--python-platform={machine}-manylinux_{stage.glibc}", "--no-header", "--no-config",
        ],
        env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    if done.returncode and NO_INDEX.search(done.stderr):
        pytest.skip(f"no package index can be reached: {done.stderr.strip()[:200]}")
    assert done.returncode == 0, done.stderr
    return dict(line.split("==") for line in done.stdout.split())


@pytest.mark.parametrize("machine", BOTH)
@pytest.mark.parametrize("name", STAGES)
def test_every_requirement_has_a_wheel_for_the_platforms_of_its_image(
    name: str, machine: str, tmp_path: Path
) -> None:
    stage = STAGES[name]
    found = resolve(stage, machine, tmp_path)
    pinned = pins(stage.constraints)
    assert {one: found[one] for one in found.keys() & pinned.keys()} == {
        one: pinned[one] for one in found.keys() & pinned.keys()
    }
    assert ("torch" in found) == ("engine" in stage.roles)
    assert ("sglang-kernel" in found) == ("cuda" in stage.roles)


def test_a_pin_that_exists_nowhere_is_found(tmp_path: Path) -> None:
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("msgspec==0.0.0\n")
    with pytest.raises(AssertionError, match="msgspec==0.0.0"):
        resolve(Stage("3.11", "2_36", ("operator",), constraints), "x86_64", tmp_path)


def test_all_images_that_install_requirements_are_known() -> None:
    assert STAGES.keys() == {"operator-needs", "services-needs", "engine-cpu-needs", "engine-cuda"}
    assert STAGES["engine-cuda"].constraints.name == "cuda.txt"
