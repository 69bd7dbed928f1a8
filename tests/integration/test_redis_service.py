"""Services on Redis as processes of their own: whatever fails, every stream stays what it was."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from tests.deployment import Deployment, Ended, Streams, T
from tests.faults import (
    Fault,
    everything_is_hostile,
    groups_are_destroyed,
    kill,
    pause,
    redis_fills_up,
    redis_freezes,
    redis_frozen,
    redis_is_flushed,
    redis_restarts,
    terminate,
)
from tests.redis_server import (
    PASSWORD,
    RedisServer,
    documented_rules,
    free_port,
    guarded_blocks,
)
from tests.support import metrics, wait_until
from tests.tiny import build_tiny

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.alone]

TOKENS = 400
QUEUED = 16


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096)


def requests(count: int = 12, tokens: int = TOKENS) -> list[dict[str, Any]]:
    """Two of three greedy, the others sampled with a seed."""
    words = random.Random(1)
    rows = []
    for i in range(count):
        ask = " ".join(words.choices(["river", "stone", "apple", "bridge", "letter"], k=3 + i))
        row = {"messages": [{"role": "user", "content": ask}], "max_tokens": tokens}
        row |= {"ignore_eos": True}
        row |= {"temperature": 0.9, "seed": i} if i % 3 == 2 else {"temperature": 0}
        rows.append(row)
    return rows


def undisturbed(deployment: Deployment) -> list[Ended]:
    """Each stream as it is without a fault, computed twice: with a cold and with a warm cache."""
    deployment.wait_ready()
    cold = deployment.stream(requests()).results()
    assert [end.finish for end in cold] == ["length"] * len(cold), deployment.logs()
    assert deployment.stream(requests()).results() == cold
    return cold


def started(deployment: Deployment, calm: list[Ended], share: float) -> Streams:
    """Streams of which the clients have this share; at least one of them still runs."""
    deployment.wait_ready()
    streams = deployment.stream(requests())
    wanted = share * sum(len(end.text) for end in calm)
    limit = time.monotonic() + 60
    while streams.characters < wanted and streams.running:
        assert time.monotonic() < limit, deployment.logs()
        time.sleep(0.001)
    assert streams.running, "the streams ended before the fault"
    return streams


def survives(
    deployment: Deployment, calm: list[Ended], fault: Fault, share: float | None = None
) -> None:
    """Do it while streams run: each of them ends as it does without, and nothing is left."""
    if share is None:
        # Another moment for each test, but always the same one.
        seed = zlib.crc32(os.environ["PYTEST_CURRENT_TEST"].encode())
        share = random.Random(seed).uniform(0.02, 0.4)
    streams = started(deployment, calm, share)
    fault(deployment)
    ends = streams.results()
    different = {
        i: (end.finish, end.error, len(end.text), len(want.text))
        for i, (end, want) in enumerate(zip(ends, calm, strict=True))
        if end != want
    }
    assert not different, f"{different}\n{deployment.logs()}"
    deployment.wait_at_rest()


# --- faults ------------------------------------------------------------------------------------


def a_rank_dies_again_while_its_group_forms(deployment: Deployment) -> None:
    key = "minisgl:{test}:rdzv:g0"
    with deployment.redis.client() as client:
        kill("rank0.0")(deployment)
        wait_until(
            lambda: client.hget(key, "phase") == b"forming" and client.hexists(key, "boot.1"),
            60,
            deployment.logs,
        )
    kill("rank0.1")(deployment)


def tokenizers_die_with_requests(deployment: Deployment) -> None:
    """Both tokenizers are frozen; one request was handed to one of them."""
    key = "minisgl:{test}:tok"
    with deployment.redis.client() as client:
        wait_until(lambda: client.xlen(key) > 0, 30, lambda: "no request in tok")
        assert client.xreadgroup("tokenizers", "t0", {key: ">"}, count=1)
    kill("tokenizer0", "tokenizer1")(deployment)


def password_changes(deployment: Deployment) -> None:
    """As an operator rotates it: Redis first, then the file; every connection is cut."""
    with deployment.redis.client() as client:
        client.config_set("requirepass", "rotated")
        (deployment.redis.folder / "password").write_text("rotated\n")
        deployment.redis.password = "rotated"
        client.client_kill_filter(_type="normal", skipme=True)


# --- one group ---------------------------------------------------------------------------------


class TestOneGroup:
    """Two ranks, one gateway, and two of each of the others."""

    @pytest.fixture(scope="class")
    @classmethod
    def service(cls, tiny: Path) -> Iterator[Deployment]:
        with RedisServer() as server:
            file = server.folder / "password"
            file.write_text(PASSWORD)
            bus = [f"--bus=redis://127.0.0.1:{server.port}/0", f"--bus-password-file={file}"]
            flags = [f"--max-queued-requests={QUEUED}"]
            with Deployment(tiny, server, bus=bus, gateway_flags=flags) as deployment:
                yield deployment

    @pytest.fixture(scope="class")
    @classmethod
    def calm(cls, service: Deployment) -> list[Ended]:
        return undisturbed(service)

    def test_probes_see_who_serves_and_whose_loop_stands_still(self, service: Deployment) -> None:
        service.wait_ready()
        shown = {f.name for w in ("tokenizer0", "detokenizer1", "rank0.1")
                 for f in (service.folder / w).glob("[lr]*")}  # fmt: skip
        assert shown == {"live", "ready", "live.1", "ready.1"}
        live = service.folder / "rank0.0" / "live.0"
        turned = live.read_text()
        wait_until(lambda: live.read_text() != turned, 10, lambda: "the loop does not turn")
        ready = service.folder / "rank0.1" / "ready.1"
        kill("rank0.0")(service)
        wait_until(lambda: not ready.exists(), 30, service.logs)  # its group serves no more
        service.wait_ready()
        wait_until(ready.exists, 30, service.logs)

    def test_only_ranks_load_torch(self, service: Deployment) -> None:
        service.wait_ready()
        ends = service.stream(requests(4, 8)).results()
        assert [end.finish for end in ends] == ["length"] * 4
        maps = {n: Path(f"/proc/{w.pid}/maps").read_text() for n, w in service.workers.items()}
        assert {n for n, text in maps.items() if "libtorch" in text} == {"rank0.0", "rank0.1"}

    @pytest.mark.parametrize(
        "fault",
        [
            pytest.param(redis_restarts, id="redis restarts"),
            pytest.param(redis_freezes, id="redis freezes for longer than the heartbeat"),
            pytest.param(redis_is_flushed, id="redis is flushed"),
            pytest.param(redis_fills_up, id="redis is full"),
            pytest.param(groups_are_destroyed, id="consumer groups are destroyed"),
            pytest.param(everything_is_hostile, id="every stream gets hostile entries"),
            pytest.param(password_changes, id="the password changes"),
        ],
    )
    def test_streams_and_ranks_survive_that(
        self, service: Deployment, calm: list[Ended], fault: Fault
    ) -> None:
        service.wait_ready()
        before = service.ranks()
        survives(service, calm, fault)
        assert service.ranks() == before, service.logs()

    @pytest.mark.parametrize(
        "fault",
        [
            pytest.param(kill("rank0.0"), id="rank 0 is killed"),
            pytest.param(pause("rank0.1", 2 * T, signal.SIGKILL), id="rank 1 hangs"),
            pytest.param(a_rank_dies_again_while_its_group_forms, id="rank 1 dies in rendezvous"),
            pytest.param(kill("detokenizer0"), id="a detokenizer is killed"),
            pytest.param(pause("detokenizer1"), id="a detokenizer hangs and wakes"),
            pytest.param(pause("gateway0"), id="the gateway hangs and wakes"),
            pytest.param(terminate("detokenizer0"), id="a detokenizer is asked to leave"),
        ],
    )
    def test_streams_survive_when(
        self, service: Deployment, calm: list[Ended], fault: Fault
    ) -> None:
        survives(service, calm, fault)

    @pytest.mark.parametrize("ends", [kill, terminate])
    def test_requests_survive_a_tokenizer_that_ends_with_them(
        self, service: Deployment, calm: list[Ended], ends: Any
    ) -> None:
        survives(service, calm, ends("tokenizer0"), share=0)

    def test_a_detokenizer_killed_while_redis_is_frozen(
        self, service: Deployment, calm: list[Ended]
    ) -> None:
        def fault(deployment: Deployment) -> None:
            with redis_frozen(deployment):
                deployment["detokenizer0"].signal(signal.SIGKILL)
                time.sleep(T / 2)

        survives(service, calm, fault)

    def test_redis_restarted_while_a_rank_restarts(
        self, service: Deployment, calm: list[Ended]
    ) -> None:
        def fault(deployment: Deployment) -> None:
            rank = deployment["rank0.1"]
            starts = len(rank.starts)
            rank.signal(signal.SIGKILL)
            wait_until(lambda: len(rank.starts) > starts, 30, deployment.logs)
            redis_restarts(deployment)

        survives(service, calm, fault)

    def test_a_client_that_leaves_frees_its_pages(self, service: Deployment) -> None:
        service.wait_at_rest()
        before = metrics(service.urls[0])["minisgl_generation_tokens_total"]
        body = requests(1, 4000)[0] | {"stream": True, "model": "tiny"}
        url = f"{service.urls[0]}/v1/chat/completions"
        with httpx.Client(timeout=60) as client, client.stream("POST", url, json=body) as answer:
            next(answer.iter_lines())
        service.wait_at_rest()
        assert metrics(service.urls[0])["minisgl_generation_tokens_total"] - before < 4000

    def test_the_queue_has_a_limit(self, service: Deployment) -> None:
        service.wait_at_rest()
        for name in ("tokenizer0", "tokenizer1"):
            service[name].signal(signal.SIGSTOP)
        try:
            streams = service.stream(requests(QUEUED + 1, 4))
            wait_until(lambda: streams.running == QUEUED, 30, lambda: str(streams.running))
        finally:
            for name in ("tokenizer0", "tokenizer1"):
                service[name].signal(signal.SIGCONT)
        assert sorted(end.status for end in streams.results()) == [200] * QUEUED + [429]


# --- two groups --------------------------------------------------------------------------------


class TestTwoGroups:
    """Two groups of two ranks, two gateways."""

    @pytest.fixture(scope="class")
    @classmethod
    def service(cls, tiny: Path) -> Iterator[Deployment]:
        with (
            RedisServer() as server,
            Deployment(tiny, server, sizes=(2, 2), gateways=2) as deployment,
        ):
            yield deployment

    @pytest.fixture(scope="class")
    @classmethod
    def calm(cls, service: Deployment) -> list[Ended]:
        return undisturbed(service)

    @pytest.mark.parametrize(
        "fault",
        [
            pytest.param(kill("rank0.0", "rank0.1"), id="both ranks of a group are killed"),
            pytest.param(kill("rank0.0", "rank1.1"), id="a rank of each group is killed"),
            pytest.param(redis_is_flushed, id="redis is flushed"),
        ],
    )
    def test_streams_survive_when(
        self, service: Deployment, calm: list[Ended], fault: Fault
    ) -> None:
        survives(service, calm, fault)

    def test_a_group_that_is_asked_to_leave_hands_its_streams_to_the_other(
        self, service: Deployment, calm: list[Ended]
    ) -> None:
        service.wait_ready()
        before = {name: list(w.starts) for name, w in service.workers.items()}
        survives(service, calm, terminate("rank0.1"))
        changed = {name for name, w in service.workers.items() if w.starts != before[name]}
        assert changed == {"rank0.0", "rank0.1"}
        assert [service[name].codes[-1] for name in sorted(changed)] == [0, 0], service.logs()


# --- a Redis that is guarded -------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate authority of one's own and a server's certificate, made as the page says."""
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["bash", "-ec", guarded_blocks()[0]], cwd=folder, check=True, capture_output=True
    )
    return folder


