"""Dataclass fields as command-line flags, and back.

A field that was declared with `config.flag` is a flag of its name; its help, its unit and its
default are the field's. A flag that is not given is not in the namespace, so the dataclass alone
knows the defaults.
"""

import argparse
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from minisgl.config import UsageError
from minisgl.lifecycle import Lifecycle
from minisgl.logs import LOG_FORMATS, LOG_LEVELS

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and takes no abbreviated flag."""

    def __init__(self, *, prog: str, usage: str | None = None, description: str | None = None,
                 epilog: str | None = None) -> None:  # fmt: skip
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Raises `UsageError`, which ends with code 2."""
        raise UsageError(f"{message}; see {self.prog} --help")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does it, with a guess at what an unknown flag was meant to be."""
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            if not name.startswith("-"):
                self.error(f"unexpected argument {name!r}")
            near = difflib.get_close_matches(name, self._option_string_actions, n=1)
            self.error(f"unknown flag {name}" + (f" (did you mean {near[0]}?)" if near else ""))
        return known


Run = Callable[[argparse.Namespace, Lifecycle], int]
"""Does what a command is for; the exit code."""
AddArguments = Callable[[Parser], Run]
"""Declares the arguments of a command."""
Commands = dict[str, tuple[str, "AddArguments | Commands"]]
"""Commands by name, each with its help; a command may have commands of its own."""


@dataclass(frozen=True, slots=True)
class Task:
    """A command whose arguments were read."""

    name: str
    run: Callable[[], int]


def whole_number(text: str) -> int:
    """An int; the error says what was given."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None


def number(text: str) -> float:
    """A finite float; the error says what was given."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}")
    return value


_PARSERS: dict[type, Callable[[str], Any]] = {int: whole_number, float: number, str: str}


def help_text(text: str, default: object) -> str:
    """The help of a flag with its default, unless the text has it."""
    text = text.replace("%", "%%")
    return text if default is None or "(default" in text else f"{text} (default: {default})"


def add_flags(
    parser: argparse.ArgumentParser, cls: type, title: str, without: Collection[str] = ()
) -> None:
    """A flag for each field of the dataclass `cls` that was declared with `config.flag`."""
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        if "help" not in f.metadata or f.name in without:
            continue
        name, text = f.name.replace("_", "-"), f.metadata["help"]
        common: dict[str, Any] = {"dest": f.name, "default": argparse.SUPPRESS}
        if f.default is True:
            text = help_text(f"do not {text}", "it does")
            group.add_argument(
                f"--disable-{name}", action="store_const", const=False, help=text, **common
            )
        elif f.default is False:
            text = help_text(text, "off")
            group.add_argument(f"--{name}", action="store_const", const=True, help=text, **common)
        else:
            kind = next(t for t in _members(hints[f.name]) if t is not types.NoneType)
            group.add_argument(
                f"--{name}",
                type=_PARSERS[kind],
                choices=f.metadata.get("choices"),
                metavar=None if f.metadata.get("choices") else _metavar(kind, f.name),
                help=help_text(text, "none" if f.default == "" else f.default),
                **common,
            )


def given_values(cls: type, args: argparse.Namespace) -> dict[str, Any]:
    """The fields of the dataclass `cls` whose flags were given."""
    return {f.name: getattr(args, f.name) for f in dataclasses.fields(cls) if hasattr(args, f.name)}


def from_args(cls: type[T], args: argparse.Namespace, **given: Any) -> T:
    """The dataclass `cls` of the flags that were given, and of `given`, which wins."""
    return cls(**(given_values(cls, args) | given))


def add_log_flags(parser: argparse.ArgumentParser, level: str = "info") -> None:
    """`--log-format` and `--log-level`."""
    group = parser.add_argument_group("log, on stderr")
    group.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default="text",
        help="text: key=value; json: one object a line (default: text)",
    )
    group.add_argument(
        "--log-level",
        choices=LOG_LEVELS,
        default=level,
        help=f"least important records to show (default: {level})",
    )


def log_arguments(args: argparse.Namespace) -> list[str]:
    """The log flags, for a child."""
    return [f"--log-format={args.log_format}", f"--log-level={args.log_level}"]


def _members(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) or (hint,)


def _metavar(kind: type, name: str) -> str:
    if kind is not str:
        return "N"
    return "FILE" if name.endswith("_file") else "TEXT"
