"""The managed Redis: its children, and its scripts run for real."""

import base64
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import NoPermissionError

from minisgl.messages import WorkerState, encode_state
from minisgl_operator.desired.redis import STALE_SECONDS
from minisgl_operator.observed import Manifest
from tests.cluster.pki import Authority
from tests.redis_server import RedisServer, documented_rules, free_port
from tests.support import wait_until
from tests.unit.operator.cases import HUB, child, main_container, of, pod, settled, want
from tests.unit.operator.container import Container

TLS = {"model": HUB, "redis": {"managed": {"tlsSecretName": "redis-tls"}}}
PASSWORD = "not-a-secret"
SERVICE = "models.qwen.0f1e2d3c"


def deployment(managed: dict[str, Any] | None = None) -> Manifest:
    return child({"model": HUB, "redis": {"managed": managed or {}}}, "Deployment", "-redis")


def test_there_is_never_a_second_redis() -> None:
    spec = deployment()["spec"]
    assert spec["replicas"] == 1 and spec["strategy"] == {"type": "Recreate"}


def test_h62_a_full_redis_refuses_writes_and_a_restarted_one_has_what_it_had() -> None:
    words = main_container(deployment({"maxMemory": "1Gi"}))["args"]
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert given["--maxmemory"] == str(2**30) and given["--maxmemory-policy"] == "noeviction"
    assert given["--appendonly"] == "yes" and given["--dir"] == "/data"


@pytest.mark.parametrize(
    ("quantity", "size"), [("512Mi", 512 << 20), (1000, 1000), ("1.5k", 1500), ("100m", 1)]
)
def test_the_bound_of_its_memory_is_a_quantity(quantity: Any, size: int) -> None:
    words = main_container(deployment({"maxMemory": quantity}))["args"]
    assert words[words.index("--maxmemory") + 1] == str(size)


def test_its_file_is_on_a_claim_if_one_is_asked_for() -> None:
    (data,) = [v for v in pod(deployment())["volumes"] if v["name"] == "data"]
    assert data == {"name": "data", "emptyDir": {}}
    spec = {
        "model": HUB,
        "redis": {"managed": {"storage": {"size": 5, "storageClassName": "fast"}}},
    }
    (data,) = [
        v for v in pod(child(spec, "Deployment", "-redis"))["volumes"] if v["name"] == "data"
    ]
    assert data["persistentVolumeClaim"] == {"claimName": "qwen-redis"}
    claim = child(spec, "PersistentVolumeClaim")["spec"]
    assert claim["resources"]["requests"]["storage"] == 5 and claim["storageClassName"] == "fast"


def test_its_password_is_in_a_secret_whose_changes_reach_running_pods() -> None:
    secret = child({"model": HUB}, "Secret")
    assert secret["metadata"]["name"] == "qwen-redis" and "immutable" not in secret
    assert base64.b64decode(secret["data"]["password"]).decode() == PASSWORD


def test_the_same_password_again_restarts_nothing_and_another_one_restarts_it() -> None:
    before = settled({"model": HUB})
    live = [one for key, one in before.live.items() if key.kind != "Secret"]
    old = of(before.live.values(), "Deployment", "-redis")
    assert of(want({"model": HUB}, live).children, "Deployment", "-redis") == old
    other = of(want({"model": HUB}, live, password="new").children, "Deployment", "-redis")
    assert other["spec"]["template"] != old["spec"]["template"]


def test_a_password_that_could_not_be_read_changes_nothing() -> None:
    before = settled({"model": HUB})
    after = want({"model": HUB}, before.live.values(), password=None).children
    for kind, name in (("Secret", ""), ("Deployment", "-redis")):
        assert of(after, kind, name) == of(before.live.values(), kind, name)


def test_it_outlives_those_that_drain() -> None:
    spec = {
        "model": HUB,
        "gateway": {"terminationGracePeriodSeconds": 50},
        "ranks": {"terminationGracePeriodSeconds": 700},
    }
    assert pod(child(spec, "Deployment", "-redis"))["terminationGracePeriodSeconds"] > 700


