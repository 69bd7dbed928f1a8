"""`minisgl engine`: one rank as a process, from its start to its end."""

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from minisgl.bus import Bus, connect_worker, req_queue
from minisgl.bus.background import BackgroundBus
from minisgl.bus.base import REPLACED_CODE, ReplacedError
from minisgl.config import EngineConfig, RankConfig, new_boot
from minisgl.distributed import Communicator, PeerError
from minisgl.distributed.device import select_device
from minisgl.distributed.shared_memory import empty_shared_memory, prepare_shared_memory
from minisgl.engine.step import StepEngine
from minisgl.health import Health
from minisgl.hub import resolve_model
from minisgl.messages import GroupLoad, WorkerState
from minisgl.scheduler.feed import make_feed
from minisgl.scheduler.group import PATIENCE_SECONDS, LocalMembers, Members, device_group
from minisgl.scheduler.output import NullSink
from minisgl.scheduler.rank import Rank
from minisgl.scheduler.replies import ReplySink
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.watchdog import PEER_LOST_CODE, Watchdog, ends_at_once

if TYPE_CHECKING:
    from minisgl.bus.prefixes import PrefixPublisher

_log = logging.getLogger(__name__)

STEPS_IN_SILENCE = 8
"""A step of prompts may take this part of the heartbeat's time-out,"""
LEAST_STEP_TOKENS = 64
"""but it computes so many tokens in any case."""


def run_engine(
    config: RankConfig,
    *,
    on_ready: Callable[[], None] | None = None,
    stop: threading.Event | None = None,
) -> int:
    """Serve as one rank until the group has drained after `stop`; the exit code.

    Raises `UsageError` or `StartError` for a start that failed.
    """
    stop = stop or threading.Event()
    boot, incarnation = new_boot(), new_boot() >> 1  # 63 bits: it travels as one integer
    watchdog = Watchdog(config.heartbeat_timeout_seconds)
    members, bus = _members_and_bus(config, boot, watchdog)
    first = config.tp_rank == 0
    health = Health(config.health_dir, str(config.tp_rank))
    formed = False
    beats = iter(range(1, 2**63))

    def state(load: GroupLoad | None) -> WorkerState:
        health.show_ready(formed and not stop.is_set())
        return WorkerState(
            role="rank",
            id=f"{config.group}/{config.tp_rank}",
            boot=boot,
            beat=next(beats),
            pod=config.pod,
            draining=stop.is_set(),
            load=load,
        )

    def turn() -> None:
        watchdog.turn()
        health.turn()

    starting = contextlib.ExitStack()
    comm: Communicator | None = None
    prefixes: PrefixPublisher | None = None
    shares = False
    try:
        if first:
            bus.subscribe(req_queue(config.group, incarnation))
        if isinstance(bus, BackgroundBus):
            starting.enter_context(ends_at_once(stop))
            bus.start(receives=first)
        bus.publish_state(state(None))
        shares = _shares_memory(config)
        if shares:
            prepare_shared_memory()
        comm, place = members.meet(incarnation)
        comm = device_group(config.engine, comm)
        engine = make_engine(config.engine, comm)
        incarnation = comm.broadcast_int(incarnation)
        rows = config.engine.max_running_requests + 1
        sink = ReplySink(bus, config.group, incarnation, rows) if first else None
        if first and isinstance(bus, BackgroundBus):
            prefixes = _prefix_publisher(config, engine, watchdog)
        on_kept = None if prefixes is None else prefixes.add
        settings = config.engine
        if isinstance(bus, BackgroundBus):
            slowest = min(row[0] for row in comm.gather_ints([int(min(engine.prefill_rate, 1e9))]))
            tokens = step_tokens(
                settings.max_prefill_tokens, slowest, config.heartbeat_timeout_seconds
            )
            settings = dataclasses.replace(settings, max_prefill_tokens=tokens)
        scheduler = Scheduler(settings, engine, sink or NullSink(), on_kept)
        if sink is not None:
            sink.scheduler = scheduler
        feed = make_feed(comm, place, PATIENCE_SECONDS)
        if first:
            engine.measure_busy()
        rank = Rank(
            scheduler,
            feed,
            group=config.group,
            incarnation=incarnation,
            bus=bus if first else None,
            sink=sink,
            state=state,
            publish=bus.publish_state,
            turn=turn,
            drain_seconds=config.drain,
            silence=config.heartbeat_timeout_seconds,
            transport=comm.transport,
            busy=lambda: engine.busy,
        )
        comm.barrier()
        members.formed()
        formed = True
        starting.close()
        bus.publish_state(state(rank.load() if first else None))
        if isinstance(bus, BackgroundBus):
            watchdog.start()
        _log.info(
            "ready group=%s rank=%d of=%d max_model_len=%d",
            config.group, config.tp_rank, config.engine.tensor_parallel_size,
            scheduler.max_model_len,
        )  # fmt: skip
        if on_ready is not None:
            on_ready()
        rank.run(stop.is_set)
        feed.close()
    except PeerError as error:
        _log.error("%s: this rank cannot go on without it", error)
        return PEER_LOST_CODE
    except ReplacedError as error:
        _log.error("%s", error)
        return REPLACED_CODE
    finally:
        starting.close()
        watchdog.stop()
        if prefixes is not None:
            prefixes.close()
        bus.close()
        members.close()
        if comm is not None:
            comm.close()
        if shares:
            empty_shared_memory()
    return 0


