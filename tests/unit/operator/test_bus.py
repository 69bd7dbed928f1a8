"""What the operator reads of an object's Redis."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NoReturn

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeout

from minisgl.bus import connect
from minisgl.bus.rendezvous import Meeting as Formed
from minisgl.bus.rendezvous import Rendezvous
from minisgl.messages import GroupLoad, WorkerState
from minisgl_operator.bus import FORGET_SECONDS, Address, Reader
from minisgl_operator.observed import Bus
from tests.redis_server import RedisServer, free_port
from tests.unit.operator.test_status import conditions, told, world


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def reading(port: int, password: str = "", **how: object) -> AsyncIterator[Reader]:
    """A reader, open until the end."""
    changes: list[None] = []
    address = Address("127.0.0.1", port, "svc", password=password)
    reader = Reader(address, lambda: changes.append(None), **how)  # type: ignore[arg-type]
    try:
        yield reader
    finally:
        await reader.close()


async def until(reader: Reader, state: str, workers: int = 0) -> Bus:
    async with asyncio.timeout(20):
        while (seen := reader.bus).state != state or len(seen.workers) < workers:
            await asyncio.sleep(0.02)
    return seen


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


def rank0(beat: int = 1, boot: int = 5, transport: str = "") -> WorkerState:
    load = GroupLoad(
        group="g0-1", incarnation=7, max_model_len=64, running=3, waiting=4, transport=transport
    )
    return WorkerState(role="rank", id="g0-1/0", boot=boot, beat=beat, pod="llm-g0-1-0", load=load)


@pytest.mark.redis
async def test_what_rank_0_publishes_is_what_the_object_says(server: RedisServer) -> None:
    rank = connect(server.url, "svc", worker="g0-1/0")
    rank.publish_state(rank0(transport="Socket, IB between nodes"))
    met = Rendezvous(server.url, "svc", "g0-1", size=1, revision="", silence=30)
    met.open(Formed(7, "127.0.0.1", 1, 2), 5)
    async with reading(server.port, server.password) as reader:
        bus = await until(reader, "ok", workers=1)
    (worker,) = bus.workers
    assert (worker.role, worker.id, worker.pod, worker.boot) == ("rank", "g0-1/0", "llm-g0-1-0", 5)
    assert (worker.running, worker.waiting) == (3, 4)
    assert not bus.meetings["g0-1"].formed
    found = told(world(parallelism={"tensor": 2}, engine={"device": "cuda"}), bus=bus)
    assert conditions(found)["FastTransport"] == ("False", "SocketWithinNode")
    assert found["groups"][0]["transport"] == "Socket, IB between nodes"
    met.close()
    rank.close()


@pytest.mark.redis
async def test_another_password_is_told_from_no_redis(server: RedisServer) -> None:
    async with reading(server.port, "wrong") as reader:
        assert (await until(reader, "auth-failed")).workers == ()
    async with reading(free_port()) as reader:
        assert "onnect" in (await until(reader, "unreachable")).message


async def test_a_worker_is_silent_while_its_beat_stands_still() -> None:
    clock = Clock()
    async with reading(free_port(), clock=clock) as reader:
        for second in range(0, 20, 2):
            clock.now = 1000.0 + second
            reader.take([rank0(beat=min(second, 4))], {})
        assert [w.silent for w in reader.bus.workers] == [14.0]
        clock.now += 1.0  # not read yet
        assert [w.silent for w in reader.bus.workers] == [14.0]
        clock.now += 1.0
        reader.take([rank0(beat=4, boot=6)], {})
        assert [w.silent for w in reader.bus.workers] == [0.0]


async def test_a_worker_whose_key_expired_stays_silent_until_it_is_forgotten() -> None:
    clock = Clock()
    async with reading(free_port(), clock=clock) as reader:
        reader.take([rank0()], {})
        silences = []
        while clock.now < 1000.0 + FORGET_SECONDS + 10.0:
            clock.now += 5.0
            reader.take([], {})
            silences += [w.silent for w in reader.bus.workers]
        assert silences == [5.0 * n for n in range(1, int(FORGET_SECONDS) // 5 + 1)]


async def test_silences_start_from_zero_after_a_time_without_readings() -> None:
    clock = Clock()
    async with reading(free_port(), clock=clock) as reader:
        for at in (1000.0, 1004.0):
            clock.now = at
            reader.take([rank0()], {})
        clock.now = 1100.0
        reader.take([rank0()], {})
        assert [w.silent for w in reader.bus.workers] == [0.0]


async def test_a_redis_that_takes_no_writes_makes_nobody_silent() -> None:
    clock = Clock()
    async with reading(free_port(), clock=clock) as reader:
        for second in range(0, 60, 2):
            clock.now = 1000.0 + second
            reader.take([rank0()], {}, "its disk is full" if second > 3 else "")
        assert (reader.bus.state, reader.bus.message) == ("full", "its disk is full")
        clock.now += 2.0
        reader.take([rank0()], {})
        assert reader.bus.state == "ok" and reader.bus.readable == 2.0
        assert [w.silent for w in reader.bus.workers] == [2.0]


@pytest.mark.redis
async def test_a_redis_that_cannot_write_its_file_is_full(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reading(server.port, server.password) as reader:
        assert (await until(reader, "ok")).message == ""
        ask = reader._client.info

        async def info(*sections: str) -> dict[str, Any]:
            return {**await ask(*sections), "aof_last_write_status": "err"}

        monkeypatch.setattr(reader._client, "info", info)
        assert "append-only file" in (await until(reader, "full")).message


async def test_a_reading_that_fails_in_an_unknown_way_is_told_and_not_the_last() -> None:
    class Odd(Reader):
        async def _read(self) -> NoReturn:
            raise KeyError("beat")

    reader = Odd(Address("127.0.0.1", 1, "svc"), lambda: None)
    try:
        assert "beat" in (await until(reader, "unreachable")).message
    finally:
        await reader.close()


async def test_who_is_cancelled_while_a_reader_closes_is_cancelled() -> None:
    ending = asyncio.Event()

    class Slow(Reader):
        async def _read(self) -> NoReturn:
            try:
                await asyncio.Event().wait()
            finally:
                ending.set()
                await asyncio.sleep(3600)
            raise AssertionError("nobody sets it")

    reader = Slow(Address("127.0.0.1", 1, "svc"), lambda: None)
    await asyncio.sleep(0)
    closing = asyncio.create_task(reader.close())
    await asyncio.wait_for(ending.wait(), 20)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await reader.close()


class Lines:
    """What a reader without a Redis says of each failure, two seconds apart."""

    def __init__(self, reader: Reader, clock: Clock) -> None:
        self.reader, self.clock = reader, clock

    def after(self, *errors: BaseException, every: float = 2.0) -> list[tuple[str, str]]:
        """The state and the sentence after each of these."""
        found: list[tuple[str, str]] = []
        for error in errors:
            self.clock.now += every
            self.reader.fail(error)
            found.append((self.reader.bus.state, self.reader.bus.message))
        return found


@asynccontextmanager
async def failing() -> AsyncIterator[Lines]:
    """A reader whose own attempts are stopped."""
    clock = Clock()
    async with reading(free_port(), clock=clock) as reader:
        reader._task.cancel()
        await asyncio.sleep(0)
        yield Lines(reader, clock)


def unnamed(code: int) -> BaseException:
    """What the client raises where a name server gives no address."""
    error = RedisConnectionError(f"Error {code} connecting to nowhere:6379.")
    error.__context__ = socket.gaierror(code, "no")
    return error


SLOW = RedisTimeout("Timeout reading from nowhere:6379")
CLOSED = RedisConnectionError("Connection closed by server.")
DOUBTFUL = {"a late answer": SLOW, "a lost question for its name": unnamed(socket.EAI_AGAIN)}


@pytest.mark.parametrize("case", DOUBTFUL)
async def test_a_bus_that_was_well_is_called_so_until_it_is_unread_for_five_seconds(
    case: str,
) -> None:
    async with failing() as lines:
        lines.reader.take([rank0()], {})
        states = [state for state, _ in lines.after(*[DOUBTFUL[case]] * 4)]
        assert states == ["ok", "ok", "unreachable", "unreachable"]
        assert lines.reader.bus.unread == 8.0
        lines.reader.take([rank0(beat=2)], {})
        # However long that took, it is one.
        assert lines.after(SLOW, every=9.0) == [("ok", "")]


async def test_a_bus_that_closes_the_door_is_told_at_once() -> None:
    async with failing() as lines:
        lines.reader.take([rank0()], {})
        assert lines.after(CLOSED) == [("unreachable", str(CLOSED))]


async def test_another_password_is_no_reason_to_begin_anew() -> None:
    clock = Clock()
    async with reading(free_port(), "old", clock=clock) as first:
        first.take([rank0()], {})
        clock.now += 2.0
        first.take([rank0()], {})
        address = replace(first.address, password="new")
        assert address.same_place(first.address)
        assert not replace(address, host="other").same_place(first.address)
        second = Reader(address, lambda: None, before=first, clock=clock)
        assert second.bus == first.bus and second.bus.workers[0].silent == 2.0
        await second.close()


async def test_failures_in_turns_are_one_sentence() -> None:
    async with failing() as lines:
        turns = [SLOW, unnamed(socket.EAI_AGAIN), SLOW, CLOSED, unnamed(socket.EAI_NONAME)] * 20
        said = [message for _, message in lines.after(*turns)]
        assert said[0] == str(SLOW)
        (rest,) = set(said[1:])
        assert "connecting to 127.0.0.1:" in rest


async def test_another_sentence_is_told_once_the_first_is_over() -> None:
    async with failing() as lines:
        said = [message for _, message in lines.after(CLOSED, *[unnamed(socket.EAI_NONAME)] * 20)]
        assert said[:15] == [str(CLOSED)] * 15
        assert "no name server knows the host" in said[15]
        assert len(set(said)) == 2
