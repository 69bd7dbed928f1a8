"""What rank 0 sends for a step, read back as a detokenizer reads it."""

from collections.abc import Sequence

import numpy as np

from minisgl.bus.base import Bus, Entry
from minisgl.config import EngineConfig
from minisgl.messages import (
    AuditMsg,
    DetokenizeBatch,
    ErrorInfo,
    Message,
    Route,
    SamplingParams,
    UserMsg,
    UserReply,
    WorkerState,
    decode,
    encode,
    pack_ids,
    unpack_ids,
)
from minisgl.scheduler.rank import apply
from minisgl.scheduler.replies import NameColumn, ReplySink
from minisgl.scheduler.scheduler import Scheduler

from .model_engine import ModelEngine, expected

A, B = [2, 3, 4, 5], [9, 8, 7]


class Wire(Bus):
    """Keeps what is sent, after a trip through its bytes."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []
        self.entries = 0

    def subscribe(self, queue: str) -> None: ...

    def send(self, queue: str, batch: Sequence[Message]) -> None:
        self.entries += 1
        self.sent += [(queue, message) for message in decode(encode(batch))]

    def receive(self, timeout: float) -> list[Entry]:
        return []

    def ack(self, entries: Sequence[Entry]) -> None: ...

    def publish_state(self, state: WorkerState) -> None: ...

    def read_states(self) -> list[WorkerState]:
        return []

    def close(self) -> None: ...


class Group:
    def __init__(self, **config: object) -> None:
        self.wire = Wire()
        self.sink = ReplySink(self.wire, "g0", 77, 5)
        engine = ModelEngine(60, 2, 64, 4)
        settings = EngineConfig(model="m", max_running_requests=4, **config)  # type: ignore[arg-type]
        self.scheduler = Scheduler(settings, engine, self.sink)
        self.sink.scheduler = self.scheduler

    def ask(self, uid: bytes, prompt: list[int], **fields: object) -> bool:
        gateway = str(fields.pop("gateway", "gw0"))
        detokenizer = str(fields.pop("detokenizer", "d0"))
        message = UserMsg(
            uid=uid,
            attempt=1,
            route=Route(gateway=gateway, boot=5, detokenizer=detokenizer),
            group="g0",
            incarnation=77,
            prompt_ids=pack_ids(prompt),
            sampling=SamplingParams(**fields),  # type: ignore[arg-type]
        )
        return apply(message, self.scheduler, "g0", 77)

    def run(self) -> None:
        while not self.scheduler.idle:
            self.scheduler.step()

    def tokens(self, detokenizer: str) -> dict[bytes, list[int]]:
        """The output of each request, checked for openings, positions and ends."""
        out: dict[bytes, list[int]] = {}
        ended: set[bytes] = set()

        def take(uid: bytes, pos: int, ids: bytes) -> None:
            assert uid not in ended and pos == len(out[uid])
            out[uid] += unpack_ids(ids).tolist()

        for queue, message in self.wire.sent:
            if queue != f"detok:{detokenizer}":
                continue
            assert isinstance(message, DetokenizeBatch) and not message.audit
            assert (message.group, message.incarnation) == ("g0", 77)
            assert message.detokenizer == detokenizer
            for part in message.others:
                if part.opening is not None:
                    assert part.uid not in out
                    out[part.uid] = []
                if part.ids:
                    take(part.uid, part.pos, part.ids)
                if part.finish:
                    ended.add(part.uid)
            for uid, attempt, _, pos, gateway, ids in message.rows():
                assert attempt == 1 and message.gateways[gateway][1] == 5
                take(uid, pos, ids)
        assert ended == out.keys()
        return out


def test_a_step_is_one_entry_whatever_the_number_of_requests() -> None:
    group = Group(overlap_scheduling=False)
    for i in range(4):
        group.ask(bytes([i]) * 16, [2 + i, 3], max_tokens=9, ignore_eos=True)
    group.scheduler.step()
    group.scheduler.step()
    assert group.wire.entries == 2
    group.run()
    assert group.wire.entries == 9


def test_tokens_of_two_detokenizers_and_gateways_reach_their_own() -> None:
    group = Group()
    want = {}
    for i, (gateway, detokenizer) in enumerate(
        [("gw0", "d0"), ("gw1", "d0"), ("gw0", "d1"), ("gw1", "d1")]
    ):
        uid = bytes([200 - i]) * 16
        sampling = {"max_tokens": 3 + i, "ignore_eos": i % 2 == 0}
        group.ask(uid, A[: 1 + i], gateway=gateway, detokenizer=detokenizer, **sampling)
        params = SamplingParams(**sampling)  # type: ignore[arg-type]
        want.setdefault(detokenizer, {})[uid] = expected(A[: 1 + i], params, 60)
    group.run()
    assert {name: group.tokens(name) for name in want} == want


def test_an_opening_says_what_a_detokenizer_must_know() -> None:
    group = Group()
    group.ask(b"a" * 16, A, max_tokens=2, stop=("x", "yy"))
    group.run()
    (_, first), *_ = group.wire.sent
    assert isinstance(first, DetokenizeBatch)
    opening = first.others[0].opening
    assert opening is not None and first.others[0].ids == b"" and first.others[0].pos == 0
    assert unpack_ids(opening.prompt_ids).tolist() == A and opening.stop == ("x", "yy")
    assert first.others[0].source.run == 1


def test_a_refusal_goes_to_the_gateway_with_status_and_field() -> None:
    group = Group()
    group.ask(b"a" * 16, [5] * 64)
    ((queue, reply),) = group.wire.sent
    assert queue == "reply:gw0" and isinstance(reply, UserReply) and reply.boot == 5
    assert isinstance(reply.error, ErrorInfo) and reply.error.code == "context_length_exceeded"


def test_an_audit_lists_what_is_held_and_goes_to_gateways_that_have_nothing_too() -> None:
    group = Group(overlap_scheduling=False)
    for i in range(6):  # four run, two wait
        group.ask(bytes([i]) * 16, A, max_tokens=9, ignore_eos=True)
    group.scheduler.step()
    group.scheduler.step()
    group.wire.sent.clear()
    states = [
        WorkerState(role="gateway", id="gw9", boot=4, beat=1),
        WorkerState(role="detokenizer", id="d0", boot=4, beat=1),
        WorkerState(role="detokenizer", id="d1", boot=4, beat=1),
    ]
    group.sink.audit(states)
    audits = dict(group.wire.sent)
    assert audits.keys() == {"detok:d0", "detok:d1"}
    first, second = audits["detok:d0"], audits["detok:d1"]
    assert isinstance(first, DetokenizeBatch) and isinstance(second, DetokenizeBatch)
    assert first.audit and first.gateways == [("gw9", 4), ("gw0", 5)]
    held = {uid: (attempt, run, pos) for uid, attempt, run, pos, _, _ in first.rows()}
    assert held == {bytes([i]) * 16: (1, i + 1, 2 if i < 4 else 0) for i in range(6)}
    assert second.gateways == [("gw9", 4)] and second.rows() == []


def test_messages_of_another_incarnation_or_shape_are_dropped() -> None:
    group = Group()
    good = UserMsg(
        uid=b"a" * 16,
        attempt=1,
        route=Route(gateway="gw0", boot=5, detokenizer="d0"),
        group="g0",
        incarnation=77,
        prompt_ids=pack_ids(A),
    )
    for change in (
        {"incarnation": 78},
        {"group": "g1"},
        {"uid": b"short"},
        {"prompt_ids": b"abc"},
        {"output_ids": b"abcde"},
    ):
        fields = {name: getattr(good, name) for name in good.__struct_fields__} | change
        assert not apply(UserMsg(**fields), group.scheduler, "g0", 77)
    audit = AuditMsg(boot=1, group="g0", incarnation=77, detokenizer="d0")
    assert not apply(audit, group.scheduler, "g0", 77)
    assert group.scheduler.idle and not group.wire.sent


def test_columns_that_do_not_fit_together_are_an_error() -> None:
    batch = DetokenizeBatch(group="g", incarnation=1, uid=b"x" * 16, attempt=b"1234")
    for broken in (batch, DetokenizeBatch(group="g", incarnation=1, ids=b"1234")):
        try:
            broken.rows()
        except ValueError:
            continue
        raise AssertionError("columns of different length were read")
    whole = {
        "uid": b"x" * 16,
        "attempt": pack_ids([1]),
        "run": np.array([1], "<i8").tobytes(),
        "pos": pack_ids([0]),
        "gateway": pack_ids([3]),
        "ids": pack_ids([7]),
    }
    try:
        DetokenizeBatch(group="g", incarnation=1, **whole).rows()  # type: ignore[arg-type]
    except ValueError:
        return
    raise AssertionError("a gateway that is not listed was accepted")


def test_names_that_no_row_has_any_more_are_forgotten() -> None:
    column: NameColumn[str] = NameColumn(4)
    held = [""] * 4
    for i in range(1000):  # gateways that come and go
        row = i % 3
        held[row] = f"gateway {i}"
        column.set(row, held[row])
        assert [column.names[n] for n in column.of_row[:3]][: i + 1] == held[:3][: i + 1]
        assert len(column.names) <= 8
    column.set(3, held[0])
    assert column.of_row[3] == column.of_row[0]
