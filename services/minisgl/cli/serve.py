"""`minisgl serve MODEL`."""

import argparse
import signal
import sys

from minisgl.cli.flags import Parser, Run, add_flags, add_log_flags, from_args, log_arguments
from minisgl.config import EngineConfig
from minisgl.launch.serve import LocalGatewayConfig, ServeConfig, serve
from minisgl.lifecycle import Lifecycle
from minisgl.logs import set_up_logging

CLUSTER_ONLY = ("pod", "bus_password_file", "bus_ca_file")
"""Flags of the services that mean nothing where the launcher makes the bus."""
MODEL_HELP = "a model folder in Hugging Face format, or the id of a model on its hub"


def api_key(text: str) -> str:
    """A key as given; an empty one would open the door to everybody."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def add_api_key(parser: argparse.ArgumentParser) -> None:
    """`--api-key`, which may be given several times."""
    parser.add_argument(
        "--api-key",
        dest="api_keys",
        metavar="KEY",
        type=api_key,
        action="append",
        default=[],
        help="a key that clients must send; may be repeated (default: no key needed)",
    )


def add_arguments(parser: Parser) -> Run:
    """Declare the arguments."""
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    add_api_key(parser)
    add_flags(parser, LocalGatewayConfig, "HTTP and service", without=CLUSTER_ONLY)
    add_flags(parser, ServeConfig, "processes")
    add_flags(parser, EngineConfig, "engine")
    add_log_flags(parser)
    return run


def run(args: argparse.Namespace, life: Lifecycle) -> int:
    """Serve until SIGINT or SIGTERM."""
    set_up_logging("serve", args.log_format, args.log_level)
    # Until the supervisor takes over: the directory is removed on this way out too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    engine = from_args(EngineConfig, args)
    gateway = from_args(LocalGatewayConfig, args, bus="", api_keys=tuple(args.api_keys))

    def on_ready(url: str) -> None:
        print(f"Serving {engine.model} at {url}", flush=True)
        life.ready(url)

    return serve(
        from_args(ServeConfig, args), engine, gateway, on_ready, log_flags=log_arguments(args)
    )
