"""`minisgl convert FILE.gguf DIR`."""

import argparse
from pathlib import Path

from minisgl.cli.flags import Parser, Run
from minisgl.config import UsageError
from minisgl.lifecycle import Lifecycle


def add_arguments(parser: Parser) -> Run:
    """Declare the arguments."""
    parser.add_argument("file", metavar="FILE", help="a GGUF file of the llama architecture")
    parser.add_argument("dir", metavar="DIR", help="folder to write, in Hugging Face format")
    return run


def run(args: argparse.Namespace, life: Lifecycle) -> int:
    """Convert; raises `UsageError` for a missing file."""
    file, out = Path(args.file), Path(args.dir)
    if not file.is_file():
        raise UsageError(f"FILE {args.file!r} is no file: check the path")
    if out.exists() and not out.is_dir():
        raise UsageError(f"DIR {args.dir!r} exists and is no folder: choose another name")
    from minisgl.convert import convert_gguf

    convert_gguf(file, out)
    print(f"{out}: model folder, ready for `minisgl serve {out}`")
    return 0