def test_an_external_redis_is_nobodys_child() -> None:
    spec = {"model": HUB, "redis": {"external": {"address": "r:1"}}}
    assert not any("redis" in one["metadata"]["name"] for one in want(spec).children)


# --- the scripts, run ---------------------------------------------------------------------------

needs_redis = pytest.mark.redis


class Server(Container):
    """The container of a managed Redis, its files in a folder and its port another one."""

    def __init__(self, spec: dict[str, Any], folder: Path) -> None:
        self.port = free_port()
        self.certificates, self.data = folder / "tls", folder / "data"
        paths = {
            "/etc/minisgl/redis": folder / "password",
            "/etc/minisgl/tls": self.certificates,
            "/run/redis": folder / "run",
            "/data": self.data,
        }
        for path in paths.values():
            path.mkdir(exist_ok=True)
        (folder / "password" / "password").write_text(PASSWORD)
        changes = {"6379": self.port, "sleep 30": "sleep 0.2", '"$cli" ': f'"$cli" -p {self.port} '}
        container = main_container(child(spec, "Deployment", "-redis"))
        super().__init__(container, folder / "log", {**paths, **changes})

    def client(self, password: str | None = PASSWORD, **more: Any) -> "redis.Redis":
        return redis.Redis(host="127.0.0.1", port=self.port, password=password, protocol=2, **more)

    def wait(self) -> None:
        wait_until(lambda: self.succeeds("readinessProbe"), 60, self.tail)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    one = Server({"model": HUB}, tmp_path)
    one.start()
    try:
        one.wait()
        yield one
    finally:
        one.kill()


@needs_redis
def test_without_the_password_nobody_gets_in(server: Server) -> None:
    for password in (None, "wrong"):
        with pytest.raises((redis.AuthenticationError, redis.ResponseError)):
            server.client(password).get("x")


@needs_redis
def test_with_it_one_may_use_the_keys_of_this_object_and_do_nothing_to_the_server(
    server: Server,
) -> None:
    client = server.client()
    assert client.set(f"minisgl:{{{SERVICE}}}:x", 1) and client.info("memory")
    for forbidden in (
        lambda: client.set("minisgl:{other}:x", 1),
        lambda: client.flushall(),
        lambda: client.config_get("dir"),
        lambda: client.execute_command("ACL", "LIST"),
        lambda: client.keys("*"),
    ):
        with pytest.raises(NoPermissionError):
            forbidden()


@needs_redis
def test_its_user_may_do_all_that_the_documented_user_of_a_shared_redis_may() -> None:
    documented = {rule[1:] for rule in documented_rules(SERVICE) if rule.startswith("+")}
    with RedisServer() as plain, plain.client() as client:
        denied = {str(name) for kind in ("admin", "dangerous") for name in client.acl_cat(kind)}
    assert documented and denied and not documented & denied


@needs_redis
def test_what_it_held_is_there_after_its_container_was_killed(server: Server) -> None:
    server.client().set(f"minisgl:{{{SERVICE}}}:x", 1)
    wait_until(lambda: any(server.data.rglob("*.incr.aof")), 10, server.tail)
    wait_until(
        lambda: b":x" in b"".join(f.read_bytes() for f in server.data.rglob("*.aof")),
        10, server.tail,
    )  # fmt: skip
    server.kill()
    assert not server.succeeds("livenessProbe")
    server.start()
    server.wait()
    assert server.client().get(f"minisgl:{{{SERVICE}}}:x") == b"1"


@needs_redis
def test_a_file_that_it_cannot_read_keeps_it_from_serving_once_and_no_more(server: Server) -> None:
    server.client().set(f"minisgl:{{{SERVICE}}}:x", "y" * 1000)
    (file,) = server.data.rglob("*.incr.aof")
    wait_until(lambda: file.stat().st_size > 1000, 10, server.tail)
    server.kill()
    with file.open("r+b") as broken:
        broken.write(b"\0" * 50)
    server.start()
    assert server.process is not None and server.process.wait(60) != 0
    server.start()
    server.wait()
    assert "the append-only file is broken" in server.tail()
    assert server.client().get(f"minisgl:{{{SERVICE}}}:x") is None


