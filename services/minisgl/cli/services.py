"""`minisgl gateway | tokenizer | detokenizer | engine`: one process of a service each.

The launcher starts these on one machine, and Kubernetes in a cluster.
"""

import argparse
import socket
from collections.abc import Callable, Sequence

from minisgl.cli.flags import (
    Parser,
    Run,
    add_flags,
    add_log_flags,
    from_args,
    log_arguments,
    whole_number,
)
from minisgl.cli.serve import MODEL_HELP, add_api_key
from minisgl.config import EngineConfig, GatewayConfig, ProbedConfig, RankConfig, UsageError
from minisgl.launch.serve import as_arguments
from minisgl.launch.supervisor import ChildSpec, Supervisor, minisgl_command
from minisgl.lifecycle import Lifecycle, end_process
from minisgl.logs import set_up_logging

POD_STOP_SECONDS = 24 * 3600.0
"""Ranks of a pod may finish what they hold; the pod's own grace period ends them."""


def add_gateway(parser: Parser) -> Run:
    """Declare the arguments of `minisgl gateway`."""
    _add_worker(parser, GatewayConfig, "HTTP and service")
    add_api_key(parser)
    parser.add_argument("--http-fd", type=whole_number, help=argparse.SUPPRESS)
    parser.add_argument("--listen-when-ready", action="store_true", help=argparse.SUPPRESS)
    return _run_gateway


def add_tokenizer(parser: Parser) -> Run:
    """Declare the arguments of `minisgl tokenizer`."""
    _add_worker(parser, ProbedConfig, "service")
    return _run_tokenizer


def add_detokenizer(parser: Parser) -> Run:
    """Declare the arguments of `minisgl detokenizer`."""
    _add_worker(parser, ProbedConfig, "service")
    parser.add_argument("--also-tokenize", action="store_true", help=argparse.SUPPRESS)
    return _run_detokenizer


def add_engine(parser: Parser) -> Run:
    """Declare the arguments of `minisgl engine`."""
    _add_worker(parser, RankConfig, "service", with_id=False)
    parser.add_argument(
        "--group", metavar="G", default="g0", help="name of the TP group (default: g0)"
    )
    parser.add_argument(
        "--tp-rank",
        metavar="R",
        type=whole_number,
        help="which rank this is (default: 0, where --tensor-parallel-size is 1)",
    )
    parser.add_argument(
        "--pod-index", metavar="I", type=whole_number, help="which pod of the group this is"
    )
    parser.add_argument(
        "--ranks-per-pod",
        metavar="N",
        type=whole_number,
        help="with --pod-index I: run the ranks I*N to I*N+N-1 (default: 1)",
    )
    add_flags(parser, EngineConfig, "engine")
    return _run_engine


def _add_worker(parser: Parser, cls: type, title: str, with_id: bool = True) -> None:
    parser.add_argument(
        "--bus",
        metavar="URL",
        required=True,
        help="ipc://DIR on one machine; redis://[[user]:password@]host:port/db or rediss://... in "
        "a cluster (a password in the URL is for tests)",
    )
    parser.add_argument(
        "--service", metavar="S", default="local", help="name of the service (default: local)"
    )
    if with_id:
        parser.add_argument(
            "--id", metavar="ID", default="0", help="which worker of its role this is (default: 0)"
        )
    parser.add_argument("--model", metavar="MODEL", required=True, help=MODEL_HELP)
    add_flags(parser, cls, title)
    add_log_flags(parser)


def _work(name: str, args: argparse.Namespace, life: Lifecycle, work: Callable[[], int]) -> int:
    """Run one service with what all of them share, and end the process with its exit code.

    Returns only by raising, when the start failed.
    """
    life.handle_signals()
    set_up_logging(name, args.log_format, args.log_level)
    with life.directory(args.bus):
        code = work()
    end_process(code)


