"""Types of the flags of benchmarks, for argparse."""

import argparse
import os
from pathlib import Path


def token_range(text: str) -> tuple[int, int]:
    """`100-400`, or `256` for exactly that many."""
    low, dash, high = text.partition("-")
    try:
        found = (int(low), int(high if dash else low))
    except ValueError:
        found = (0, 0)
    if not 1 <= found[0] <= found[1]:
        raise argparse.ArgumentTypeError(f"must be N or MIN-MAX with 1 <= MIN <= MAX, not {text!r}")
    return found


def positive(text: str) -> float:
    """A number over 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number over 0, not {text!r}")
    return value


def positive_int(text: str) -> int:
    """A whole number over 0."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number over 0, not {text!r}")
    return int(text)


def share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, not {text!r}")
    return value


def output_file(text: str) -> str:
    """A file that can be written: said before a long run, not after it."""
    path = Path(text)
    folder = path.parent
    if (
        path.is_dir()
        or not folder.is_dir()
        or not os.access(path if path.exists() else folder, os.W_OK)
    ):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: check the folder")
    return text


def picture_file(text: str) -> str:
    """A file for a picture, of a type that can be drawn."""
    if Path(text).suffix != ".png":
        raise argparse.ArgumentTypeError(f"{text!r} must end in .png")
    return output_file(text)


def lengths(text: str) -> tuple[int, ...]:
    """`500,2000`: whole numbers over 0."""
    return tuple(positive_int(part.strip()) for part in text.split(","))


def scales(text: str) -> tuple[float, ...]:
    """`0.4,1,1.6`: numbers over 0."""
    return tuple(positive(part.strip()) for part in text.split(","))
