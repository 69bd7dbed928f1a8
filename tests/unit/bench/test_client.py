"""The load generator, against a server that answers as told."""

import asyncio
import time

import pytest

from minisgl.bench.client import Generator, Load, Planned, Target, _Reading, look_at, plan
from minisgl.bench.stats import RequestRecord
from minisgl.config import UsageError
from tests.unit.bench.sse_server import MAX_MODEL_LEN, SseServer

TARGET = Target(url="", model="m", token_ids=[5, 6], max_model_len=100, headers={})


async def target_of(server: SseServer) -> Target:
    return await asyncio.to_thread(look_at, server.url, None, "secret")


async def send(server: SseServer, *planned: Planned, **load: object) -> list[RequestRecord]:
    generator = Generator(await target_of(server), Load(requests=planned, **load))  # type: ignore[arg-type]
    await generator.run()
    return generator.records


async def test_a_stream_is_read_to_its_end() -> None:
    async with SseServer() as server:
        (record,) = await send(server, Planned([5, 6, 7], 4))
    assert record.error is None and record.whole
    assert (record.prompt_tokens, record.output_tokens) == (3, 4)
    assert record.first is not None and record.end is not None
    assert 0 <= record.start <= record.first <= record.end


def test_the_longest_pause_is_the_one_between_two_pieces_of_output() -> None:
    record, times = RequestRecord(start=0.0, prompt_tokens=3), iter([9.0, 9.5, 12.0, 13.0, 20.0])
    reading = _Reading(Planned([5, 6, 7], 4), record, lambda: next(times))
    text = b'data: {"choices": [{"text": "a", "finish_reason": null}]}'
    for event in (text, text, text, text, b": keep-alive"):
        reading.take([event])
    assert (record.first, record.end, record.pause) == (9.0, 13.0, 2.5)


async def test_the_request_asks_for_the_full_length_and_for_usage() -> None:
    async with SseServer() as server:
        await send(server, Planned([5, 6, 7], 4), temperature=0.5)
    body = server.bodies[0]
    assert body["prompt"] == [5, 6, 7] and body["model"] == "first"
    assert (body["max_tokens"], body["ignore_eos"], body["temperature"]) == (4, True, 0.5)
    assert body["stream"] and body["stream_options"] == {"include_usage": True}
    assert server.keys == ["Bearer secret"]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("refusal", "HTTP 429"),
        ("error", "in the stream: {'message': 'lost'}"),
        ("broken off", "broke off"),
        ("one token less", "3 tokens instead of 4"),
    ],
)
async def test_what_goes_wrong_is_in_the_record(fault: str, error: str) -> None:
    async with SseServer(fault) as server:
        (record,) = await send(server, Planned([5], 4))
    assert record.error is not None and error in record.error
    assert not record.whole and record.end is not None


async def test_a_client_that_leaves_closes_its_connection() -> None:
    async with SseServer() as server:
        (record,) = await send(server, Planned([5], 1_000_000, leave_after=3))
        async with asyncio.timeout(10):
            while server.open:
                await asyncio.sleep(0.01)
    assert record.left and record.error is None and not record.whole
    assert record.output_tokens == 3


async def test_a_client_may_leave_before_the_first_token() -> None:
    async with SseServer() as server:
        (record,) = await send(server, Planned([5], 10, leave_after=0))
    assert record.left and record.first is None and record.end is not None


async def test_no_more_requests_are_open_than_allowed() -> None:
    async with SseServer() as server:
        records = await send(server, *[Planned([5], 20)] * 12, concurrency=3)
    assert len(records) == 12 and all(r.whole for r in records)
    assert 1 <= server.most_open <= 3


async def test_fixed_arrivals_keep_their_distance() -> None:
    async with SseServer() as server:
        records = await send(server, *[Planned([5], 1)] * 5, rate=50.0, arrival="fixed")
    starts = [r.start for r in records]
    assert all(start >= i / 50 for i, start in enumerate(starts))


async def test_requests_of_a_trace_are_sent_when_they_are_due() -> None:
    times = [0.0, 0.05, 0.05, 0.2]
    async with SseServer() as server:
        records = await send(server, *[Planned([5], 1)] * 4, times=times)
    assert [r.start for r in records] == times
    assert all(r.sent is not None and r.sent >= r.start for r in records)


async def test_a_request_that_must_wait_for_its_turn_has_waited_since_it_was_due() -> None:
    """Else a slow server would hide what it makes its clients wait."""
    async with SseServer() as server:
        first, second = await send(
            server, Planned([5], 300), Planned([5], 1), times=[0.0, 0.0], concurrency=1
        )
    assert first.end is not None and second.start == 0.0
    assert second.late >= first.end and second.ttft > first.e2e


async def test_the_client_notes_how_late_it_was_itself() -> None:
    async with SseServer() as server:
        target = await target_of(server)
        generator = Generator(target, Load(requests=[Planned([5], 1), Planned([5], 1000)]))
        await generator.run(lambda: time.sleep(0.15))  # while the second one goes on
    assert max(generator.late) > 0.1 and generator.processor_share > 0


async def test_poisson_arrivals_are_those_of_the_seed() -> None:
    load = Load(requests=[], rate=10.0, seed=3)
    one, two = Generator(TARGET, load), Generator(TARGET, load)
    gaps = [one._gap(10.0) for _ in range(2_000)]
    assert gaps[:50] == [two._gap(10.0) for _ in range(50)]
    assert len(set(gaps)) > 1_900
    assert sum(gaps) / len(gaps) == pytest.approx(0.1, rel=0.1)


async def test_a_timed_load_starts_its_list_again_until_the_time_is_up() -> None:
    async with SseServer() as server:
        records = await send(server, Planned([5], 2), concurrency=2, seconds=0.5)
    assert len(records) > 1 and all(r.whole for r in records)


async def test_a_server_is_asked_for_model_ids_and_limit() -> None:
    async with SseServer() as server:
        found = await asyncio.to_thread(look_at, server.url + "/v1/", None, None)
        named = await asyncio.to_thread(look_at, server.url, "second", None)
    assert (found.url, found.model) == (server.url, "first")
    assert (found.token_ids, found.max_model_len) == ([5, 6, 7], MAX_MODEL_LEN)
    assert named.model == "second"


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://[::"])
def test_a_server_that_is_not_there_is_one_clear_error(url: str) -> None:
    with pytest.raises(UsageError, match="no answer from"):
        look_at(url, None, None)


async def test_a_server_of_another_kind_is_one_clear_error() -> None:
    async with SseServer("no tokenize") as server:
        with pytest.raises(UsageError, match="/tokenize answered 404"):
            await target_of(server)


def test_a_plan_is_that_of_its_seed_and_within_its_ranges() -> None:
    def make(seed: int) -> list[Planned]:
        return plan(TARGET, 200, (3, 9), (2, 7), disconnect_share=0.5, seed=seed)

    planned = make(1)
    assert planned == make(1) and planned != make(2)
    assert {len(p.prompt_ids) for p in planned} == set(range(3, 10))
    assert {p.output_tokens for p in planned} == set(range(2, 8))
    assert {i for p in planned for i in p.prompt_ids} == {5, 6}
    leaving = [p for p in planned if p.leave_after is not None]
    assert 60 < len(leaving) < 140
    assert all(0 <= p.leave_after < p.output_tokens for p in leaving)  # type: ignore[operator]


def test_a_plan_that_does_not_fit_the_model_is_refused() -> None:
    with pytest.raises(UsageError, match=r"allow 101 tokens together.*limit is 100"):
        plan(TARGET, 1, (3, 61), (2, 40), disconnect_share=0, seed=0)
