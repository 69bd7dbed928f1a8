"""The real service of a tiny model: that it ends as a whole, however its end begins."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support import wait_until
from tests.tiny import build_tiny

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")

LIMIT = 60.0
ROLES = ["engine --group=g0 --tp-rank=0", "engine --group=g0 --tp-rank=1", "detokenizer", "gateway"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tiny"))


class Service:
    """A `minisgl serve` whose processes are found by a mark in their environment."""

    def __init__(self, model: Path, *flags: str) -> None:
        self._mark = uuid.uuid4().hex
        self.tmp = Path(tempfile.mkdtemp(prefix="end-"))
        self._errors = self.tmp / "stderr"
        command = ["serve", str(model), "--port=0", "--dtype=float32", "--device=cpu", *flags]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "minisgl", *command, "--num-pages=4096"],
            env=dict(os.environ, MINISGL_TEST_MARK=self._mark, TMPDIR=str(self.tmp)),
            stdout=subprocess.PIPE,
            stderr=self._errors.open("wb"),
            text=True,
        )

    def wait_ready(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert " at http://127.0.0.1:" in line, self.errors()
        return line.rsplit(" ", 1)[1].strip()

    def processes(self) -> dict[int, str]:
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if self._mark.encode() in (entry / "environ").read_bytes():
                        words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                        found[int(entry.name)] = words
                except OSError:
                    continue
        return {pid: words for pid, words in found.items() if words}

    def pid(self, role: str) -> int:
        (pid,) = [p for p, words in self.processes().items() if f"-m minisgl {role} " in words]
        return pid

    def errors(self) -> str:
        return self._errors.read_text()

    def assert_nothing_left(self) -> None:
        wait_until(lambda: not self.processes(), LIMIT, lambda: f"left: {self.processes()}")
        assert list(self.tmp.glob("minisgl-*")) == []

    def close(self) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.tmp)


@pytest.fixture
def service(tiny: Path) -> Iterator[Service]:
    service = Service(tiny, "--tensor-parallel-size=2")
    yield service
    service.close()


@pytest.mark.parametrize("role", ROLES)
def test_the_death_of_any_process_ends_the_service(service: Service, role: str) -> None:
    service.wait_ready()
    os.kill(service.pid(role), signal.SIGKILL)
    assert service.process.wait(LIMIT) == 1
    last = service.errors().splitlines()[-1]
    assert last.startswith("minisgl serve: ") and "was ended by SIGKILL" in last
    service.assert_nothing_left()


def test_the_death_of_the_launcher_ends_the_service(service: Service) -> None:
    service.wait_ready()
    service.process.kill()
    service.assert_nothing_left()


def test_the_death_of_the_launcher_during_the_start_ends_the_service(service: Service) -> None:
    wait_until(lambda: len(service.processes()) == 5, LIMIT, lambda: f"{service.processes()}")
    service.process.kill()
    service.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_open_stream_is_finished_before_a_signal_ends_the_service(
    tiny: Path, number: int
) -> None:
    service = Service(tiny, "--num-tokenizers=1")
    try:
        url = service.wait_ready()
        body = {
            "model": str(tiny),
            "prompt": "a",
            "max_tokens": 200,
            "stream": True,
            "ignore_eos": True,
        }
        events = []
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=LIMIT) as response:
            for line in response.iter_lines():
                if line.startswith("data:"):
                    events.append(line)
                    if len(events) == 1:
                        service.process.send_signal(number)
        assert events[-1] == "data: [DONE]"
        assert any('"finish_reason":"length"' in e.replace(" ", "") for e in events)
        assert service.process.wait(LIMIT) == 0, service.errors()
        service.assert_nothing_left()
    finally:
        service.close()


def test_a_port_can_be_used_again_at_once(tiny: Path) -> None:
    # Connections of the first service linger on the port after its end.
    first = Service(tiny)
    try:
        url = first.wait_ready()
        with httpx.Client() as client:
            assert client.get(f"{url}/health").status_code == 200
            first.process.terminate()
            assert first.process.wait(LIMIT) == 0, first.errors()
    finally:
        first.close()
    second = Service(tiny, f"--port={url.rsplit(':', 1)[1]}")
    try:
        assert second.wait_ready() == url
    finally:
        second.close()


def test_a_broken_model_is_one_last_line_and_exit_code_1(tiny: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(tiny, tmp_path / "broken")
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])
    service = Service(broken)
    try:
        assert service.process.wait(LIMIT) == 1
        last = service.errors().splitlines()[-1]
        assert last.startswith("minisgl engine: ") and weights.name in last
        assert "Traceback" not in service.errors()
        service.assert_nothing_left()
    finally:
        service.close()
