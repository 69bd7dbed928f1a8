"""What can go wrong with a deployment, each as something to do to it while streams run."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

import redis

from minisgl.messages import (
    AbortMsg,
    Message,
    Route,
    SamplingParams,
    TokenizeMsg,
    UserMsg,
    UserReply,
    encode,
)
from tests.deployment import Deployment, T

Fault = Callable[[Deployment], None]


class NotDoneError(Exception):
    """A worker did not run at this moment, so nothing could be done to it."""


def _signal(deployment: Deployment, name: str, number: int) -> None:
    if not deployment[name].signal(number):
        raise NotDoneError(f"{name} does not run")


def kill(*names: str) -> Fault:
    """SIGKILL to these workers at once."""

    def fault(deployment: Deployment) -> None:
        for name in names:
            _signal(deployment, name, signal.SIGKILL)

    return fault


def terminate(*names: str) -> Fault:
    """SIGTERM to these workers."""

    def fault(deployment: Deployment) -> None:
        for name in names:
            _signal(deployment, name, signal.SIGTERM)

    return fault


def pause(name: str, seconds: float = 2 * T, then: int = signal.SIGCONT) -> Fault:
    """Freeze a worker; afterwards it goes on as if nothing had been, or gets another signal."""

    def fault(deployment: Deployment) -> None:
        _signal(deployment, name, signal.SIGSTOP)
        time.sleep(seconds)
        deployment[name].signal(then)

    return fault


@contextlib.contextmanager
def redis_frozen(deployment: Deployment) -> Iterator[None]:
    """Redis holds its connections and answers nothing."""
    deployment.redis.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        deployment.redis.send_signal(signal.SIGCONT)


def redis_restarts(deployment: Deployment) -> None:
    deployment.redis.send_signal(signal.SIGKILL)
    deployment.redis.start()


def redis_freezes(deployment: Deployment) -> None:
    """For longer than any heartbeat: nobody may be declared dead for it."""
    with redis_frozen(deployment):
        time.sleep(2 * T)


def redis_is_flushed(deployment: Deployment) -> None:
    with deployment.redis.client() as client:
        client.flushall()


def redis_clients_are_killed(deployment: Deployment) -> None:
    """Every connection is cut, whatever it was doing."""
    with deployment.redis.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)


def redis_fills_up(deployment: Deployment) -> None:
    with deployment.redis.client() as client:
        client.config_set("maxmemory", 1)
        time.sleep(2)
        client.config_set("maxmemory", 0)


def groups_are_destroyed(deployment: Deployment) -> None:
    with deployment.redis.client() as client:
        for key in list(client.scan_iter("minisgl:*", _type="stream")):
            with contextlib.suppress(redis.ResponseError):
                for group in client.xinfo_groups(key):
                    client.xgroup_destroy(key, group["name"])


def everything_is_hostile(deployment: Deployment) -> None:
    """Garbage, what was said already, and well-formed lies, in every stream."""
    with deployment.redis.client() as client:
        said: dict[bytes, list[dict[bytes, bytes]]] = {}
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            for key in client.scan_iter("minisgl:*", _type="stream"):
                said.setdefault(key, []).extend(fields for _, fields in client.xrange(key))
        lies = [encode([lie]) for lie in _lies(client)]
        for key in list(client.scan_iter("minisgl:*", _type="stream")):
            client.xadd(key, {"m": b"\xc1garbage", "x": os.urandom(64)}, nomkstream=True)
            client.xadd(key, {"x": b""}, nomkstream=True)
            for fields in said.get(key, ()):
                client.xadd(key, fields, nomkstream=True)
            for lie in lies:
                client.xadd(key, {"m": lie}, nomkstream=True)
        client.set("minisgl:{test}:state:rank:evil", os.urandom(64))
        client.hset("minisgl:{test}:state:gateway:evil", "a", "b")
        client.expire("minisgl:{test}:state:gateway:evil", 5)
        client.expire("minisgl:{test}:state:rank:evil", 5)


def _lies(client: redis.Redis) -> Iterator[Message]:
    route = Route(gateway="nobody", boot=1, detokenizer="nobody")
    ids = b"\x05\0\0\0"
    yield AbortMsg(uid=b"", attempt=-1, run=2**63 - 1)
    yield UserReply(uid=b"x" * 16, attempt=1, boot=1, pos=-1, ids=b"abc", text="lie")
    yield TokenizeMsg(uid=b"y" * 16, attempt=1, route=route)
    for key in client.scan_iter("minisgl:{test}:rdzv:*"):
        group = key.decode().rpartition(":")[2]
        incarnation = int(client.hget(key, "incarnation") or b"0", 16)
        prompts = [b"", b"abc", b"\xff" * 4, b"\xff\xff\xff\x7f", ids * 5000, ids]
        for n, prompt in enumerate(prompts):
            yield UserMsg(
                uid=bytes([n]) * 16, attempt=1, route=route, group=group, incarnation=incarnation,
                prompt_ids=prompt, output_ids=prompt,
                sampling=SamplingParams(max_tokens=5, logit_bias={10**9: 1.0}),
            )  # fmt: skip
