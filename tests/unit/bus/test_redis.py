"""What only the Redis bus meets: others in its keys, readers that are gone, its ACL user."""

import logging
import time
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
import pytest
import redis

from minisgl.bus import TOK, connect, detok_queue, reply_queue, tok
from minisgl.bus import redis as module
from minisgl.bus.base import ReplacedError
from minisgl.bus.redis import RedisBus
from minisgl.bus.rendezvous import Meeting, Rendezvous
from minisgl.config import UsageError
from minisgl.messages import GroupLoad, Message, UserReply, WorkerState, encode, encode_state
from tests.redis_server import RedisServer, documented_rules
from tests.support import wait_until

pytestmark = pytest.mark.redis

QUEUE = detok_queue("0")


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        with running.client() as admin:
            admin.execute_command("ACL", "SETUSER", "minisgl", *documented_rules("svc"))
        yield running


@pytest.fixture
def admin(server: RedisServer) -> Iterator[redis.Redis]:
    with server.client() as client:
        client.flushall()
        client.execute_command("ACL", "LOG", "RESET")
        yield client


def bus(server: RedisServer, *queues: str, worker: str = "0", silence: float = 30.0) -> RedisBus:
    """As the documented user."""
    made = connect(_url(server), "svc", worker=worker, silence=silence)
    assert isinstance(made, RedisBus)
    for queue in queues:
        made.subscribe(queue)
    return made


def _url(server: RedisServer) -> str:
    return f"redis://minisgl:first@127.0.0.1:{server.port}/0"


def key(name: str) -> str:
    return f"minisgl:{{svc}}:{name}"


def message(pos: int, text: str = "") -> UserReply:
    return UserReply(uid=b"u" * 16, attempt=1, boot=1, pos=pos, text=text)


def received(reader: RedisBus, count: int) -> list[int]:
    got: list[int] = []

    def come() -> bool:
        entries = reader.receive(0.2)
        reader.ack(entries)
        got.extend(m.pos for e in entries for m in e.messages if isinstance(m, UserReply))
        return len(got) >= count

    wait_until(come, 10, lambda: str(got))
    return got


# --- other programs ----------------------------------------------------------------------------


