"""`minisgl bench perplexity`: how well a model predicts a text, and what quantised weights cost.

The text is cut into windows. Within each, every token but the first is forced upon a request whose
prompt is all that comes before it; its log probability is that of the model's own distribution.
Prompts grow by one token, and the prefix cache holds the rest, so each token costs one step: the
same one, with the same kernels, as in service.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from minisgl.bench import ending_on_signals
from minisgl.bench.arguments import output_file, positive_int
from minisgl.bench.stats import write_json
from minisgl.cli.flags import add_flags, given_values
from minisgl.config import EngineConfig, StartError, UsageError
from minisgl.messages import SamplingParams

if TYPE_CHECKING:
    from minisgl.llm import LLM

_FORCE = 100.0
"""The most that a request may add to a token's logit."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--model", required=True, help="folder or Hugging Face id")
    parser.add_argument(
        "--text", metavar="FILE", help="text in UTF-8 (default: some pages that come along)"
    )
    parser.add_argument(
        "--window",
        type=positive_int,
        metavar="N",
        default=512,
        help="tokens that are predicted from the first of them on, at least 2 (default: 512)",
    )
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="write the figures to this file"
    )
    add_flags(parser, EngineConfig, "engine")


def run(args: argparse.Namespace) -> int:
    """Measure and report; 0. Raises `UsageError` and `StartError`."""
    if args.window < 2:
        raise UsageError("--window must be at least 2 tokens, the second of which is predicted")
    options = given_values(EngineConfig, args)
    quantization = options.get("quantization", "none")
    with ending_on_signals():
        found = {  # what may be refused comes first
            kind: _measure(options | {"quantization": kind}, args)
            for kind in dict.fromkeys((quantization, "none"))
        }
    tokens, plain = found["none"]
    report: dict[str, Any] = {
        "model": args.model, "text": args.text, "window": args.window, "options": options,
        "tokens": tokens, "perplexity": {kind: value for kind, (_, value) in found.items()},
    }  # fmt: skip
    print(f"perplexity of {tokens} tokens: {plain:.4f}")
    if quantization != "none":
        value = found[quantization][1]
        report["change_percent"] = 100 * (value / plain - 1)
        print(f"with --quantization {quantization}: {value:.4f} ({report['change_percent']:+.2f}%)")
    if args.json:
        write_json(args.json, report)
    return 0


def _measure(options: dict[str, Any], args: argparse.Namespace) -> tuple[int, float]:
    from minisgl.llm import LLM  # torch: not for help and usage errors

    with LLM(**options) as llm:
        ids = llm.tokenizer.encode(_text(args.text))
        if len(ids) < 2:
            raise UsageError("--text holds fewer than two tokens")
        if args.window > llm.max_model_len:
            raise UsageError(
                f"--window must be at most {llm.max_model_len} tokens, the longest sequence, not "
                f"{args.window}"
            )
        return perplexity(llm, ids, args.window)


def _text(file: str | None) -> str:
    try:
        if file is None:
            return (resources.files("minisgl.bench") / "perplexity.txt").read_text("utf-8")
        return Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--text {file} cannot be read: {error}") from None


def perplexity(llm: "LLM", ids: Sequence[int], window: int) -> tuple[int, float]:
    """(Tokens that were predicted, e to their mean negative log probability)."""
    windows = [ids[i : i + window] for i in range(0, len(ids), window)]
    logprobs: list[float] = []
    for at in tqdm(range(1, len(windows[0])), unit="step", disable=not sys.stderr.isatty()):
        long = [w for w in windows if len(w) > at]
        sampling = [
            SamplingParams(
                temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=0,
                logit_bias={w[at]: _FORCE},
            )
            for w in long
        ]  # fmt: skip
        for w, output in zip(long, llm.generate([w[:at] for w in long], sampling), strict=True):
            if output.token_ids != [w[at]] or not output.logprobs:
                raise StartError(f"token {w[at]} at place {at} of a window cannot be forced")
            logprobs.append(output.logprobs[0].logprob)
    return len(logprobs), math.exp(-math.fsum(logprobs) / len(logprobs))
