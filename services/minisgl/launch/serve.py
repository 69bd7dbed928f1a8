"""`minisgl serve`: which processes make a service on one machine, and their command lines."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.config import (
    EngineConfig,
    GatewayConfig,
    UsageError,
    WorkerConfig,
    flag,
)
from minisgl.gateway.listen import bind_http, service_url
from minisgl.hub import require_tokenizer, resolve_model
from minisgl.launch.supervisor import ChildSpec, Supervisor, minisgl_command
from minisgl.rundir import RunDirectory

GROUP = "g0"
LATE_SECONDS = 5.0
"""What a process gets beyond its drain time before it is killed."""
_WORKER = [f.name for f in dataclasses.fields(WorkerConfig)]


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """What only the launcher reads."""

    num_tokenizers: int = flag(
        0, "processes that only tokenize; 0: the detokenizer's process does it too"
    )
    startup_timeout_seconds: float = flag(
        1800.0, "time in which everything must be ready, in seconds"
    )

    def __post_init__(self) -> None:
        if self.num_tokenizers < 0:
            raise UsageError(f"--num-tokenizers must be 0 or more, not {self.num_tokenizers}")
        if self.startup_timeout_seconds <= 0:
            raise UsageError(
                f"--startup-timeout-seconds must be over 0, not {self.startup_timeout_seconds:g}"
            )


@dataclass(frozen=True, kw_only=True)
class LocalGatewayConfig(GatewayConfig):
    """The gateway of one machine: the launcher sees what dies, so silence hardly ever means it.

    A CPU may take minutes over one step of long prompts. With the time-out of a cluster the gateway
    would take such a step for a loss, and have it computed again.
    """

    heartbeat_timeout_seconds: float = flag(
        600.0,
        "time in which a step must end, in seconds: a request that is silent for longer is "
        "computed again",
    )
    drain_seconds: float | None = flag(
        15.0, "time to finish open streams after SIGTERM or Ctrl-C, in seconds"
    )


def as_arguments(config: Any, *, of: type | None = None, without: Sequence[str] = ()) -> list[str]:
    """The command line that makes `config` again: the flags that differ from their defaults.

    `of` is the class of the reader, where it has other defaults than that of `config`.
    """
    arguments = []
    for f in dataclasses.fields(of or config):
        value = getattr(config, f.name)
        if "help" not in f.metadata or f.name in without or value == f.default:
            continue
        shown = f.name.replace("_", "-")
        if f.default is True:
            arguments.append(f"--disable-{shown}")
        elif f.default is False:
            arguments.append(f"--{shown}")
        else:
            arguments.append(f"--{shown}={value}")
    return arguments


def serve_children(
    bus: str,
    folder: str,
    engine: EngineConfig,
    gateway: GatewayConfig,
    *,
    num_tokenizers: int,
    http_fd: int,
    log_flags: Sequence[str] = (),
) -> list[ChildSpec]:
    """The processes of a service for the model in `folder`.

    The gateway ends first: it finishes the open streams, for which it needs all the others.
    """
    shared = [f"--bus={bus}", f"--model={folder}", *log_flags]
    shared += as_arguments(gateway, of=WorkerConfig)

    def child(name: str, *arguments: str, waited: bool = True) -> ChildSpec:
        command = minisgl_command(*arguments, *shared)
        return ChildSpec(name=name, command=command, waited=waited, stage=1)

    children = [
        child(
            f"rank {rank}",
            "engine",
            f"--group={GROUP}",
            f"--tp-rank={rank}",
            *as_arguments(engine),
            waited=rank == 0,  # rank 0 answers for all, after a barrier
        )
        for rank in range(engine.tensor_parallel_size)
    ]
    also = [] if num_tokenizers else ["--also-tokenize"]
    children.append(child("detokenizer", "detokenizer", "--id=0", *also))
    children += [child(f"tokenizer {i}", "tokenizer", f"--id={i}") for i in range(num_tokenizers)]
    front = [f"--served-model-name={gateway.served_model_name or engine.model}"]
    front += [f"--api-key={key}" for key in gateway.api_keys]
    front += as_arguments(gateway, of=GatewayConfig, without=[*_WORKER, "served_model_name"])
    command = minisgl_command(
        "gateway", "--id=0", f"--http-fd={http_fd}", "--listen-when-ready", *front, *shared
    )
    stop_seconds = gateway.drain + LATE_SECONDS
    children.append(
        ChildSpec(name="gateway", command=command, fds=(http_fd,), stop_seconds=stop_seconds)
    )
    return children


def serve(
    config: ServeConfig,
    engine: EngineConfig,
    gateway: GatewayConfig,
    on_ready: Callable[[str], None],
    *,
    log_flags: Sequence[str] = (),
) -> int:
    """Run the whole service until it is ended; the exit code. `on_ready` gets the URL.

    The port is taken first and the model found next, so that both fail before anything is loaded.
    """
    with bind_http(gateway.host, gateway.port) as http:
        folder = resolve_model(engine.model)
        require_tokenizer(folder)
        directory = RunDirectory.create()
        try:
            children = serve_children(
                f"ipc://{directory.path}",
                str(folder),
                engine,
                gateway,
                num_tokenizers=config.num_tokenizers,
                http_fd=http.fileno(),
                log_flags=log_flags,
            )
            url = service_url(gateway.host, http)
            supervisor = Supervisor(
                "minisgl serve", children, startup_seconds=config.startup_timeout_seconds
            )
            return supervisor.run(lambda: on_ready(url))
        finally:
            directory.release()
