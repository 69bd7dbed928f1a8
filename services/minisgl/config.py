"""What every process is started with, and the errors that end a start.

One dataclass for each role. A field's metadata is the help of its flag, so the command line, the
keywords of `minisgl.LLM` and this page cannot differ: the field `page_size` is `--page-size`, and
a field that is True by default, such as `overlap_scheduling`, is switched off by
`--disable-overlap-scheduling`. Nothing here imports torch.
"""

import dataclasses
import os
import re
import secrets
from dataclasses import dataclass, field
from typing import Any

DTYPES = ("auto", "float32", "bfloat16", "float16")
DISABLE_OVERLAP_ENV = "MINISGL_DISABLE_OVERLAP_SCHEDULING"


class UsageError(Exception):
    """Wrong arguments or a missing path: one line for the user, exit code 2."""

    exit_code = 2


class StartError(Exception):
    """Broken files, or a start that failed: one line for the user, exit code 1."""

    exit_code = 1


def flag(default: Any, help: str, *, choices: tuple[str, ...] | None = None) -> Any:
    """A dataclass field that is also a command-line flag. The help leaves the default out."""
    return field(default=default, metadata={"help": help, "choices": choices})


def new_boot() -> int:
    """64 random bits for a boot or an incarnation; never 0."""
    return secrets.randbits(64) | 1


def port_range(text: str) -> range:
    """The ports of `A-B`, both ends included. Raises `UsageError`."""
    ends = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text, re.ASCII)
    first, last = map(int, ends.groups()) if ends else (0, 0)
    if not 1 <= first <= last <= 65535:
        raise UsageError(
            f"--port-range must be A-B, such as 29500-29599, of ports from 1 to 65535: {text!r}"
        )
    return range(first, last + 1)


