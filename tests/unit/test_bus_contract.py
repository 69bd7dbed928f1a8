"""What every bus does. Parametrised by bus, so that each implementation is held to the same."""

import errno
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from minisgl.bus import TOK, Bus, Entry, connect, detok_queue, reply_queue, req_queue
from minisgl.bus.zmq import STATE_PREFIX, ZmqBus
from minisgl.config import UsageError
from minisgl.messages import AbortMsg, GroupLoad, Message, WorkerState
from tests.redis_server import RedisServer

LIMIT = 10.0


class Service:
    """Makes buses of one service and closes them; `inject` puts raw bytes into a queue."""

    def __init__(self, url: str, inject: Callable[[str, bytes], None]) -> None:
        self.url = url
        self.inject = inject
        self.buses: list[Bus] = []

    def bus(self, *queues: str) -> Bus:
        bus = connect(self.url, "test", worker=str(len(self.buses)))
        self.buses.append(bus)
        for queue in queues:
            bus.subscribe(queue)
        return bus

    def close(self) -> None:
        for bus in self.buses:
            bus.close()


@pytest.fixture
def short_dir() -> Iterator[Path]:
    # Not tmp_path: a Unix socket's path may have only about a hundred bytes.
    path = Path(tempfile.mkdtemp(prefix="bus-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(params=["zmq", pytest.param("redis", marks=pytest.mark.redis)])
def service(request: pytest.FixtureRequest, short_dir: Path) -> Iterator[Service]:
    if request.param == "redis":
        yield from redis_service(request.getfixturevalue("redis_server"))
    else:
        yield from zmq_service(short_dir)


def redis_service(server: RedisServer) -> Iterator[Service]:
    client = server.client()
    client.flushall()

    def inject(queue: str, data: bytes) -> None:
        client.xadd(f"minisgl:{{test}}:{queue}", {"m": data})

    service = Service(server.url, inject)
    yield service
    service.close()
    client.close()


def zmq_service(short_dir: Path) -> Iterator[Service]:
    context = zmq.Context()

    def inject(queue: str, data: bytes) -> None:
        with context.socket(zmq.PUSH) as socket:
            socket.connect(ZmqBus(short_dir)._endpoint(queue))
            socket.send(data)

    service = Service(f"ipc://{short_dir}", inject)
    yield service
    service.close()
    context.term()


def message(run: int) -> AbortMsg:
    return AbortMsg(uid=b"u" * 16, attempt=1, run=run)


def runs(entries: list[Entry]) -> list[int]:
    return [m.run for e in entries for m in e.messages if isinstance(m, AbortMsg)]


def receive_runs(bus: Bus, count: int) -> list[int]:
    """The runs of messages until `count` of them are there, or the limit has passed."""
    got: list[int] = []
    deadline = time.monotonic() + LIMIT
    while len(got) < count and time.monotonic() < deadline:
        entries = bus.receive(0.2)
        got += runs(entries)
        bus.ack(entries)
    return got


def state(role: str, worker: str, boot: int = 1, beat: int = 0) -> WorkerState:
    return WorkerState(role=role, id=worker, boot=boot, beat=beat)  # type: ignore[arg-type]


def test_entries_of_one_writer_arrive_in_order(service: Service) -> None:
    queue = req_queue("g0", 7)
    reader, writer = service.bus(queue), service.bus()
    for run in range(1000):
        writer.send(queue, [message(run)])
    assert receive_runs(reader, 1000) == list(range(1000))


def test_a_batch_arrives_as_one_entry_with_the_bytes_as_they_travelled(service: Service) -> None:
    queue = detok_queue("0")
    reader, writer = service.bus(queue), service.bus()
    batch: list[Message] = [message(1), message(2), message(3)]
    writer.send(queue, batch)
    (entry,) = reader.receive(LIMIT)
    assert (entry.queue, entry.messages) == (queue, batch)
    other = detok_queue("1")
    again = service.bus(other)
    service.inject(other, entry.raw)
    assert again.receive(LIMIT)[0].messages == batch


def test_an_empty_batch_is_not_sent(service: Service) -> None:
    queue = reply_queue("gw")
    reader, writer = service.bus(queue), service.bus()
    writer.send(queue, [])
    writer.send(queue, [message(1)])
    assert [len(e.messages) for e in reader.receive(LIMIT)] == [1]


def test_several_writers_reach_one_reader_each_in_its_own_order(service: Service) -> None:
    queue = reply_queue("gw")
    reader, writers = service.bus(queue), [service.bus() for _ in range(3)]
    for run in range(100):
        for number, writer in enumerate(writers):
            writer.send(queue, [message(1000 * number + run)])
    got = receive_runs(reader, 300)
    for number in range(3):
        assert [r for r in got if r // 1000 == number] == [1000 * number + r for r in range(100)]


def test_one_reader_reads_several_queues(service: Service) -> None:
    first, second = req_queue("g0", 1), req_queue("g1", 2)
    reader, writer = service.bus(first, second), service.bus()
    writer.send(first, [message(1)])
    writer.send(second, [message(2)])
    assert sorted(receive_runs(reader, 2)) == [1, 2]


def test_queues_that_differ_only_in_long_or_odd_names_stay_apart(service: Service) -> None:
    names = [reply_queue("x" * 300 + "a"), reply_queue("x" * 300 + "b"), reply_queue("grüße/../1")]
    readers, writer = [service.bus(name) for name in names], service.bus()
    for run, name in enumerate(names):
        writer.send(name, [message(run)])
    assert [receive_runs(reader, 1) for reader in readers] == [[0], [1], [2]]


def test_readers_of_tok_share_the_work_and_get_each_entry_once(service: Service) -> None:
    readers, writer = [service.bus(TOK), service.bus(TOK)], service.bus()
    got: list[list[int]] = [[], []]
    deadline, run = time.monotonic() + LIMIT, 0
    while not all(got) and time.monotonic() < deadline:
        for _ in range(20):  # more than one reader takes at once
            writer.send(TOK, [message(run)])
            run += 1
        for reader, mine in zip(readers, got, strict=True):
            mine += runs(reader.receive(0.02))
    while len(got[0]) + len(got[1]) < run and time.monotonic() < deadline:
        for reader, mine in zip(readers, got, strict=True):
            mine += runs(reader.receive(0.02))
    assert got[0] and got[1]
    assert sorted(got[0] + got[1]) == list(range(run))


@pytest.mark.parametrize("queue", [TOK, req_queue("g0", 1)])
def test_a_late_reader_gets_what_was_sent_before_it_came(service: Service, queue: str) -> None:
    writer = service.bus()
    for run in range(50):
        writer.send(queue, [message(run)])
    reader = service.bus(queue)
    assert receive_runs(reader, 50) == list(range(50))
    writer.send(queue, [message(50)])
    assert receive_runs(reader, 1) == [50]


@pytest.mark.parametrize("data", [b"", b"\xff\x00garbage", b"\x91\x81\xa1t\xa4what", b"\x80"])
def test_malformed_bytes_are_counted_and_dropped(service: Service, data: bytes) -> None:
    queue = detok_queue("0")
    reader, writer = service.bus(queue), service.bus()
    service.inject(queue, data)
    assert reader.receive(0.5) == []
    assert reader.errors == 1
    writer.send(queue, [message(1)])
    assert receive_runs(reader, 1) == [1]
    assert reader.errors == 1


def test_receive_without_waiting_returns_nothing_when_nothing_is_there(service: Service) -> None:
    reader = service.bus(detok_queue("0"))
    assert reader.receive(0) == []
    assert reader.receive(0.05) == []


def test_receive_waits_for_an_entry_that_is_sent_meanwhile(service: Service) -> None:
    queue = detok_queue("0")
    reader, writer = service.bus(queue), service.bus()
    sender = threading.Thread(
        target=lambda: (reader.receive(0), writer.send(queue, [message(1)]))[0]
    )
    sender.start()
    sender.join()
    assert runs(reader.receive(LIMIT)) == [1]


def test_one_thread_sends_while_another_receives(service: Service) -> None:
    queue = reply_queue("self")
    bus = service.bus(queue)
    sender = threading.Thread(
        target=lambda: [bus.send(queue, [message(run)]) for run in range(500)]
    )
    sender.start()
    assert receive_runs(bus, 500) == list(range(500))
    sender.join()


def test_states_of_all_workers_are_seen_by_all_and_go_with_their_bus(service: Service) -> None:
    first, second = service.bus(), service.bus()
    first.publish_state(state("tokenizer", "0"))
    first.publish_state(state("detokenizer", "0"))
    load = GroupLoad(group="g/0", incarnation=2**63 + 1, max_model_len=64, running=3)
    rank = WorkerState(role="rank", id="g/0/0", boot=2**64 - 1, beat=1, load=load)
    second.publish_state(rank)
    for bus in (first, second):
        seen = {(s.role, s.id): s for s in bus.read_states()}
        assert set(seen) == {("tokenizer", "0"), ("detokenizer", "0"), ("rank", "g/0/0")}
        assert seen["rank", "g/0/0"] == rank
    first.close()
    assert second.read_states() == [rank]


def test_a_newer_state_replaces_the_one_before(service: Service) -> None:
    bus = service.bus()
    for beat in range(3):
        bus.publish_state(state("gateway", "gw", beat=beat))
    assert [s.beat for s in bus.read_states()] == [2]


def test_a_bus_takes_back_only_its_own_state(service: Service) -> None:
    old, new = service.bus(), service.bus()
    old.publish_state(state("gateway", "gw", boot=1))
    new.publish_state(state("gateway", "gw", boot=2))
    old.close()
    assert [s.boot for s in new.read_states()] == [2]


@pytest.mark.parametrize("queue", [TOK, reply_queue("gw")])
def test_what_was_sent_before_close_still_arrives(service: Service, queue: str) -> None:
    reader, writer = service.bus(queue), service.bus()
    for run in range(200):
        writer.send(queue, [message(run)])
    writer.close()
    assert receive_runs(reader, 200) == list(range(200))


def test_closing_twice_is_closing_once(service: Service) -> None:
    bus = service.bus(detok_queue("0"))
    bus.close()
    bus.close()


# --- ZMQ alone


def test_an_unreadable_state_file_is_counted_once_and_hides_no_other(short_dir: Path) -> None:
    bus = ZmqBus(short_dir)
    bus.publish_state(state("gateway", "gw"))
    (short_dir / f"{STATE_PREFIX}rank.g0").write_bytes(b"\x85half")
    for _ in range(3):
        assert [s.id for s in bus.read_states()] == ["gw"]
    assert bus.errors == 1
    bus.close()


def test_a_state_that_cannot_be_read_at_all_hides_no_other(short_dir: Path) -> None:
    bus = ZmqBus(short_dir)
    bus.publish_state(state("gateway", "gw"))
    (short_dir / f"{STATE_PREFIX}rank.g0").mkdir()
    for _ in range(3):
        assert [s.id for s in bus.read_states()] == ["gw"]
    assert bus.errors == 1
    bus.close()


def test_a_full_disk_makes_a_worker_silent_but_does_not_end_it(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    bus = ZmqBus(short_dir)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        bus.publish_state(state("gateway", "gw"))
    assert (bus.read_states(), bus.errors, list(short_dir.iterdir())) == ([], 1, [])
    bus.publish_state(state("gateway", "gw"))
    assert [s.id for s in bus.read_states()] == ["gw"]
    bus.close()


def test_states_of_a_service_whose_directory_has_gone_are_none(short_dir: Path) -> None:
    bus = ZmqBus(short_dir)
    short_dir.rmdir()
    assert bus.read_states() == []
    bus.publish_state(state("gateway", "gw"))
    bus.close()


def test_close_does_not_hang_on_entries_that_nobody_reads(short_dir: Path) -> None:
    bus = ZmqBus(short_dir)
    bus.send(TOK, [message(1)])
    bus.send(reply_queue("nobody"), [message(1)])
    closer = threading.Thread(target=bus.close)
    closer.start()
    closer.join(LIMIT)
    assert not closer.is_alive()


def test_an_id_longer_than_a_file_name_has_a_state(short_dir: Path) -> None:
    bus = ZmqBus(short_dir)
    bus.publish_state(state("gateway", "g" * 1000))
    assert [s.id for s in bus.read_states()] == ["g" * 1000]
    bus.close()


def test_a_directory_too_long_for_a_socket_is_a_usage_error(short_dir: Path) -> None:
    with pytest.raises(UsageError, match="shorter directory"):
        ZmqBus(short_dir / ("d" * 120))


def test_a_directory_that_cannot_be_made_is_a_usage_error(short_dir: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        ZmqBus(short_dir / "missing" / "dir")


def test_an_unknown_kind_of_bus_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="--bus"):
        connect("amqp://host", "s")
