"""`minisgl engine`: one rank as a process, from its start to its end."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from minisgl.bus import connect, req_queue
from minisgl.config import EngineConfig, RankConfig, UsageError, new_boot
from minisgl.distributed import Communicator, PeerError, SingleRank
from minisgl.engine.step import StepEngine
from minisgl.hub import resolve_model
from minisgl.messages import GroupLoad, WorkerState
from minisgl.scheduler.feed import make_feed
from minisgl.scheduler.output import NullSink
from minisgl.scheduler.rank import Rank
from minisgl.scheduler.replies import ReplySink
from minisgl.scheduler.scheduler import Scheduler

_log = logging.getLogger(__name__)

PATIENCE_SECONDS = 7 * 24 * 3600.0
"""How long ranks wait for each other: a peer that is gone shows as a closed connection at once, and
a start that takes too long is ended by who started it."""

PEER_LOST_CODE = 3


def run_engine(
    config: RankConfig,
    *,
    on_ready: Callable[[], None] | None = None,
    stop: threading.Event | None = None,
) -> int:
    """Serve as one rank until `stop` (rank 0) or until rank 0 stops; the exit code.

    Raises `UsageError` or `StartError` for a start that failed.
    """
    if not config.bus.startswith("ipc://"):
        raise UsageError(f"--bus must be ipc://DIR, not {config.bus!r}")
    directory = Path(config.bus.removeprefix("ipc://"))
    stop = stop or threading.Event()
    bus = connect(config.bus, config.service)
    boot, incarnation = new_boot(), 0
    comm = meet(config.engine, directory, config.group, config.tp_rank)
    try:
        engine = make_engine(config.engine, comm, revision=config.revision or None)
        incarnation = _agree(comm, new_boot() >> 1)
        if config.tp_rank == 0:
            bus.subscribe(req_queue(config.group, incarnation))
            rows = config.engine.max_running_requests + 1
            sink: ReplySink | None = ReplySink(bus, config.group, incarnation, rows)
        else:
            sink = None
        scheduler = Scheduler(config.engine, engine, sink or NullSink())
        if sink is not None:
            sink.scheduler = scheduler
        feed = make_feed(comm, directory, config.group, PATIENCE_SECONDS)
        beats = iter(range(1, 2**63))

        def state(load: GroupLoad | None) -> WorkerState:
            return WorkerState(
                role="rank",
                id=f"{config.group}/{config.tp_rank}",
                boot=boot,
                beat=next(beats),
                pod=config.pod,
                draining=stop.is_set(),
                load=load,
            )

        rank = Rank(
            scheduler,
            feed,
            group=config.group,
            incarnation=incarnation,
            bus=bus if sink is not None else None,
            sink=sink,
            state=state,
            publish=bus.publish_state,
        )
        bus.publish_state(state(rank.load() if sink is not None else None))
        comm.barrier()
        if on_ready is not None:
            on_ready()
        rank.run(stop.is_set)
        feed.close()
    except PeerError as error:
        _log.error("%s: this rank cannot go on without it", error)
        return PEER_LOST_CODE
    finally:
        bus.close()
        comm.close()
    return 0


def meet(config: EngineConfig, directory: Path, group: str, rank: int) -> Communicator:
    """This rank's end of its group; waits for the others. They meet at a file in `directory`."""
    size = config.tensor_parallel_size
    if not 0 <= rank < size:
        raise UsageError(f"--tp-rank must be between 0 and {size - 1}, not {rank}")
    if size == 1:
        return SingleRank()
    from minisgl.distributed.gloo import GlooCommunicator

    return GlooCommunicator(
        f"file://{directory}/rendezvous.{group}", rank, size, PATIENCE_SECONDS, host="127.0.0.1"
    )


def make_engine(
    config: EngineConfig, comm: Communicator, *, revision: str | None = None, progress: bool = True
) -> StepEngine:
    """The engine that the config asks for, ready to compute."""
    folder = resolve_model(config.model, revision=revision)
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
    )


def _agree(comm: Communicator, incarnation: int) -> int:
    """Rank 0's incarnation on every rank: 63 bits, so that it travels as one integer."""
    return comm.broadcast_int(incarnation)
