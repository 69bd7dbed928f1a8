"""Where a model's files are: a local folder, or a repository on the Hugging Face hub.

What looks like a path (it starts with `.`, `/` or `~`, or it exists) is a folder and is never
asked for on the hub, so a typing error in a path cannot become a download.
"""

import contextlib
import errno
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from minisgl.config import StartError, UsageError

REPO_ID = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*/)?[A-Za-z0-9][A-Za-z0-9._-]*")
"""A repository's name, as the custom resource admits it."""
_TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt"]
_IGNORED = ["original/*", "onnx/*", "consolidated*"]
COMPLETE = ".minisgl-complete"
"""Marker in a folder that `download` has filled; a folder without it is not used."""


class TokenError(UsageError):
    """The hub wants another token: exit code 3."""

    exit_code = 3


class SpaceError(StartError):
    """The disk is full: exit code 4."""

    exit_code = 4


def resolve_model(
    model: str, *, revision: str | None = None, files: Literal["all", "tokenizer"] = "all"
) -> Path:
    """The local folder of `model`; a repository of the hub is downloaded (or found in its cache).

    `files="tokenizer"` leaves the weights out: that is all that gateways, tokenizers and
    detokenizers need. Raises `UsageError` for a folder that is missing or is no model and for a
    repository that does not exist, `StartError` for a download that failed.
    """
    try:
        local = Path(model).expanduser()
        if model.startswith((".", "/", "~")) or local.exists():
            return _checked_folder(model, local)
    except (OSError, RuntimeError) as error:  # no such user, too long a name, a closed folder
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"model folder {model[:100]!r} cannot be used: {reason}") from None
    if not REPO_ID.fullmatch(model):
        raise UsageError(
            f"model {model!r} is neither an existing folder nor a Hugging Face id such as "
            "HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    return _download(model, revision, files)


def _checked_folder(model: str, folder: Path) -> Path:
    if not folder.exists():
        raise UsageError(f"model folder {model!r} does not exist: check the path")
    if folder.suffix == ".gguf":
        raise UsageError(
            f"model {model!r} is a GGUF file: make a model folder of it with "
            f"`minisgl convert {model} DIR` and give that"
        )
    if not folder.is_dir():
        raise UsageError(f"model {model!r} is a file: give the folder that holds config.json")
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"model folder {model!r} holds no config.json: give a folder in Hugging Face format"
        )
    return folder.resolve()


def has_tokenizer(folder: Path) -> bool:
    """Whether some file of the folder can be a tokenizer's."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken")
    return any(next(folder.glob(name), None) for name in names)


def require_tokenizer(folder: Path) -> None:
    """Raises `StartError` if no file of the folder can be a tokenizer's."""
    if not has_tokenizer(folder):
        raise StartError(f"model folder {folder} holds no tokenizer: tokenizer.json is missing")


def _download(model: str, revision: str | None, files: Literal["all", "tokenizer"]) -> Path:
    from huggingface_hub import snapshot_download

    with _told(model, revision):
        folder = Path(
            snapshot_download(
                model,
                revision=revision,
                allow_patterns=_patterns(files),
                ignore_patterns=_IGNORED,
            )
        )
    return _checked_download(model, revision, folder)


def resolve_commit(model: str, revision: str | None, token: str | None = None) -> str:
    """The commit (40 hex digits) that a branch, tag or commit of a repository names now.

    Raises what `download` raises.
    """
    from huggingface_hub import HfApi

    with _told(model, revision):
        commit = HfApi().model_info(model, revision=revision, token=token).sha
    if commit is None:
        raise StartError(f"model {_at(model, revision)!r}: the hub names no commit for it")
    return commit


def download(
    model: str,
    folder: Path,
    *,
    commit: str,
    files: Literal["all", "tokenizer"] = "all",
    token: str | None = None,
) -> None:
    """Fill `folder` with the files of a repository at `commit`, and mark it complete.

    Files that are there are kept, and one that was broken off goes on where it stopped. The caller
    sees to it that nobody else fills the folder. Raises `TokenError`, `SpaceError`, `UsageError`
    for a repository or commit that does not exist, and `StartError` for a hub that fails.
    """
    from huggingface_hub import snapshot_download

    with _told(model, commit):
        snapshot_download(
            model,
            revision=commit,
            local_dir=folder,
            token=token,
            allow_patterns=_patterns(files),
            ignore_patterns=_IGNORED,
        )
    _checked_download(model, commit, folder)
    (folder / COMPLETE).write_text(commit + "\n")


def _patterns(files: Literal["all", "tokenizer"]) -> list[str]:
    return [*_TOKENIZER_FILES, *(["*.safetensors"] if files == "all" else [])]


def _at(model: str, revision: str | None) -> str:
    return f"{model}@{revision}" if revision else model


def _checked_download(model: str, revision: str | None, folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"model {_at(model, revision)!r} holds no config.json: it is not in Hugging Face format"
        )
    return folder


@contextlib.contextmanager
def _told(model: str, revision: str | None) -> Iterator[None]:
    """Turns what the hub's client raises into one line for the user."""
    from huggingface_hub import constants, errors

    # A host that cannot be reached, in the words of the HTTP client that this version uses.
    http_error = getattr(errors, "HTTPError", OSError)
    at = _at(model, revision)
    try:
        yield
    except errors.GatedRepoError as error:
        raise TokenError(
            f"model {at!r} is gated: accept its terms on its page of the hub and set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UsageError(f"model {model!r} has no revision {revision!r} on the hub") from error
    except errors.RepositoryNotFoundError as error:
        raise UsageError(
            f"model {at!r} is not on the hub (a private one needs HF_TOKEN), and no folder of "
            "that name exists here"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise StartError(
            f"model {at!r} is neither a folder here nor in the download cache, and the hub "
            f"{constants.ENDPOINT} cannot be reached (or HF_HUB_OFFLINE is set)"
        ) from error
    except (errors.HfHubHTTPError, http_error, OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SpaceError(f"model {at!r} does not fit on the disk: {reason}") from error
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            raise TokenError(f"model {at!r}: the hub refuses the token: {reason}") from error
        raise StartError(
            f"model {at!r} could not be downloaded from {constants.ENDPOINT}: {reason}"
        ) from error


def read_json(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """The object in a JSON file of a model; {} if there is no file and `missing_ok`.

    `StartError` if it is missing otherwise, unreadable or no object.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        if missing_ok:
            return {}
        raise StartError(f"{path}: no such file; a model is a Hugging Face folder") from None
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"{path}: cannot be read: {error}") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise StartError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise StartError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def model_vocab_size(folder: Path) -> int | None:
    """Rows of the model's embedding by config.json, which may exceed the tokenizer's tokens."""
    config = read_json(folder / "config.json", missing_ok=True)
    size = config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))
    return size if type(size) is int and size > 0 else None
