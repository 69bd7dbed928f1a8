"""What the custom resource admits, the flags of the services take.

docs/design.md says which field is which flag; here are the ends of what each field may hold.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from minisgl.bus.rendezvous import listeners
from minisgl.cli.flags import Parser, from_args
from minisgl.cli.services import add_detokenizer, add_engine, add_gateway, add_tokenizer
from minisgl.config import EngineConfig, GatewayConfig, RankConfig, StartError, WorkerConfig
from minisgl.hub import REPO_ID
from minisgl.scheduler.main import run_engine

ROOT = Path(__file__).parents[2]
INT32 = 2**31 - 1
COMMANDS = {
    "gateway": add_gateway,
    "tokenizer": add_tokenizer,
    "detokenizer": add_detokenizer,
    "engine": add_engine,
}
ALL = tuple(COMMANDS)
FLAGS: list[tuple[str, Sequence[str], str, Sequence[object]]] = [
    ("model.uri", ALL, "--model", ["/models/x", "/a b"]),
    ("model.servedName", ["gateway"], "--served-model-name", ["Qwen/Qwen3-8B", "x" * 253]),
    ("parallelism.tensor", ["engine"], "--tensor-parallel-size", [1, 64]),
    ("parallelism.gpusPerPod", ["engine"], "--ranks-per-pod", [1, 16]),
    ("engine.device", ["engine"], "--device", ["cuda", "cpu"]),
    ("engine.dtype", ["engine"], "--dtype", ["auto", "float16", "bfloat16", "float32"]),
    ("engine.memoryRatio", ["engine"], "--memory-ratio", ["0.0", "0.0001", "0.85", "1", "1.0000"]),
    ("engine.maxRunningRequests", ["engine"], "--max-running-requests", [1, INT32]),
    ("engine.maxSeqLen", ["engine"], "--max-seq-len", [1, INT32]),
    ("engine.maxPrefillTokens", ["engine"], "--max-prefill-tokens", [1, INT32]),
    ("engine.pageSize", ["engine"], "--page-size", [1, INT32]),
    ("engine.attentionBackend", ["engine"], "--attention-backend", ["torch", "fa,fi", "trtllm"]),
    ("network.interface", ["engine"], "--interface", ["eth0", "x" * 64]),
    ("network.portRange", ["engine"], "--port-range", ["1024-1031", "20000-20255", "61440-65535"]),
    ("redis", ALL, "--bus", ["redis://r-redis:6379/0", "rediss://u@[::1]:6380/1023"]),
    ("redis.external.passwordSecretRef", ALL, "--bus-password-file", ["/redis/password"]),
    ("redis.external.caSecretRef", ALL, "--bus-ca-file", ["/redis/ca.crt"]),
    ("failurePolicy.heartbeatTimeoutSeconds", ALL, "--heartbeat-timeout-seconds", [5, INT32]),
    ("gateway.apiKeysSecretRef", ["gateway"], "--api-keys-file", ["/keys/keys"]),
    ("gateway.maxQueuedRequests", ["gateway"], "--max-queued-requests", [0, 1024, INT32]),
    ("gateway.requestTimeoutSeconds", ["gateway"], "--request-timeout-seconds", [1, 86400]),
    ("gateway.maxAttempts", ["gateway"], "--max-attempts", [1, 10]),
    ("gateway.terminationGracePeriodSeconds", ["gateway"], "--drain-seconds", [0, 2**63 - 11]),
    ("ranks.terminationGracePeriodSeconds", ["engine"], "--drain-seconds", [0, 2**63 - 11]),
    ("ingress.path", ["gateway"], "--root-path", ["/", "/qwen", "/a/b/"]),
    ("httpRoute.path", ["gateway"], "--root-path", ["/", "/qwen", "/a/b/"]),
]
"""Field, commands, flag, values that the field admits."""


def config_of(command: str, flag: str, value: object) -> dict[str, Any]:
    """The settings that a command starts with, where the operator passes this flag."""
    parser = Parser(prog="minisgl")
    COMMANDS[command](parser)
    given = {"--bus": "redis://h:1/0", "--model": "m", flag: value}
    args = parser.parse_args([f"{name}={text}" for name, text in given.items()])
    if command == "gateway":
        return vars(args) | vars(from_args(GatewayConfig, args))
    if command == "engine":
        engine = from_args(EngineConfig, args)
        return vars(args) | vars(engine) | vars(from_args(RankConfig, args, engine=engine))
    return vars(args) | vars(from_args(WorkerConfig, args))


@pytest.mark.parametrize(("field", "commands", "flag", "values"), FLAGS, ids=lambda v: str(v)[:40])
def test_a_flag_takes_whatever_its_field_admits(
    field: str, commands: Sequence[str], flag: str, values: Sequence[object]
) -> None:
    for command in commands:
        for value in values:
            settings = config_of(command, flag, value)
            got = settings[flag.removeprefix("--").replace("-", "_")]
            assert got == type(got)(value), f"{command} {flag}={value}"  # type: ignore[call-arg]


def test_an_engine_flag_has_a_field_or_is_the_operators_or_one_for_extra_args() -> None:
    crd = (ROOT / "helm" / "minisglang" / "templates" / "crd.yaml").read_text()
    (refused,) = re.findall(r"a\.matches\('(\^--\(.+?)'\)", crd)
    parser = Parser(prog="minisgl")
    add_engine(parser)
    flags = {name for action in parser._actions for name in action.option_strings}
    own = {flag for _, commands, flag, _ in FLAGS if "engine" in commands and flag != "--device"}
    assert {flag for flag in own & flags if not re.match(refused, f"{flag}=1")} == set()
    free = {flag for flag in flags if not re.match(refused, flag)}
    assert {
        "--cuda-graph-max-bs", "--disable-overlap-scheduling", "--disable-pynccl", "--num-pages",
        "--cache-type", "--load-format", "--schedule", "--quantization", "--seed",
    } <= free  # fmt: skip
    assert not {flag for flag in free if flag in {"--device", *own}}


def test_the_design_lists_the_same_fields_and_flags() -> None:
    page = (ROOT / "docs/design.md").read_text("utf-8")
    section = page.partition("## Fields of the custom resource and their flags")[2]
    rows = re.findall(r"^\| (`.*?) \| `(--[a-z-]+)` \|", section.partition("\n## ")[0], re.M)
    listed = [(field, flag) for fields, flag in rows for field in re.findall("`(.*?)`", fields)]
    assert sorted(listed) == sorted((field, flag) for field, _, flag, _ in FLAGS)


def test_the_resource_and_the_services_admit_the_same_repositories() -> None:
    crd = (ROOT / "helm" / "minisglang" / "templates" / "crd.yaml").read_text()
    assert f"^(hf://{REPO_ID.pattern}|" in crd


def test_ranks_take_their_ports_from_the_range() -> None:
    for listener in listeners("127.0.0.1", "20000-20255", 2):
        assert listener.getsockname()[1] in range(20000, 20256)
        listener.close()


def test_the_revision_of_a_rank_is_no_revision_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def resolve(*args: object, **options: object) -> Path:
        asked.append((args, options))
        raise StartError("enough seen")

    monkeypatch.setattr("minisgl.scheduler.main.resolve_model", resolve)
    config = RankConfig(
        bus=f"ipc://{tmp_path}",
        model="org/model",
        engine=EngineConfig(model="org/model"),
        revision="5d8f",
    )
    with pytest.raises(StartError, match="enough seen"):
        run_engine(config)
    assert asked == [(("org/model",), {})]