@needs_redis
def test_what_was_cut_off_at_the_end_costs_only_that(server: Server) -> None:
    server.client().set(f"minisgl:{{{SERVICE}}}:x", 1)
    server.client().set(f"minisgl:{{{SERVICE}}}:y", "y" * 1000)
    (file,) = server.data.rglob("*.incr.aof")
    wait_until(lambda: file.stat().st_size > 1000, 10, server.tail)
    server.kill()
    with file.open("r+b") as cut:
        cut.truncate(file.stat().st_size - 100)
    server.start()
    server.wait()
    assert server.client().get(f"minisgl:{{{SERVICE}}}:x") == b"1"


@needs_redis
def test_one_that_nobody_needs_leaves_at_once(server: Server) -> None:
    publish(server, "rank", "idle", draining=False)
    assert server.exec(server.container["lifecycle"]["preStop"]).wait(60) == 0


@needs_redis
def test_it_waits_while_all_that_is_left_drains(server: Server) -> None:
    publish(server, "rank", "busy", draining=True)
    publish(server, "rank", "dead", draining=False, ttl=3 * 30 - STALE_SECONDS - 1)
    publish(server, "tokenizer", "idle", draining=False)
    server.client().set(f"minisgl:{{{SERVICE}}}:state:gateway:junk", b"\xc1")
    leaving = server.exec(server.container["lifecycle"]["preStop"])
    wait_until(lambda: asked(server) >= 3, 60, server.tail)
    assert leaving.poll() is None
    publish(server, "rank", "busy", draining=False)
    assert leaving.wait(60) == 0


@needs_redis
def test_it_waits_for_no_gateway_while_ranks_serve_on(server: Server) -> None:
    """They are connected to it, and all others find the one that comes after it."""
    publish(server, "gateway", "leaves", draining=True)
    publish(server, "rank", "serves", draining=False)
    assert server.exec(server.container["lifecycle"]["preStop"]).wait(60) == 0
    assert asked(server) == 1


def asked(server: Server) -> int:
    """How often Redis was asked who drains."""
    stats: Any = server.client().info("commandstats")
    return int(stats.get("cmdstat_eval", {}).get("calls", 0))


def publish(server: Server, role: str, name: str, *, draining: bool, ttl: int = 3 * 30) -> None:
    state = WorkerState(role=role, id=name, boot=2**63, beat=1, draining=draining)  # type: ignore[arg-type]
    server.client().set(f"minisgl:{{{SERVICE}}}:state:{role}:{name}", encode_state(state), ex=ttl)


@needs_redis
def test_with_tls_it_serves_a_renewed_certificate_without_a_restart(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pki")
    one = Server(TLS, tmp_path)

    def renew(name: str) -> None:
        authority.issue(name, name, addresses=["DNS:localhost", "IP:127.0.0.1"])
        for file, source in (("tls.crt", f"{name}.crt"), ("tls.key", f"{name}.key")):
            (one.certificates / file).write_bytes((authority.folder / source).read_bytes())
        (one.certificates / "ca.crt").write_bytes(authority.certificate.read_bytes())

    renew("first")
    one.start()
    try:
        one.wait()
        client = one.client(ssl=True, ssl_ca_certs=str(authority.certificate))
        assert client.set(f"minisgl:{{{SERVICE}}}:x", 1)
        assert served(one) == "first"
        renew("second")
        wait_until(lambda: served(one) == "second", 60, one.tail)
        assert client.get(f"minisgl:{{{SERVICE}}}:x") == b"1"
    finally:
        one.kill()


def served(one: Server) -> str:
    """The name in the certificate that Redis shows."""
    shown = subprocess.run(
        ["openssl", "s_client", "-connect", f"127.0.0.1:{one.port}"],
        input=b"", capture_output=True, timeout=20,
    ).stdout.decode()  # fmt: skip
    line = next(line for line in shown.splitlines() if line.startswith("subject="))
    return line.rpartition("=")[2].strip()