def start_with_user(server: RedisServer) -> None:
    """Start it, unless it runs, and make the user."""
    if not server.answers():
        server.start()
        with server.client() as admin:
            admin.execute_command("ACL", "SETUSER", "minisgl", *documented_rules("test"))


class TestGuardedRedis:
    """TLS with an authority of one's own, and a user who may do only what the page says."""

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls, certificates: Path) -> Iterator[RedisServer]:
        server = RedisServer(certificates)
        (server.folder / "password").write_text("first")
        yield server
        server.__exit__(None, None, None)

    @pytest.fixture(scope="class")
    @classmethod
    def service(cls, tiny: Path, server: RedisServer, certificates: Path) -> Iterator[Deployment]:
        bus = [
            f"--bus=rediss://minisgl@127.0.0.1:{server.port}/0",
            f"--bus-ca-file={certificates / 'ca.crt'}",
            f"--bus-password-file={server.folder / 'password'}",
        ]
        with Deployment(tiny, server, bus=bus) as deployment:
            yield deployment

    @pytest.fixture(scope="class")
    @classmethod
    def calm(cls, service: Deployment, server: RedisServer) -> list[Ended]:
        start_with_user(server)
        return undisturbed(service)

    def test_everything_waits_for_a_redis_that_is_not_there_yet(
        self, service: Deployment, server: RedisServer
    ) -> None:
        def unready() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"{service.urls[0]}/ready", timeout=2).status_code == 503
            return False

        wait_until(unready, 60, service.logs)
        body = requests(1)[0] | {"model": "tiny"}
        answer = httpx.post(f"{service.urls[0]}/v1/chat/completions", json=body, timeout=30)
        assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
        start_with_user(server)
        service.wait_ready()
        assert not any(worker.codes for worker in service.workers.values()), service.logs()

    def test_the_documented_user_may_do_all_that_is_needed_and_no_more(
        self, service: Deployment, server: RedisServer, calm: list[Ended]
    ) -> None:
        with server.client() as admin:
            admin.config_resetstat()
            admin.execute_command("ACL", "LOG", "RESET")  # of the time before the user was made
        survives(service, calm, kill("detokenizer0", "rank0.1"))
        survives(service, calm, groups_are_destroyed)
        for name in ("tokenizer0", "tokenizer1"):
            service[name].signal(signal.SIGSTOP)
        survives(service, calm, tokenizers_die_with_requests, share=0)
        with server.client() as admin:
            denied: Any = admin.execute_command("ACL", "LOG")
            used: Any = admin.info("commandstats")
        assert not denied, denied
        allowed = {rule[1:] for rule in documented_rules("test") if rule.startswith("+")}
        unused = {a for a in allowed if f"cmdstat_{a}" not in used}
        # For a set of prefixes that got too long, for a choice between groups, and for a tokenizer
        # that went for good.
        assert unused <= {"srem", "smismember", "xgroup|delconsumer"}

    def test_a_user_whose_password_changes_goes_on(
        self, service: Deployment, server: RedisServer, calm: list[Ended]
    ) -> None:
        before = service.ranks()

        def fault(deployment: Deployment) -> None:
            with server.client() as admin:
                admin.execute_command("ACL", "SETUSER", "minisgl", "<first", ">second")
                (server.folder / "password").write_text("second")
                admin.execute_command("CLIENT", "KILL", "USER", "minisgl")

        survives(service, calm, fault)
        assert service.ranks() == before

    def test_sigterm_ends_everything_while_redis_is_away(
        self, service: Deployment, server: RedisServer, calm: list[Ended]
    ) -> None:
        streams = started(service, calm, 0.1)
        server.send_signal(signal.SIGKILL)
        # Without another group a rank computes first what it holds.
        assert service.stop(60) == [], service.logs()
        assert all(end.finish == "length" or end.error for end in streams.results())


