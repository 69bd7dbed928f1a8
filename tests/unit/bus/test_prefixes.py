"""Prefixes that groups show, and what a tokenizer makes of them; partly needs redis-server."""

import signal
import sys
from collections.abc import Iterator, Sequence
from subprocess import run

import numpy as np
import pytest
import redis
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from minisgl.bus import prefixes
from minisgl.bus.prefixes import BLOCK, PrefixLookup, PrefixPublisher, RecentHashes, block_hashes
from minisgl.config import EngineConfig, WorkerConfig
from minisgl.engine.fake import FakeEngine
from minisgl.messages import (
    GroupLoad,
    Route,
    SamplingParams,
    TokenizeMsg,
    UserMsg,
    WorkerState,
    pack_ids,
)
from minisgl.scheduler.output import NullSink
from minisgl.scheduler.scheduler import Scheduler
from minisgl.tokenizer.worker import TokenizerCore
from tests.redis_server import RedisServer
from tests.support import wait_until
from tests.unit.small_tokenizers import byte_level

NONE = np.empty(0, np.int32)
KEY = "minisgl:{svc}:prefix:g0"


@pytest.fixture(autouse=True)
def _patient_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests share few cores: only a Redis that is really frozen may count as one.
    monkeypatch.setattr(prefixes, "LOOKUP_SECONDS", 1.0)


def ids(blocks: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, blocks * BLOCK, dtype=np.int32)


# --- hashes


def test_a_hash_covers_the_hash_before_it_and_the_bytes_of_its_block() -> None:
    prompt = ids(2)
    raw = prompt.astype("<i4").tobytes()
    first = xxhash.xxh3_64_intdigest(bytes(8) + raw[:256])
    second = xxhash.xxh3_64_intdigest(first.to_bytes(8, "little") + raw[256:])
    assert block_hashes(prompt) == [first, second]


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (63, 0), (64, 1), (127, 1), (128, 2)])
def test_only_whole_blocks_have_a_hash(tokens: int, blocks: int) -> None:
    assert len(block_hashes(ids(2)[:tokens])) == blocks


def test_prompts_share_hashes_exactly_as_far_as_they_share_blocks() -> None:
    one, other = ids(4), ids(4)
    other[2 * BLOCK] += 1
    shared = [a == b for a, b in zip(block_hashes(one), block_hashes(other), strict=True)]
    assert shared == [True, True, False, False]


def test_every_nth_token_of_an_array_is_hashed_as_if_it_lay_in_a_row() -> None:
    wide = np.repeat(ids(2), 3)
    assert block_hashes(wide[::3]) == block_hashes(ids(2))


# --- what is remembered


def test_the_hashes_used_longest_ago_are_forgotten() -> None:
    recent = RecentHashes(3)
    for value in (1, 2, 3):
        recent.use([value])
    recent.use([1])
    recent.use([4])
    assert set(recent) == {1, 3, 4}


def test_of_one_prompt_the_end_is_forgotten_first() -> None:
    recent = RecentHashes(3)
    recent.use([1, 2, 3])
    recent.use([9])
    assert set(recent) == {1, 2, 9}


def test_of_a_prompt_longer_than_the_memory_the_start_is_kept() -> None:
    recent = RecentHashes(2)
    recent.use([1, 2, 3])
    assert set(recent) == {1, 2}


@given(st.lists(st.one_of(st.none(), st.lists(st.integers(0, 12), unique=True)), max_size=40))
def test_the_changes_add_up_to_what_is_remembered(
    operations: list[list[int] | None],
) -> None:
    recent, shown = RecentHashes(5), set[int]()
    for chain in [*operations, None]:
        if chain is not None:
            recent.use(chain)
            continue
        added, removed = recent.take()
        assert not added & shown and removed <= shown
        shown = (shown | added) - removed
        assert shown == set(recent)
        assert len(recent) <= 5


# --- on a bus


@pytest.fixture(scope="module")
def _running() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
def server(_running: RedisServer) -> RedisServer:
    _running.client().flushall()
    _running.client().config_set("maxmemory", 0)
    return _running


def config(server: RedisServer) -> WorkerConfig:
    return WorkerConfig(bus=server.url, service="svc", model="m")


