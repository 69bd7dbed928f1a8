"""Flags that say how tokens are chosen: those fields of `SamplingParams` that one types by hand.

The table repeats the defaults, because `messages` brings numpy and help must come at once; a test
holds both equal. Only flags that are given are passed on.
"""

import argparse
from collections.abc import Callable
from typing import Any

from minisgl.cli.flags import number, whole_number

FLAGS: dict[str, tuple[Callable[[str], Any], object, str]] = {
    "temperature": (number, 1.0, "0 (greedy) to 2; lower is more predictable"),
    "top_p": (number, 1.0, "keep the most likely tokens up to this sum of probabilities, 0 to 1"),
    "top_k": (whole_number, -1, "keep so many most likely tokens; below 1: all"),
    "min_p": (number, 0.0, "drop tokens below this share of the most likely one, 0 to 1"),
    "max_tokens": (whole_number, None, "most tokens of output (default: the room that is left)"),
    "presence_penalty": (number, 0.0, "for tokens that the output holds, -2 to 2"),
    "frequency_penalty": (number, 0.0, "for each time that the output holds a token, -2 to 2"),
    "repetition_penalty": (number, 1.0, "for tokens of prompt and output, over 0; 1: none"),
}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for each row of the table, `--stop` and `--ignore-eos`."""
    group = parser.add_argument_group("sampling")
    for name, (kind, default, text) in FLAGS.items():
        group.add_argument(
            "--" + name.replace("_", "-"),
            dest=name,
            type=kind,
            metavar="N",
            default=argparse.SUPPRESS,
            help=text if default is None else f"{text} (default: {default})",
        )
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        default=argparse.SUPPRESS,
        help="end the output before this text; may be repeated (default: none)",
    )
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        default=argparse.SUPPRESS,
        help="go on after the end-of-sequence token (default: off)",
    )


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling fields that were given as flags."""
    names = (*FLAGS, "stop", "ignore_eos")
    return {name: getattr(args, name) for name in names if hasattr(args, name)}
