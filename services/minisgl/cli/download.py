"""`minisgl download REPO DIR`: fill a shared folder of models, once, whoever comes first.

Each commit of each repository has a folder of its own, `DIR/ORG--NAME/COMMIT`, a lock beside it and
a marker in it. So any number of pods may run this on one volume: one downloads, the others wait and
find the marker, and one that is killed is continued by the next.
"""

import argparse
import contextlib
import errno
import fcntl
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from minisgl.cli.flags import Parser, Run
from minisgl.config import StartError, UsageError
from minisgl.hub import COMPLETE, REPO_ID, SpaceError, download, resolve_commit
from minisgl.lifecycle import Lifecycle

_COMMIT = re.compile(r"[0-9a-f]{40}")


def add_arguments(parser: Parser) -> Run:
    """Declare the arguments."""
    parser.add_argument("repo", metavar="REPO", help="hf://ORG/NAME, or ORG/NAME")
    parser.add_argument("dir", metavar="DIR", help="folder of all models; REPO gets its own in it")
    parser.add_argument(
        "--revision", metavar="R", help="branch, tag or commit (default: main, as it is now)"
    )
    parser.add_argument(
        "--only-tokenizer",
        action="store_true",
        help="leave the weights out; into a folder of its own, DIR/ORG--NAME/COMMIT-tokenizer",
    )
    parser.add_argument(
        "--only-commit", action="store_true", help="print the commit of the revision, and no more"
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help="file with the hub's token (default: $HF_TOKEN)"
    )
    parser.add_argument(
        "--result-file",
        metavar="FILE",
        help="write the commit here as well, such as /dev/termination-log; or, when it fails, why",
    )
    return run


def run(args: argparse.Namespace, life: Lifecycle) -> int:
    """Download; prints the folder. Raises `UsageError` (2), `TokenError` (3), `SpaceError` (4)
    and `StartError` (1)."""
    try:
        commit = _download(args)
    except (UsageError, StartError) as error:
        _write_result(args.result_file, str(error))
        raise
    _write_result(args.result_file, commit)
    return 0


def _download(args: argparse.Namespace) -> str:
    repo = args.repo.removeprefix("hf://")
    if not REPO_ID.fullmatch(repo):
        raise UsageError(f"REPO {args.repo!r} must be hf://ORG/NAME or ORG/NAME")
    token = _token(args.token_file)
    files: Literal["all", "tokenizer"] = "tokenizer" if args.only_tokenizer else "all"
    pinned = _COMMIT.fullmatch(args.revision or "")
    if args.only_commit:
        commit = resolve_commit(repo, args.revision, token)
        print(commit)
        return commit
    commit = args.revision if pinned else resolve_commit(repo, args.revision, token)
    name = commit if files == "all" else f"{commit}-tokenizer"
    folder = Path(args.dir) / repo.replace("/", "--") / name
    with _disk(folder):
        # Most starts find all files there: then no lock, no write, and no question to the hub.
        if not (folder / COMPLETE).is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder.with_name(f"{name}.lock")):
                if not (folder / COMPLETE).is_file():
                    download(repo, folder, commit=commit, files=files, token=token)
    print(folder)
    return commit


def _token(path: str | None) -> str | None:
    if path is None:
        return None  # the hub's client reads HF_TOKEN
    try:
        token = Path(path).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--token-file {path!r} cannot be read: {error}") from None
    if not token:
        raise UsageError(f"--token-file {path!r} is empty: put the hub's token in it")
    return token


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file; the kernel gives it up when its holder dies, however it does."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process downloads: waiting for {path}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SpaceError(f"{folder}: {error.strerror}") from None
        raise StartError(f"{folder} cannot be written: {error.strerror or error}") from None


def _write_result(path: str | None, text: str) -> None:
    if path is None:
        return
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"--result-file {path!r} cannot be written: {error.strerror}") from None