class AsWritten:
    """What the page says about a guarded Redis, typed in a folder of its own; a context."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder = folder
        self._model = model
        self._port = free_port()
        self._groups: list[int] = []
        self.url = f"http://127.0.0.1:{free_port(self._port + 1)}"

    def type(self, block: str) -> None:
        """Run one block with this machine's ports, and a small model."""
        gateway_port = self.url.rpartition(":")[2]
        for said, meant in {
            "6379": str(self._port),
            "SERVICE": "local",
            "MODEL": str(self._model),
            "minisgl gateway": f"minisgl gateway --port {gateway_port}",
            "minisgl engine": "minisgl engine --device cpu --num-pages 1000",
        }.items():
            block = block.replace(said, meant)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with self.log.open("ab") as log:
            shell = subprocess.Popen(
                ["bash", "-ec", block], cwd=self._folder, stdout=log, stderr=log,
                env=os.environ | {"PATH": path}, start_new_session=True,
            )  # fmt: skip
        self._groups.append(shell.pid)
        assert shell.wait(30) == 0, self.said()

    @property
    def log(self) -> Path:
        return self._folder / "log"

    def said(self) -> str:
        return self.log.read_text()[-4000:]

    def redis(self) -> redis.Redis:
        """Its administrator."""
        return redis.Redis(
            host="127.0.0.1", port=self._port, username="default", password="ADMIN-PASSWORD",
            ssl=True, ssl_ca_certs=str(self._folder / "ca.crt"),
        )  # fmt: skip

    def answers(self, ask: Callable[[], bool]) -> bool:
        try:
            return ask()
        except (httpx.HTTPError, redis.RedisError):
            return False

    def __enter__(self) -> "AsWritten":
        return self

    def __exit__(self, *args: object) -> None:
        for group in reversed(self._groups):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


def test_a_guarded_redis_serves_as_the_page_says(tiny: Path, tmp_path: Path) -> None:
    certificate, server, user, workers = guarded_blocks()
    with AsWritten(tmp_path, tiny) as page, page.redis() as admin:
        page.type(certificate)
        page.type(server)
        wait_until(lambda: page.answers(admin.ping), 20, page.said)
        page.type(user)
        page.type(workers)
        ready = f"{page.url}/ready"
        wait_until(lambda: page.answers(lambda: httpx.get(ready).is_success), 60, page.said)
        body = {"model": str(tiny), "prompt": "river", "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{page.url}/v1/completions", json=body, timeout=30).json()
        assert answer["usage"]["completion_tokens"] == 4
        assert {client["user"] for client in admin.client_list()} == {"default", "minisgl"}
        assert not admin.acl_log()
    assert "user minisgl on" in (tmp_path / "users.acl").read_text()