@pytest.mark.parametrize("queue", [TOK, QUEUE])
@pytest.mark.parametrize("first", ["writer", "reader"])
def test_a_queue_whose_name_holds_another_type_is_made_anew_and_named(
    server: RedisServer, admin: redis.Redis, queue: str, first: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    other = reply_queue("gw")
    reader, writer = bus(server, queue, *(() if queue == TOK else (other,))), bus(server)
    writer.send(queue, [message(1)])
    assert received(reader, 1) == [1]
    reader.receive(0)  # deletes what it took: within a millisecond the next entry has the same id
    admin.set(key(queue), "mine")
    who = writer if first == "writer" else reader
    with caplog.at_level(logging.WARNING):
        if first == "reader":
            reader.receive(0)
        writer.send(queue, [message(2)])
        assert received(reader, 1) == [2]
    assert (who.errors, reader.errors + writer.errors) == (1, 1)
    named = [r.getMessage() for r in caplog.records if key(queue) in r.getMessage()]
    assert len(named) == 1 and "--service" in named[0]


def test_a_state_whose_name_holds_another_type_is_shown_again(
    server: RedisServer, admin: redis.Redis
) -> None:
    one = bus(server)
    state = WorkerState(role="gateway", id="gw", boot=1, beat=1)
    one.publish_state(state)
    admin.delete(key("state:gateway:gw"))
    admin.lpush(key("state:gateway:gw"), "mine")
    one.publish_state(state)
    assert one.read_states() == [state]
    admin.delete(key("state:gateway:gw"))
    admin.lpush(key("state:gateway:gw"), "mine")
    one.close()


def test_a_rendezvous_whose_name_holds_another_type_is_published_again(
    server: RedisServer, admin: redis.Redis
) -> None:
    admin.set(key("rdzv:g0"), "mine")
    first = Rendezvous(_url(server), "svc", "g0", size=1, revision="", silence=4)
    assert first.open(Meeting(7, "127.0.0.1", 1, 2), 20)
    first.formed()
    admin.set(key("rdzv:g0"), "mine")
    first.keep()
    assert admin.hget(key("rdzv:g0"), "phase") == b"formed" and not first.replaced(7)


NESTED = b"\x91\x82\xa1t\xa5abort\xa1z" + b"\x91" * 100_000 + b"\xc0"


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"x": b"1"}, id="without m"),
        pytest.param({"m": NESTED}, id="nested deeply"),
        pytest.param({"m": b"\xdd\xff\xff\xff\xff"}, id="claims four thousand million messages"),
        pytest.param({"m": encode([message(9, "u" * 70_000)])}, id="too long"),
        pytest.param({"m": b"\x91\x81\xa1t\xa8abort.v9"}, id="a kind of another version"),
    ],
)
@pytest.mark.parametrize("queue", [TOK, QUEUE])
def test_an_entry_that_no_worker_can_bear_is_counted_and_deleted(
    server: RedisServer, admin: redis.Redis, queue: str, fields: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(module, "MAX_ENTRY_BYTES", 1 << 16)
    reader, writer = bus(server, queue), bus(server)
    admin.xadd(key(queue), fields)
    writer.send(queue, [message(1)])
    assert received(reader, 1) == [1] and reader.errors == 1
    reader.receive(0)
    assert admin.xlen(key(queue)) == 0


def test_fields_of_a_later_version_are_passed_over(server: RedisServer, admin: redis.Redis) -> None:
    reader = bus(server, QUEUE)
    (known,) = msgspec.msgpack.decode(encode([message(5)]))
    admin.xadd(key(QUEUE), {"m": msgspec.msgpack.encode([{"later": [1, 2, 3]} | known])})
    assert received(reader, 1) == [5] and reader.errors == 0


def test_a_state_nested_deeply_hides_no_other(server: RedisServer, admin: redis.Redis) -> None:
    one, state = bus(server), WorkerState(role="gateway", id="gw", boot=1, beat=1)
    one.publish_state(state)
    admin.set(key("state:gateway:evil"), b"\x81\xa1z" + b"\x91" * 100_000)
    assert one.read_states() == [state] and one.errors == 1


def test_a_state_that_stays_unreadable_counts_once(server: RedisServer, admin: redis.Redis) -> None:
    one = bus(server)
    for looks in (1, 2):
        admin.set(key("state:gateway:evil"), b"none")
        assert [one.read_states(), one.read_states()] == [[], []] and one.errors == looks
        admin.delete(key("state:gateway:evil"))
        one.read_states()


@pytest.mark.parametrize(
    ("name", "id", "group"),
    [
        pytest.param("rank:evil", "g0/0", "g0", id="under another worker's key"),
        pytest.param("rank:g1/0", "g1/0", "g0", id="with another group's load"),
        pytest.param("rank:g0/1", "g0/1", "g0", id="with a load that only rank 0 knows"),
    ],
)
def test_a_state_in_the_name_of_another_worker_is_none(
    name: str, id: str, group: str, server: RedisServer, admin: redis.Redis
) -> None:
    def state(id: str, group: str, incarnation: int) -> WorkerState:
        load = GroupLoad(group=group, incarnation=incarnation, max_model_len=64)
        return WorkerState(role="rank", id=id, boot=incarnation, beat=1, load=load)

    one, true = bus(server), state("g0/0", "g0", 1)
    one.publish_state(true)
    admin.set(key(f"state:{name}"), encode_state(state(id, group, 2)))
    assert one.read_states() == [true] and one.errors == 1


@pytest.mark.parametrize("role", ["gateway", "tokenizer", "detokenizer"])
def test_of_two_processes_with_one_id_the_newer_has_the_place(
    role: Literal["gateway", "tokenizer", "detokenizer"], server: RedisServer, admin: redis.Redis
) -> None:
    def state(boot: int, beat: int) -> WorkerState:
        return WorkerState(role=role, id="x", boot=boot, beat=beat)

    older, newer = bus(server), bus(server)
    older.publish_state(state(1, beat=1))
    newer.publish_state(state(2, beat=1))
    with pytest.raises(ReplacedError, match=f"taken the place of {role} x"):
        older.publish_state(state(1, beat=2))
    older.close()
    newer.publish_state(state(2, beat=2))
    assert newer.read_states() == [state(2, beat=2)]


def test_a_batch_too_long_for_an_entry_travels_in_several(
    server: RedisServer, admin: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ENTRY_BYTES", 1 << 16)
    reader, writer = bus(server, QUEUE), bus(server)
    batch: list[Message] = [message(pos, "u" * 20_000) for pos in range(7)]
    batch.insert(3, message(99, "u" * 70_000))
    writer.send(QUEUE, batch)
    assert received(reader, 7) == list(range(7))
    assert (writer.errors, reader.errors) == (1, 0), "the one too long is dropped where it arose"


# --- readers that are gone ---------------------------------------------------------------------


def test_a_reader_that_is_gone_leaves_no_name_behind_once_its_work_is_taken(
    server: RedisServer, admin: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tok, "CONSUMERS_SECONDS", 0.01)
    gone, writer = bus(server, TOK, worker="gone", silence=0.1), bus(server)
    writer.send(TOK, [message(1)])
    admin.persist(key(TOK))  # on a slow machine all of it would expire
    wait_until(lambda: bool(gone.receive(0.1)), 10, lambda: "nothing to take")
    here = bus(server, TOK, worker="here", silence=0.1)
    idle = bus(server, TOK, worker="idle", silence=0.1)

    def names() -> set[bytes]:
        return {consumer["name"] for consumer in admin.xinfo_consumers(key(TOK), "tokenizers")}

    assert b"gone" in names()
    taken = received(here, 1)
    assert taken == [1]

    def cleaned() -> bool:
        writer.send(TOK, [message(0)])  # or all of it would expire
        for reader in (idle, here):
            reader.ack(reader.receive(0.05))
        return b"gone" not in names()

    wait_until(cleaned, 10, lambda: str(names()))
    assert names() == {b"here", b"idle"}
    writer.send(TOK, [message(2)])
    assert 2 in received(gone, 1), "one that was only frozen goes on"


def test_a_reader_with_work_in_hand_keeps_its_name(
    server: RedisServer, admin: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tok, "CONSUMERS_SECONDS", 0.01)
    monkeypatch.setattr(tok, "CLAIM_SECONDS", 1000.0)  # nobody takes it over
    busy, writer = bus(server, TOK, worker="busy", silence=0.01), bus(server)
    other = bus(server, TOK, worker="other", silence=0.01)
    for _ in range(2):  # makes the group, and then looks the one time for what is left behind
        assert not other.receive(0)
    writer.send(TOK, [message(1)])
    admin.persist(key(TOK))
    wait_until(lambda: bool(busy.receive(0.1)), 10, lambda: "nothing to take")
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        other.receive(0.05)
    pending = admin.xpending(key(TOK), "tokenizers")
    assert [c["name"] for c in pending["consumers"]] == [b"busy"]


# --- the user ----------------------------------------------------------------------------------


def test_nothing_that_the_documented_user_may_not_do_is_tried(
    server: RedisServer, admin: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tok, "CONSUMERS_SECONDS", 0.01)
    dead = bus(server, TOK, worker="dead", silence=0.01)
    dead.receive(0)
    dead.receive(0)
    one = bus(server, TOK, QUEUE, silence=0.01)
    admin.set(key(QUEUE), "mine")
    one.publish_state(WorkerState(role="gateway", id="gw", boot=1, beat=1))
    one.send(QUEUE, [message(1)])
    one.send(TOK, [message(2)])

    def gone() -> bool:
        one.send(TOK, [message(2)])  # or all of it would expire
        one.ack(one.receive(0.05))
        return len(admin.xinfo_consumers(key(TOK), "tokenizers")) == 1

    wait_until(gone, 10, lambda: "the consumer that is gone stays")
    one.close()
    assert admin.execute_command("ACL", "LOG") == []


@pytest.mark.parametrize("url, files, words", [
    ("redis://127.0.0.1:1/abc", {}, "must be the number of a database"),
    ("redis://u:secret@127.0.0.1:1/0/1", {}, r"'redis://u:\*\*\*@127.0.0.1:1/0/1' must be"),
    ("redis://127.0.0.1:1/0", {"password_file": "/no/such"},
     "--bus-password-file '/no/such' cannot be read: No such file"),
    ("rediss://127.0.0.1:1/0", {"ca_file": "/no/such"},
     "--bus-ca-file '/no/such' cannot be read: No such file"),
])  # fmt: skip
def test_what_can_never_reach_redis_is_refused_before_it_is_asked(
    url: str, files: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        connect(url, "svc", **files)
