"""`minisgl download`, as a process, from a hub on loopback."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub_server import Hub, serving
from tests.support import wait_until

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(range(256)) * 4096,
    "pytorch_model.bin": b"not wanted",
}


@pytest.fixture
def hub() -> Hub:
    return Hub()


@pytest.fixture
def endpoint(hub: Hub) -> Iterator[str]:
    with serving(hub) as address:
        yield address


class Download:
    """Runs of the command with one folder of models."""

    def __init__(self, endpoint: str, tmp_path: Path) -> None:
        self.models = tmp_path / "models"
        self.result = tmp_path / "result"
        self._env = os.environ | {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_XET": "1",
        }
        self._env.pop("HF_TOKEN", None)

    def start(self, *flags: str, repo: str = "hf://org/model") -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "minisgl", "download", repo, str(self.models),
             "--result-file", str(self.result), *flags],
            env=self._env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *flags: str, repo: str = "hf://org/model") -> tuple[int, str, str]:
        process = self.start(*flags, repo=repo)
        out, err = process.communicate(timeout=90)
        return process.returncode, out.strip(), err.strip()


@pytest.fixture
def download(endpoint: str, tmp_path: Path) -> Download:
    return Download(endpoint, tmp_path)


def names(folder: str) -> set[str]:
    return {p.name for p in Path(folder).iterdir() if not p.name.startswith(".")}


def test_a_download_fills_a_folder_of_the_commit_and_writes_the_commit(
    hub: Hub, download: Download
) -> None:
    commit = hub.add("org/model", FILES)
    code, folder, _ = download.run()
    assert (code, folder) == (0, str(download.models / "org--model" / commit))
    assert names(folder) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (Path(folder) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert download.result.read_text() == commit


def test_a_complete_folder_of_a_pinned_commit_needs_no_hub(hub: Hub, download: Download) -> None:
    commit = hub.add("org/model", FILES)
    assert download.run(f"--revision={commit}")[0] == 0
    asked = len(hub.requests)
    assert download.run(f"--revision={commit}")[0] == 0
    assert len(hub.requests) == asked


def test_a_moved_branch_gets_a_folder_of_its_own(hub: Hub, download: Download) -> None:
    hub.add("org/model", FILES)
    _, first, _ = download.run()
    commit = hub.add("org/model", FILES | {"config.json": b'{"new": 1}'})
    assert download.run("--only-commit")[1] == commit
    _, second, _ = download.run()
    assert second.endswith(commit) and second != first
    assert (Path(first) / "config.json").read_bytes() == b"{}"


def test_gateways_get_the_tokenizer_alone(hub: Hub, download: Download) -> None:
    commit = hub.add("org/model", FILES)
    code, folder, _ = download.run("--only-tokenizer")
    assert code == 0 and folder.endswith(f"{commit}-tokenizer")
    assert names(folder) == {"config.json", "tokenizer.json"}


def test_a_file_that_was_broken_off_goes_on_where_it_stopped(hub: Hub, download: Download) -> None:
    weights = bytes(range(256)) * 2**17  # several of the pieces that the client writes at once
    commit = hub.add("org/model", FILES | {"model.safetensors": weights})
    hub.break_off.add("model.safetensors")
    while download.run()[0] != 0:  # the client may go on by itself, or give the error to the caller
        assert not hub.break_off
    data = download.models / "org--model" / commit / "model.safetensors"
    assert data.read_bytes() == weights
    ranges = [r for r in hub.requests if "model.safetensors bytes=" in r]
    assert ranges and not ranges[0].endswith("bytes=0-")


def test_of_two_downloads_at_once_one_fills_the_folder_and_both_succeed(
    hub: Hub, download: Download
) -> None:
    hub.add("org/model", FILES)
    both = [download.start(), download.start()]
    assert [p.wait(timeout=90) for p in both] == [0, 0]
    transfers = [r for r in hub.requests if r.startswith("GET") and "model.safetensors" in r]
    assert len(transfers) == 1
    for process in both:
        process.communicate()


def test_a_lock_is_free_again_when_its_holder_is_killed(
    hub: Hub, download: Download, tmp_path: Path
) -> None:
    commit = hub.add("org/model", FILES)
    folder = download.models / "org--model"
    folder.mkdir(parents=True)
    holder = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, sys, time; f = open(sys.argv[1], 'a')\n"
         "fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); time.sleep(600)",
         str(folder / f"{commit}.lock")],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    process = download.start()
    assert process.stderr is not None
    assert "waiting for" in process.stderr.readline()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    process.communicate(timeout=90)
    assert process.returncode == 0


def test_a_gated_repository_wants_its_token_and_says_so_with_a_code_of_its_own(
    hub: Hub, download: Download, tmp_path: Path
) -> None:
    hub.add("org/model", FILES, token="secret")
    code, _, err = download.run()
    assert code == 3 and "HF_TOKEN" in err and len(err.splitlines()) == 1
    assert "gated" in download.result.read_text()
    token = tmp_path / "token"
    token.write_text("secret\n")
    assert download.run("--token-file", str(token))[0] == 0


@pytest.mark.parametrize(
    ("flags", "repo", "code", "words"),
    [
        (["--revision=nope"], "org/model", 2, "no revision 'nope'"),
        ([], "org/none", 2, "not on the hub"),
        ([], "s3://bucket/model", 2, "must be hf://ORG/NAME"),
        ([], "hf://../etc", 2, "must be hf://ORG/NAME"),
        (["--token-file=/nowhere"], "org/model", 2, "--token-file '/nowhere' cannot be read"),
    ],
)
def test_what_cannot_be_downloaded_is_said_in_one_line(
    hub: Hub, download: Download, flags: list[str], repo: str, code: int, words: str
) -> None:
    hub.add("org/model", FILES)
    got, _, err = download.run(*flags, repo=repo)
    assert got == code and words in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("flags", [[], ["--only-commit"]])
@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://nowhere.invalid"])
def test_a_hub_that_cannot_be_reached_is_named_in_one_line(
    tmp_path: Path, endpoint: str, flags: list[str]
) -> None:
    download = Download(endpoint, tmp_path)
    code, _, err = download.run(*flags)
    assert code == 1 and len(err.splitlines()) == 1
    assert endpoint in err and "'org/model" in err
    assert endpoint in download.result.read_text()


def test_a_killed_download_leaves_no_marker_and_is_continued(hub: Hub, download: Download) -> None:
    commit = hub.add("org/model", FILES)
    process = download.start()
    wait_until(
        lambda: any("model.safetensors" in r for r in hub.requests), 60, lambda: str(hub.requests)
    )
    process.kill()
    process.communicate()
    assert download.run()[0] == 0
    data = download.models / "org--model" / commit / "model.safetensors"
    assert data.read_bytes() == FILES["model.safetensors"]