def env_switch(name: str) -> bool:
    """An environment variable that switches something on: 1/true/yes, or 0/false/no/unset.

    Raises `UsageError` for anything else, so that a typing error is not ignored.
    """
    value = os.environ.get(name, "").strip().lower()
    if value in ("1", "true", "yes"):
        return True
    if value in ("", "0", "false", "no"):
        return False
    raise UsageError(f"{name} must be 1 or 0, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How one TP group computes. The flags of `serve`, `engine`, `chat`, `generate` and `LLM`."""

    model: str
    dtype: str = flag(
        "auto", "type of weights and activations; auto: the model's own", choices=DTYPES
    )
    tensor_parallel_size: int = flag(1, "ranks that share one copy of the model")
    max_running_requests: int = flag(
        256,
        "requests that run at the same time, from the first chunk of their prompt; others wait",
    )
    max_seq_len: int | None = flag(
        None, "longest prompt plus output, in tokens (default: what the model's config allows)"
    )
    max_prefill_tokens: int = flag(
        8192,
        "prompt tokens computed in one step; on a Redis bus fewer, if that would take more than an "
        "eighth of --heartbeat-timeout-seconds",
    )
    page_size: int | None = flag(
        None, "tokens in one page of the KV cache (default: 1 on a CPU, else the backend's choice)"
    )
    num_pages: int | None = flag(
        None, "pages of the KV cache (default: as many as the memory budget holds)"
    )
    memory_ratio: float | None = flag(
        None,
        "share of the free memory for weights and KV cache, 0 to 1 (default: 0.9 on a GPU, "
        "0.5 on a CPU)",
    )
    cache_type: str = flag(
        "radix",
        "prefix cache: radix keeps computed prefixes, naive none",
        choices=("radix", "naive"),
    )
    attention_backend: str = flag(
        "auto",
        "torch; on a CPU also cpu (the project's own, bfloat16); on a GPU fi (FlashInfer), fa "
        "(FlashAttention 3), trtllm, and for decode alone mini (the project's own); or a pair "
        "PREFILL,DECODE such as fa,mini; auto: by device",
    )
    cuda_graph_max_bs: int | None = flag(
        None, "largest decode batch captured as a CUDA graph, 0: none (default: 256)"
    )
    overlap_scheduling: bool = flag(
        True,
        "prepare the next step while a GPU computes this one; outputs are the same either way",
    )
    pynccl: bool = flag(True, "call NCCL directly rather than through torch.distributed")
    load_format: str = flag(
        "auto",
        "auto: safetensors; dummy: random weights from the config alone",
        choices=("auto", "dummy"),
    )
    schedule: str = flag(
        "separate",
        "separate: a step is prefill or decode; mixed: both in one step",
        choices=("separate", "mixed"),
    )
    reserve_tokens: int = flag(
        2048,
        "output tokens ahead for which a request must find pages before it starts; a low number "
        "runs more requests at once, and retracts the youngest when pages run out",
    )
    seed: int = flag(
        0, "seed of dummy weights; with `generate` and `LLM` also of requests that give none"
    )
    device: str = flag("auto", "auto: a GPU if there is one", choices=("auto", "cpu", "cuda"))
    quantization: str = flag(
        "none",
        "int8: weights of 8 bits, made when the model is loaded; with --device cpu and --dtype "
        "bfloat16, on one rank, for models without experts",
        choices=("none", "int8"),
    )
    fake_engine: bool = flag(False, "compute nothing: arbitrary tokens at once, to time the rest")
    fake_step_seconds: float = flag(
        0.0, "with --fake-engine: time that a step takes, in seconds; 0: none"
    )

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                shown = "--" + name.replace("_", "-")
                raise UsageError(f"{shown} must be {allowed}, not {getattr(self, name)!r}")

        for f in dataclasses.fields(self):
            kind: Any = f.type if f.name != "memory_ratio" else float | int | None
            expected = f.type.__name__ if isinstance(f.type, type) else str(f.type)
            check(isinstance(getattr(self, f.name), kind), f.name, f"of type {expected}")
            choices = f.metadata.get("choices")
            if choices:
                check(getattr(self, f.name) in choices, f.name, " or ".join(choices))
        for name in (
            "tensor_parallel_size", "max_running_requests", "max_seq_len", "max_prefill_tokens",
            "page_size", "num_pages", "reserve_tokens",
        ):  # fmt: skip
            value = getattr(self, name)
            check(value is None or value >= 1, name, "at least 1")
        check(
            self.cuda_graph_max_bs is None or self.cuda_graph_max_bs >= 0,
            "cuda_graph_max_bs",
            "0 or more",
        )
        check(0 <= self.fake_step_seconds <= 60, "fake_step_seconds", "between 0 and 60")
        check(
            self.memory_ratio is None or 0 <= self.memory_ratio <= 1,
            "memory_ratio",
            "between 0 and 1",
        )

    @property
    def overlaps(self) -> bool:
        """Whether the overlap loop runs: the flag, unless the environment switches it off."""
        return self.overlap_scheduling and not env_switch(DISABLE_OVERLAP_ENV)


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """What the four services share."""

    bus: str
    """`ipc://DIR` (one machine) or `redis://[[user]:password@]host:port/db`."""
    service: str = "local"
    id: str = "0"
    model: str
    heartbeat_timeout_seconds: float = flag(
        30.0,
        "silence after which another worker is taken for dead, and its requests are computed "
        "again, in seconds",
    )
    drain_seconds: float | None = flag(
        None,
        "time to finish open work after SIGTERM, in seconds; a gateway then ends what is left "
        "with an error, others hand it to a worker that stays (default: half of "
        "--heartbeat-timeout-seconds)",
    )
    pod: str = flag("", "name of the pod, shown in this worker's state")
    bus_password_file: str | None = flag(
        None, "file with the password of Redis, read again at each connection (default: none)"
    )
    bus_ca_file: str | None = flag(
        None,
        "file with the certificate authority of a rediss:// bus, read again at each connection "
        "(default: the system's)",
    )

    def __post_init__(self) -> None:
        if self.heartbeat_timeout_seconds <= 0:
            raise UsageError(
                "--heartbeat-timeout-seconds must be over 0, not "
                f"{self.heartbeat_timeout_seconds!r}"
            )
        if self.drain_seconds is not None and self.drain_seconds < 0:
            raise UsageError(f"--drain-seconds must be 0 or more, not {self.drain_seconds!r}")

    @property
    def drain(self) -> float:
        """Seconds to finish open work after SIGTERM."""
        if self.drain_seconds is not None:
            return self.drain_seconds
        return self.heartbeat_timeout_seconds / 2


@dataclass(frozen=True, kw_only=True)
class ProbedConfig(WorkerConfig):
    """A worker without HTTP: a tokenizer, a detokenizer, and in `RankConfig` a rank."""

    health_dir: str | None = flag(
        None,
        "folder for the files of probes: live, with the seconds of uptime at the last turn of the "
        "worker's loop, and ready, which is there while it serves (default: none)",
    )


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(WorkerConfig):
    """The HTTP service."""

    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(1919, "port to listen on")
    api_keys: tuple[str, ...] = ()
    api_keys_file: str | None = flag(
        None, "file with one API key a line, read again when it changes (default: no key needed)"
    )
    served_model_name: str | None = flag(
        None, "the model's id in the API (default: MODEL as typed)"
    )
    root_path: str = flag("", "prefix that a proxy leaves on every path, such as /qwen")
    max_queued_requests: int = flag(
        1024,
        "choices of requests that may wait for their first token; one more is answered 429. 0 is "
        "as 1: a request waits for nobody",
    )
    max_body_bytes: int = flag(
        16 << 20,
        "size of a request's body, in bytes; an eighth of it for /tokenize and /detokenize, which "
        "take 150 times as much memory. All open requests together may hold 16 times as much",
    )
    request_timeout_seconds: float = flag(
        3600.0,
        "time from the arrival of a request to its last token, in seconds, waiting and replays "
        "included; then it ends with a 504, or an error in its stream",
    )
    max_attempts: int = flag(
        3, "tries of a request in a row without a new token before an error is sent"
    )
    replay_wait_seconds: float = flag(
        600.0,
        "time that an accepted request waits while no group takes it, in seconds; then it ends "
        "with a 503, or an error in its stream",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        limits = {
            "port": (0, 65535),
            "max_queued_requests": (0, None),
            "max_body_bytes": (1024, None),
            "request_timeout_seconds": (0.001, None),
            "max_attempts": (1, None),
            "replay_wait_seconds": (0, None),
        }
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if value < least or (most is not None and value > most):
                allowed = f"at least {least}" if most is None else f"between {least} and {most}"
                raise UsageError(f"--{name.replace('_', '-')} must be {allowed}, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class RankConfig(ProbedConfig):
    """One tensor-parallel rank."""

    group: str = "g0"
    tp_rank: int = 0
    engine: EngineConfig
    revision: str = flag("", "ranks of another revision are refused at rendezvous")
    interface: str | None = flag(
        None, "network interface between ranks (default: that of the route to rank 0)"
    )
    port_range: str | None = flag(None, "A-B: ports that rank 0 may listen on (default: any)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.port_range is not None:
            port_range(self.port_range)
