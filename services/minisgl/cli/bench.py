"""`minisgl bench`: each benchmark is a module that declares its own flags."""

import argparse
import importlib

from minisgl.cli.flags import AddArguments, Commands, Parser, Run
from minisgl.lifecycle import Lifecycle


def _benchmark(name: str) -> AddArguments:
    def add_arguments(parser: Parser) -> Run:
        module = importlib.import_module(f"minisgl.bench.{name}")
        module.add_arguments(parser)

        def run(args: argparse.Namespace, life: Lifecycle) -> int:
            code: int = module.run(args)
            return code

        return run

    return add_arguments


BENCH: Commands = {
    "offline": ("throughput of the engine without HTTP", _benchmark("offline")),
    "timeline": ("where the time of decode steps goes, from a trace", _benchmark("timeline")),
    "serve": ("latencies and throughput of a running server", _benchmark("serve")),
    "bus": ("what Redis costs a token against ZMQ, on a fake engine", _benchmark("bus")),
    "perplexity": (
        "how well a model predicts a text, and what int8 costs",
        _benchmark("perplexity"),
    ),
    "kernels": ("bandwidth of each kernel against its reference", _benchmark("kernels")),
    "attention": ("bandwidth of decode attention on a GPU", _benchmark("attention")),
}
