"""How the process of a service ends: all is closed and written, then it is gone."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from minisgl.rundir import LOCK_NAME

PROGRAM = """
import atexit, logging, sys
from minisgl.__main__ import main
from minisgl.tokenizer import worker

def work(config, *, on_ready, stop):
    try:
        print("said on stdout")
        return CODE
    finally:
        logging.getLogger("minisgl").info("closed everything")

worker.run_tokenizer = work
atexit.register(lambda: print("taken apart", file=sys.stderr))
sys.argv[0] = "minisgl"
sys.exit(main())
"""


@pytest.mark.parametrize("code", [0, 5])
def test_a_service_closes_all_and_ends_with_its_code_and_is_not_taken_apart(code: int) -> None:
    with tempfile.TemporaryDirectory(prefix="life-") as tmp:  # short: it is a socket's path
        directory = Path(tmp) / f"minisgl-{os.getuid()}" / "run"
        directory.mkdir(parents=True)
        (directory / LOCK_NAME).touch()
        command = ["tokenizer", f"--bus=ipc://{directory}", "--model=none"]
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM.replace("CODE", str(code)), *command],
            env=os.environ | {"TMPDIR": tmp},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ended.returncode == code, ended.stderr
        assert ended.stdout == "said on stdout\n"
        assert "closed everything" in ended.stderr
        assert "taken apart" not in ended.stderr
        assert not directory.exists()