def publisher(server: RedisServer, group: str = "g0", tokens: int = 1 << 20) -> PrefixPublisher:
    return PrefixPublisher(config(server), group, tokens)


def shown(server: RedisServer) -> set[int]:
    return {int.from_bytes(m, "little") for m in server.client().smembers(KEY)}


@pytest.mark.redis
def test_what_was_added_is_shown_and_expires(server: RedisServer) -> None:
    one = publisher(server)
    one.add(ids(3), NONE)
    one.publish()
    assert shown(server) == set(block_hashes(ids(3)))
    assert 0 < server.client().ttl(KEY) <= 300


@pytest.mark.redis
def test_a_group_shows_no_more_than_its_cache_holds(server: RedisServer) -> None:
    one = publisher(server, tokens=4 * BLOCK)
    for seed in range(3):
        one.add(ids(2, seed), NONE)
        one.publish()
    assert shown(server) == {*block_hashes(ids(2, 1)), *block_hashes(ids(2, 2))}


@pytest.mark.redis
def test_a_new_incarnation_starts_with_an_empty_set(server: RedisServer) -> None:
    old = publisher(server)
    old.add(ids(3), NONE)
    old.publish()
    publisher(server).publish()
    assert shown(server) == set()


@pytest.mark.redis
def test_the_last_words_of_an_old_incarnation_are_cleared(server: RedisServer) -> None:
    old, new = publisher(server), publisher(server)
    old.publish()
    new.add(ids(2, 1), NONE)
    new.publish()
    old.add(ids(3), NONE)
    old.publish()
    new.publish()  # sees it
    new.publish()
    assert shown(server) == set(block_hashes(ids(2, 1)))


@pytest.mark.redis
def test_after_a_flush_everything_is_shown_again(server: RedisServer) -> None:
    one = publisher(server)
    one.add(ids(3), NONE)
    one.publish()
    server.client().flushall()
    one.publish()  # sees it
    one.publish()
    assert shown(server) == set(block_hashes(ids(3)))


@pytest.mark.redis
def test_a_value_of_another_kind_under_the_key_is_replaced(server: RedisServer) -> None:
    one = publisher(server)
    one.publish()
    server.client().set(KEY, "x")
    one.add(ids(1), NONE)
    with pytest.raises(redis.RedisError):
        one.publish()
    one.publish()
    assert shown(server) == set(block_hashes(ids(1)))


@pytest.mark.redis
def test_what_a_full_redis_refused_is_shown_once_it_has_room(server: RedisServer) -> None:
    one = publisher(server)
    one.add(ids(3), NONE)
    server.client().config_set("maxmemory", 1)
    with pytest.raises(redis.RedisError):
        one.publish()
    server.client().config_set("maxmemory", 0)
    one.add(ids(1, 1), NONE)
    one.publish()
    assert shown(server) == {*block_hashes(ids(3)), *block_hashes(ids(1, 1))}


@pytest.mark.redis
def test_the_most_hashes_go_out_and_come_back(server: RedisServer) -> None:
    one = publisher(server, tokens=1 << 30)
    prompt = ids(prefixes.MAX_HASHES + 10)
    one.add(prompt, NONE)
    one.publish()
    assert server.client().scard(KEY) == prefixes.MAX_HASHES
    assert cached(server, ["g0"], prompt[: 9 * BLOCK]) == {"g0": 9 * BLOCK}


