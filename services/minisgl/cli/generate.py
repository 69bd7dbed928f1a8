"""`minisgl generate MODEL PROMPT`: one continuation, with the engine in this process."""

import argparse
import dataclasses
import sys

from minisgl.cli.flags import Parser, Run, add_flags, add_log_flags, from_args
from minisgl.cli.sampling import add_sampling_flags, given_sampling
from minisgl.cli.serve import MODEL_HELP
from minisgl.config import EngineConfig, UsageError
from minisgl.lifecycle import Lifecycle
from minisgl.logs import set_up_logging


def add_arguments(parser: Parser) -> Run:
    """Declare the arguments."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue; - reads stdin")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is a question: apply the model's chat template (default: off)",
    )
    add_sampling_flags(parser)
    add_flags(parser, EngineConfig, "engine")
    add_log_flags(parser, level="warning")
    return run


def run(args: argparse.Namespace, life: Lifecycle) -> int:
    """Print the continuation on stdout."""
    set_up_logging("generate", args.log_format, args.log_level)
    config = from_args(EngineConfig, args)
    from minisgl.hub import resolve_model
    from minisgl.messages import SamplingParams

    try:
        sampling = SamplingParams(**given_sampling(args))
    except ValueError as error:
        field, _, rest = str(error).partition(" ")
        raise UsageError(f"--{field.replace('_', '-')} {rest}") from None
    prompt: str | list[int] = sys.stdin.read() if args.prompt == "-" else args.prompt
    folder = resolve_model(config.model)
    if args.chat:
        from minisgl.text import load_tokenizer

        try:
            prompt = load_tokenizer(folder).encode_chat([{"role": "user", "content": prompt}])
        except ValueError as error:
            raise UsageError(f"--chat: {error}") from None

    from minisgl.llm import LLM

    engine = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    with LLM(**engine | {"model": str(folder)}) as llm:
        try:
            (output,) = llm.generate(prompt if isinstance(prompt, str) else [prompt], sampling)
        except ValueError as error:
            raise UsageError(f"PROMPT: {error}") from None
    print(output.text, flush=True)
    return 0