def _shares_memory(config: RankConfig) -> bool:
    """Whether /dev/shm is this group's, and NCCL may use it. Outside of pods it is everybody's."""
    engine = config.engine
    if not config.pod or engine.tensor_parallel_size == 1 or engine.fake_engine:
        return False
    return select_device(engine.device, config.tp_rank).type == "cuda"


def step_tokens(asked: int, rate: float, silence: float) -> int:
    """Prompt tokens of one step, at most `asked`, for a group that computes `rate` a second.

    A step that lasts for longer than `silence` seconds, the heartbeat's time-out, is taken for one
    that hangs, and the group ends itself. On a CPU `--max-prefill-tokens` can take minutes.
    """
    bound = max(LEAST_STEP_TOKENS, int(rate * silence / STEPS_IN_SILENCE))
    if bound < asked:
        _log.info("prompt tokens in a step: %d, so that no step lasts for too long", bound)
    return min(asked, bound)


def _members_and_bus(
    config: RankConfig, boot: int, watchdog: Watchdog
) -> tuple[Members, Bus | BackgroundBus]:
    """On one machine the launcher watches the ranks; in a cluster they fence themselves."""
    size = config.engine.tensor_parallel_size
    bus = connect_worker(config)
    if config.bus.startswith("ipc://"):
        directory = Path(config.bus.removeprefix("ipc://"))
        return LocalMembers(directory, config.group, config.tp_rank, size), bus
    from minisgl.scheduler.cluster import RedisMembers

    members = RedisMembers(config, boot)
    return members, BackgroundBus(bus, each_second=members.each_second, guard=watchdog.check)


def _prefix_publisher(
    config: RankConfig, engine: StepEngine, watchdog: Watchdog
) -> "PrefixPublisher":
    """What tells the tokenizers which prefixes this group has, started."""
    from minisgl.bus.prefixes import PrefixPublisher

    tokens = engine.num_pages * engine.page_size
    publisher = PrefixPublisher(config, config.group, tokens, guard=watchdog.check)
    publisher.start()
    return publisher


def make_engine(config: EngineConfig, comm: Communicator, *, progress: bool = True) -> StepEngine:
    """The engine that the config asks for, ready to compute."""
    folder = resolve_model(config.model)
    if config.fake_engine:
        return _fake_engine(config, folder)
    from minisgl.engine.engine import Engine

    return Engine(config, folder, comm, progress=progress and comm.rank == 0)


def _fake_engine(config: EngineConfig, folder: Path) -> StepEngine:
    from minisgl.engine.fake import FakeEngine
    from minisgl.engine.memory import pages_for_requests
    from minisgl.models.config import load_model_config

    model = load_model_config(folder)
    max_seq_len = min(config.max_seq_len or model.max_model_len, model.max_model_len)
    page_size = config.page_size or 1
    pages = pages_for_requests(config.max_running_requests, max_seq_len, page_size)
    return FakeEngine(
        num_pages=config.num_pages or pages,
        page_size=page_size,
        max_seq_len=max_seq_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        step_seconds=config.fake_step_seconds,
    )
