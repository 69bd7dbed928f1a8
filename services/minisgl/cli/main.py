"""`minisgl`: reads the command line and runs one command.

Modules that are heavy (torch, fastapi) are imported when their command runs, so that help and
usage errors come at once.
"""

import difflib
import io
import sys
from collections.abc import Sequence

from minisgl import __version__
from minisgl.cli import chat, compile, convert, download, generate, serve, services
from minisgl.cli.bench import BENCH
from minisgl.cli.flags import Commands, Parser, Task
from minisgl.lifecycle import Lifecycle, report_errors

COMMANDS: Commands = {
    "serve": ("serve a model over HTTP on this machine", serve.add_arguments),
    "chat": ("talk to a model in the terminal", chat.add_arguments),
    "generate": ("print the continuation of a prompt", generate.add_arguments),
    "convert": ("make a model folder of a GGUF file", convert.add_arguments),
    "download": ("fill a shared folder with a model of the hub", download.add_arguments),
    "compile": ("compile kernels where there is no GPU", compile.add_arguments),
    "bench": ("measure the engine, a server or the kernels", BENCH),
    "gateway": ("service: the HTTP API", services.add_gateway),
    "tokenizer": ("service: chat templates and token ids", services.add_tokenizer),
    "detokenizer": ("service: the text of the output", services.add_detokenizer),
    "engine": ("service: one tensor-parallel rank, or those of one pod", services.add_engine),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: that of the process); the exit code.

    0: done; 2: wrong arguments or a missing path; 1: broken files or a failed start.
    """
    task: list[Task] = []
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path may hold bytes that are no text
        sys.stdout.reconfigure(errors="backslashreplace")

    def read() -> int:
        life = Lifecycle()
        task.append(_parse("minisgl", COMMANDS, sys.argv[1:] if argv is None else argv, life))
        return 0

    code = report_errors("minisgl", read)
    return report_errors(task[0].name, task[0].run) if task else code


def _parse(prog: str, commands: Commands, argv: Sequence[str], life: Lifecycle) -> Task:
    """The command that `argv` asks for, with its arguments. Only its own parser is built."""
    width = max(map(len, commands))
    listed = "\n".join(f"  {name:{width}}  {help}" for name, (help, _) in commands.items())
    top = Parser(
        prog=prog,
        usage=f"{prog} COMMAND ...",
        epilog=f"commands:\n{listed}\n\n`{prog} COMMAND --help` lists the flags of a command.",
    )
    top.add_argument("--version", action="version", version=f"minisgl {__version__}")
    name = argv[0] if argv else ""
    if name.startswith("-"):
        top.parse_args(argv)  # --help and --version end here
    if name not in commands or not name:
        near = difflib.get_close_matches(name, commands, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        given = f"unknown command {name!r}{hint}" if name else "a command is missing"
        top.error(f"{given}: choose one of {', '.join(commands)}")
    help, entry = commands[name]
    if isinstance(entry, dict):
        return _parse(f"{prog} {name}", entry, argv[1:], life)
    parser = Parser(prog=f"{prog} {name}", description=help[0].upper() + help[1:] + ".")
    run = entry(parser)
    args = parser.parse_args(argv[1:])
    return Task(parser.prog, lambda: run(args, life))