def _run_gateway(args: argparse.Namespace, life: Lifecycle) -> int:
    config = from_args(GatewayConfig, args, api_keys=tuple(args.api_keys))

    def work() -> int:
        from minisgl.gateway.main import run_gateway

        sock = None
        if args.http_fd is not None:
            try:
                sock = socket.socket(fileno=args.http_fd)
            except OSError as error:
                raise UsageError(f"--http-fd {args.http_fd} is no socket: {error}") from None
            sock.set_inheritable(False)
        return run_gateway(
            config,
            sock=sock,
            listen_when_ready=args.listen_when_ready,
            on_ready=life.ready,
            asked=life.stop,
        )

    return _work("gateway", args, life, work)


def _run_tokenizer(args: argparse.Namespace, life: Lifecycle) -> int:
    config = from_args(ProbedConfig, args)

    def work() -> int:
        from minisgl.tokenizer.worker import run_tokenizer

        return run_tokenizer(config, on_ready=life.ready, stop=life.stop)

    return _work(f"tokenizer-{config.id}", args, life, work)


def _run_detokenizer(args: argparse.Namespace, life: Lifecycle) -> int:
    config = from_args(ProbedConfig, args)

    def work() -> int:
        from minisgl.detokenizer.worker import run_detokenizer

        return run_detokenizer(
            config, tokenizes=args.also_tokenize, on_ready=life.ready, stop=life.stop
        )

    return _work(f"detokenizer-{config.id}", args, life, work)


def _run_engine(args: argparse.Namespace, life: Lifecycle) -> int:
    engine = from_args(EngineConfig, args)
    ranks = _ranks(args, engine.tensor_parallel_size)
    configs = [
        from_args(RankConfig, args, engine=engine, tp_rank=rank, id=f"{args.group}/{rank}")
        for rank in ranks
    ]
    if len(configs) > 1:
        return _supervise(configs, log_arguments(args))

    def work() -> int:
        from minisgl.scheduler.main import run_engine

        return run_engine(configs[0], on_ready=life.ready, stop=life.stop)

    return _work(f"rank-{ranks[0]}", args, life, work)


def _ranks(args: argparse.Namespace, size: int) -> Sequence[int]:
    """The ranks that this process is asked to run."""
    alone = size == 1 and args.pod_index is None
    rank = 0 if args.tp_rank is None and alone else args.tp_rank
    if (rank is None) == (args.pod_index is None):
        raise UsageError(
            "give either --tp-rank R, or --pod-index I with --ranks-per-pod N: "
            f"--tensor-parallel-size is {size}"
        )
    if args.pod_index is None:
        if args.ranks_per_pod is not None:
            raise UsageError("--ranks-per-pod goes with --pod-index, not with --tp-rank")
        ranks, shown = range(rank, rank + 1), f"--tp-rank {rank}"
    else:
        count = 1 if args.ranks_per_pod is None else args.ranks_per_pod
        if count < 1:
            raise UsageError(f"--ranks-per-pod must be at least 1, not {count}")
        first = args.pod_index * count
        ranks = range(first, first + count)
        shown = f"--pod-index {args.pod_index} with --ranks-per-pod {count}"
    if not 0 <= ranks[0] <= ranks[-1] < size:
        raise UsageError(
            f"{shown} asks for rank {ranks[-1]}, but --tensor-parallel-size is {size}: ranks are "
            f"0 to {size - 1}"
        )
    return ranks


def _supervise(configs: Sequence[RankConfig], log_flags: Sequence[str]) -> int:
    """Run several ranks as processes of their own; the first failing one's code."""
    children = []
    for config in configs:
        command = minisgl_command(
            "engine",
            f"--bus={config.bus}",
            f"--service={config.service}",
            f"--model={config.model}",
            f"--group={config.group}",
            f"--tp-rank={config.tp_rank}",
            *as_arguments(config),
            *as_arguments(config.engine),
            *log_flags,
        )
        children.append(
            ChildSpec(
                name=f"rank {config.tp_rank}",
                command=command,
                waited=False,
                stop_seconds=POD_STOP_SECONDS,
            )
        )
    supervisor = Supervisor("minisgl engine", children, startup_seconds=0, end_with_first=False)
    return supervisor.run(lambda: None)
