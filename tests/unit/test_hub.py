"""Where a model's files are found, and the one line that says why they are not."""

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from minisgl.config import StartError, UsageError
from minisgl.hub import model_vocab_size, require_tokenizer, resolve_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"eos_token_id": 2, "vocab_size": 300}')
    return tmp_path


def test_a_folder_with_a_config_is_a_model(folder: Path) -> None:
    assert resolve_model(str(folder)) == folder


def test_a_relative_folder_is_found_without_a_dot(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    assert resolve_model(folder.name) == folder


@pytest.mark.parametrize("model", ["/no/such", "./no", "~/no-such-model", "../no/such"])
def test_what_looks_like_a_path_is_never_asked_for_on_the_hub(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", asked.append, raising=False)
    with pytest.raises(UsageError, match="does not exist") as caught:
        resolve_model(model)
    assert model in str(caught.value)
    assert asked == []


def test_a_folder_or_file_that_is_no_model_says_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    (tmp_path / "file").touch()
    for path, words in (
        (tmp_path, "holds no config.json"),
        (tmp_path / "m.gguf", "minisgl convert"),
        (tmp_path / "file", "give the folder"),
    ):
        with pytest.raises(UsageError, match=words):
            resolve_model(str(path))


@pytest.mark.parametrize("model", ["~no-such-user-here/x", "/" + "a" * 5000, "a" * 5000])
def test_a_path_that_cannot_be_looked_at_is_one_line(model: str) -> None:
    with pytest.raises(UsageError, match="cannot be used") as caught:
        resolve_model(model)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("model", ["a/b/c", "", "with space/x", "s3://bucket/x"])
def test_what_is_neither_a_path_nor_an_id_is_refused(model: str) -> None:
    with pytest.raises(UsageError):
        resolve_model(model)


@pytest.mark.parametrize("bad", ["{", "[]", "[" * 100_000])
def test_a_broken_config_names_its_file(tmp_path: Path, bad: str) -> None:
    (tmp_path / "config.json").write_text(bad)
    with pytest.raises(StartError, match=r"config\.json"):
        model_vocab_size(tmp_path)


@pytest.mark.parametrize(
    ("config", "want"),
    [({"vocab_size": 9}, 9), ({"text_config": {"vocab_size": 8}}, 8), ({}, None)],
)
def test_the_vocabulary_of_the_model(tmp_path: Path, config: Any, want: int | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_vocab_size(tmp_path) == want


# --- the hub: a small server speaks for it, in a process of its own that reads HF_ENDPOINT


class Hub(http.server.BaseHTTPRequestHandler):
    """Knows `org/good`; `org/gated` is gated, all else is unknown."""

    files = {"config.json": b'{"vocab_size": 5}', "tokenizer.json": b"{}",
             "model.safetensors": b"weights", "pickle.bin": b"no"}  # fmt: skip

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def answer(self, body: bool) -> None:
        commit = "0" * 40
        headers = {"X-Repo-Commit": commit}
        data, status = b"", 200
        if "org/gated" in self.path:
            status, headers = 403, {"X-Error-Code": "GatedRepo"}
        elif "org/good" not in self.path:
            status, headers = 401, {"X-Error-Code": "RepoNotFound"}
        elif "/no-such" in self.path:
            status, headers = 404, {"X-Error-Code": "RevisionNotFound"}
        elif self.path.startswith("/api/"):
            names = [{"rfilename": n} for n in self.files]
            data = json.dumps({"id": "org/good", "sha": commit, "siblings": names}).encode()
            if "/tree/" in self.path:
                data = json.dumps(
                    [{"type": "file", "path": n, "size": len(b), "oid": n}
                     for n, b in self.files.items()]
                ).encode()  # fmt: skip
        else:
            data = self.files[self.path.rpartition("/")[2]]
            headers["ETag"] = f'"{self.path.rpartition("/")[2]}"'
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def ask(endpoint: str, home: Path, call: str, **env: str) -> list[str]:
    """What `resolve_model(...)` prints in a fresh process: names of files, or the error."""
    program = (
        "from minisgl.hub import resolve_model\n"
        f"try: print('\\n'.join(sorted(p.name for p in {call}.iterdir())))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    given = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_TOKEN": "t"} | env
    done = subprocess.run(
        [sys.executable, "-c", program], env=given, cwd=home, timeout=60, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout.splitlines()


def test_a_repository_is_downloaded_without_what_is_not_needed(
    endpoint: str, tmp_path: Path
) -> None:
    assert ask(endpoint, tmp_path, "resolve_model('org/good', files='tokenizer')") == [
        "config.json", "tokenizer.json",
    ]  # fmt: skip
    assert ask(endpoint, tmp_path, "resolve_model('org/good')") == [
        "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    offline = ask(endpoint, tmp_path, "resolve_model('org/good')", HF_HUB_OFFLINE="1")
    assert offline == ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize(
    ("call", "env", "words"),
    [
        ("resolve_model('org/gated')", {}, "TokenError model 'org/gated' is gated"),
        ("resolve_model('org/none')", {}, "UsageError model 'org/none' is not on the hub"),
        ("resolve_model('org/good', revision='no-such')", {}, "UsageError model 'org/good' has no"),
        ("resolve_model('org/x')", {"HF_HUB_OFFLINE": "1"}, "StartError model 'org/x' is neither"),
        ("resolve_model('org/x')", {"HF_ENDPOINT": "http://127.0.0.1:9"},
         "StartError model 'org/x' is neither"),
    ],
)  # fmt: skip
def test_what_the_hub_does_not_give_is_said_in_one_line(
    endpoint: str, tmp_path: Path, call: str, env: dict[str, str], words: str
) -> None:
    (line,) = ask(endpoint, tmp_path, call, **env)
    assert line.startswith(words)


def test_a_folder_without_a_tokenizer_is_named_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StartError, match=r"holds no tokenizer: tokenizer\.json is missing"):
        require_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    require_tokenizer(tmp_path)