@pytest.mark.redis
def test_the_thread_goes_on_after_an_outage(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefixes, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(prefixes, "PUBLISH_SECONDS", 0.05)
    one = publisher(server)
    server.client().config_set("maxmemory", 1)
    one.start()
    one.add(ids(2), NONE)
    wait_until(lambda: len(one._recent) == 2, 10, lambda: "the thread hashes nothing")
    server.client().config_set("maxmemory", 0)
    wait_until(lambda: len(shown(server)) == 2, 10, lambda: f"{shown(server)}")
    one.close()
    assert not one._thread.is_alive()


def test_a_publisher_without_redis_takes_what_it_gets_and_ends() -> None:
    absent = WorkerConfig(bus="redis://127.0.0.1:1/0", service="svc", model="m")
    one = PrefixPublisher(absent, "g0", 1 << 20)
    one.start()
    for seed in range(prefixes.WAITING_PREFIXES + 10):
        one.add(ids(1, seed), NONE)
    one.close()
    assert not one._thread.is_alive()
    assert len(one._waiting) <= prefixes.WAITING_PREFIXES


def test_nothing_is_written_once_the_guard_ends_the_process() -> None:
    class Ended(Exception):
        pass

    def guard() -> None:
        raise Ended

    absent = WorkerConfig(bus="redis://127.0.0.1:1/0", service="svc", model="m")
    with pytest.raises(Ended):
        PrefixPublisher(absent, "g0", 1 << 20, guard=guard).publish()


# --- looking up


def cached(server: RedisServer, groups: Sequence[str], prompt: np.ndarray) -> dict[str, int]:
    lookup = PrefixLookup(config(server))
    try:
        return lookup.cached(groups, prompt.tolist())
    finally:
        lookup.close()


@pytest.mark.redis
def test_each_group_is_credited_with_the_blocks_it_shows_from_the_start(
    server: RedisServer,
) -> None:
    prompt = ids(4)
    for group, tokens in (("g0", 3 * BLOCK), ("g1", BLOCK)):
        one = publisher(server, group)
        one.add(prompt[:tokens], NONE)
        one.publish()
    found = cached(server, ["g0", "g1", "g2"], prompt)
    assert found == {"g0": 3 * BLOCK, "g1": BLOCK, "g2": 0}


@pytest.mark.redis
def test_a_block_behind_a_gap_does_not_count(server: RedisServer) -> None:
    first, _, third = (h.to_bytes(8, "little") for h in block_hashes(ids(3)))
    server.client().sadd(KEY, first, third)
    assert cached(server, ["g0"], ids(3)) == {"g0": BLOCK}


@pytest.mark.redis
def test_of_a_long_prompt_some_blocks_are_asked_for(server: RedisServer) -> None:
    prompt = ids(2 * prefixes.ASKED + 3)
    one = publisher(server)
    one.add(prompt[: 100 * BLOCK], NONE)
    one.publish()
    assert cached(server, ["g0"], prompt) == {"g0": 99 * BLOCK}  # each third one
    whole = prompt[: prefixes.ASKED * BLOCK]
    assert cached(server, ["g0"], whole) == {"g0": 100 * BLOCK}


@pytest.mark.redis
def test_a_prompt_shorter_than_a_block_is_not_looked_up(server: RedisServer) -> None:
    server.client().set(KEY, "would be an error")
    lookup = PrefixLookup(config(server))
    assert lookup.cached(["g0"], [1] * (BLOCK - 1)) == {"g0": 0}
    assert lookup._not_before < 0


@pytest.mark.redis
def test_a_frozen_redis_knows_nothing_and_is_not_asked_again_for_a_while(
    server: RedisServer,
) -> None:
    one = publisher(server)
    one.add(ids(1), NONE)
    one.publish()
    now = 0.0
    lookup = PrefixLookup(config(server), lambda: now)
    server.send_signal(signal.SIGSTOP)
    try:
        assert lookup.cached(["g0"], ids(1).tolist()) == {"g0": 0}
    finally:
        server.send_signal(signal.SIGCONT)
    assert lookup.cached(["g0"], ids(1).tolist()) == {"g0": 0}
    now = prefixes.PAUSE_SECONDS
    assert lookup.cached(["g0"], ids(1).tolist()) == {"g0": BLOCK}


def test_an_absent_redis_knows_nothing() -> None:
    absent = WorkerConfig(bus="redis://127.0.0.1:1/0", service="svc", model="m")
    assert PrefixLookup(absent).cached(["g0"], [1] * BLOCK) == {"g0": 0}


def test_looking_up_needs_no_torch() -> None:
    code = (
        "import sys, minisgl.tokenizer.worker, minisgl.bus.prefixes; print('torch' in sys.modules)"
    )
    done = run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# --- schedulers and a tokenizer together


class Group:
    """A scheduler on an engine that computes nothing, and its publisher."""

    def __init__(self, server: RedisServer, name: str, cache_type: str = "radix") -> None:
        self.name = name
        engine = FakeEngine(num_pages=512, page_size=16, max_seq_len=1024, vocab_size=300)
        self.publisher = publisher(server, name, 512 * 16)
        settings = EngineConfig(model="m", max_running_requests=4, cache_type=cache_type)
        self.kept: list[np.ndarray] = []
        self.scheduler = Scheduler(settings, engine, NullSink(), self.keep)

    def keep(self, prompt: np.ndarray, output: np.ndarray) -> None:
        self.kept.append(np.concatenate([prompt, output]))
        self.publisher.add(prompt, output)

    def compute(self, prompt: Sequence[int], max_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=max_tokens)
        self.scheduler.add(b"u" * 16, np.array(prompt, np.int32), sampling)
        while not self.scheduler.idle:
            self.scheduler.step()
        self.publisher.publish()

    def state(self) -> WorkerState:
        number = ord(self.name)
        load = GroupLoad(group=self.name, incarnation=number, max_model_len=1024)
        return WorkerState(role="rank", id=f"{self.name}/0", boot=number, beat=1, load=load)


def ask(server: RedisServer, groups: Sequence[Group], prompt: Sequence[int]) -> str:
    core = TokenizerCore(
        byte_level(), 300, lambda: [g.state() for g in groups],
        cached=PrefixLookup(config(server)).cached,
    )  # fmt: skip
    route = Route(gateway="gw", boot=5, detokenizer="d0")
    message = TokenizeMsg(uid=b"v" * 16, attempt=1, route=route, prompt_ids=pack_ids(prompt))
    ((_, request),) = core.handle(message)
    assert isinstance(request, UserMsg)
    return request.group


@pytest.mark.redis
def test_a_prompt_goes_to_the_group_that_has_computed_its_start(server: RedisServer) -> None:
    groups = [Group(server, name) for name in "abc"]
    prompt = [t % 300 for t in range(200)]
    groups[1].compute(prompt, 1)
    groups[2].compute(prompt[:100], 1)
    assert ask(server, groups, [*prompt, 7, 8]) == "b"
    assert ask(server, groups, [5, *prompt]) == "a"


@pytest.mark.redis
def test_a_conversation_goes_back_to_the_group_that_has_its_answer(server: RedisServer) -> None:
    groups = [Group(server, name) for name in "ab"]
    prompt = [t % 300 for t in range(70)]
    groups[1].compute(prompt, 100)
    groups[0].compute(prompt, 1)
    answered = groups[1].kept[-1]
    assert len(answered) == 160  # whole pages of 169: the last token was never an input
    assert ask(server, groups, [*answered.tolist(), 5]) == "b"


@pytest.mark.redis
def test_a_group_that_keeps_no_prefixes_shows_none(server: RedisServer) -> None:
    group = Group(server, "a", cache_type="naive")
    group.compute([t % 300 for t in range(200)], 1)
    assert server.client().exists("minisgl:{svc}:prefix:a") == 0


def test_the_cache_holds_what_is_reported_and_that_stays_as_it_was() -> None:
    """With chunks, shared prefixes, rows used again, and retractions for want of pages."""
    random, reported = np.random.default_rng(5), []
    engine = FakeEngine(num_pages=24, page_size=4, max_seq_len=64, vocab_size=300)

    def report(*parts: np.ndarray) -> None:
        whole = np.concatenate(parts)
        assert scheduler.cache.prefix.match(whole)[0].cached_len == len(whole)
        reported.append((parts, whole))

    config = EngineConfig(
        model="m", max_running_requests=4, max_prefill_tokens=16, reserve_tokens=1
    )
    scheduler = Scheduler(config, engine, NullSink(), report)
    for number in range(60):
        prompt = np.resize(np.arange(7, dtype=np.int32), random.integers(1, 40))
        sampling = SamplingParams(max_tokens=int(random.integers(1, 24)))
        scheduler.add(bytes([number]) * 16, prompt, sampling)
        scheduler.step()
    while not scheduler.idle:
        scheduler.step()
    assert scheduler.retractions and any(len(output) for (_, output), _ in reported)
    for parts, whole in reported:
        assert np.array_equal(np.concatenate(parts), whole)
