"""Measure how soon streams go on after a fault, and how long each role takes to start.

    .venv/bin/python -m tests.recovery [--trials 20] [--model DIR] [--only NAME ...]

Gateway, two tokenizers, two detokenizers and one group run as processes on a Redis of their own,
with a heartbeat time-out T of 4 s. What ends is started again at once, as a kubelet does it the
first time. Four streams run when the fault comes; the time to the next token is that of the stream
that waits longest, of those that it hit. `beyond` is what is left of it without what the row's last
column names. All times are seconds; nothing here is a test.
"""

import argparse
import contextlib
import itertools
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from minisgl.messages import decode_state
from tests.deployment import Deployment, Streams, T
from tests.redis_server import RedisServer
from tests.support import wait_until

KEYS = "minisgl:{test}:"
STREAMS = 4
TOKENS = 3500
WARM = 30
"""Tokens that each stream has before the fault, and again before it counts as recovered."""
AFFECTED_SECONDS = 0.2
"""A stream without a pause of this length was not hit by the fault."""
BEGINS_SECONDS = 0.5
"""Nor one whose longest pause began later after it: tokens on their way still come, and a machine
of two cores makes short pauses of its own."""
POLL_SECONDS = 0.005
IMPORTS = {
    "gateway": "minisgl.cli.main, minisgl.gateway.main, minisgl.bus.redis, minisgl.text",
    "tokenizer": "minisgl.cli.main, minisgl.tokenizer.worker, minisgl.bus.prefixes",
    "detokenizer": "minisgl.cli.main, minisgl.detokenizer.worker, minisgl.bus.redis",
    "rank": "minisgl.cli.main, minisgl.scheduler.cluster, minisgl.scheduler.main, "
    "minisgl.engine.engine, minisgl.bus.prefixes",
}
"""What each role imports before it does anything."""


@dataclass
class Figures:
    """The trials of one row."""

    name: str
    without: str
    gaps: list[float] = field(default_factory=list)
    beyond: list[float] = field(default_factory=list)

    def add(self, gap: float, owed: float) -> None:
        """One trial: `owed` is what `beyond` leaves out of the gap."""
        self.gaps.append(gap)
        self.beyond.append(gap - owed)

    def show(self) -> None:
        """One line: the number of trials, median and worst."""
        shown = "".join(f"{statistics.median(v):8.2f}{max(v):8.2f}" for v in self._columns())
        print(f"{self.name:<44}{len(self.gaps):>4}{shown}  {self.without}", flush=True)

    def _columns(self) -> Iterator[list[float]]:
        yield self.gaps
        yield self.beyond


class Watched:
    """A deployment, and what its Redis shows of it."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.redis = deployment.redis.client()

    def boot(self, role: str, id: str) -> int | None:
        """The boot of the process that is shown under this name."""
        data: Any = self.redis.get(f"{KEYS}state:{role}:{id}")
        return None if data is None else decode_state(data).boot

    def meeting(self) -> dict[bytes, bytes]:
        """What the ranks of the group have agreed on."""
        found: Any = self.redis.hgetall(f"{KEYS}rdzv:g0")
        return found

    def formed_after(self, incarnation: bytes | None) -> float:
        """When the group has formed as another incarnation."""

        def formed() -> bool:
            held = self.meeting()
            return held.get(b"phase") == b"formed" and held.get(b"incarnation") != incarnation

        return moment(formed, self.deployment)

    def shown_after(self, role: str, id: str, boot: int | None) -> float:
        """When another process is shown under this name."""
        return moment(lambda: self.boot(role, id) not in (None, boot), self.deployment)

    def streams(self, count: int = STREAMS) -> Streams:
        """Streams that have begun."""
        body = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
        asks = [[{"role": "user", "content": f"Count to {i}, please"}] for i in range(count)]
        streams = self.deployment.stream([body | {"messages": ask} for ask in asks])
        moment(lambda: min(map(len, streams.times)) >= WARM, self.deployment)
        return streams

    def last_gap(self, streams: Streams, fault: float, back: float) -> float:
        """From the fault to the end of the longest pause, over all streams that it hit.

        `back`: when what had failed was there again; every stream must bring more after that.
        """

        def goes_on(times: list[float]) -> bool:
            return sum(t > back for t in times) >= WARM

        moment(lambda: all(map(goes_on, streams.times)), self.deployment)
        wrong = [end for end in streams.leave() if end.error]
        assert not wrong, wrong
        ends = []
        for times in streams.times:
            pairs = [(b - a, b) for a, b in itertools.pairwise(times) if b > fault]
            longest, end = max(pairs)
            if longest >= AFFECTED_SECONDS and end - longest - fault <= BEGINS_SECONDS:
                ends.append(end - fault)
        assert ends, "no stream was hit by the fault"
        return max(ends)


def moment(condition: Callable[[], bool], deployment: Deployment) -> float:
    """When `condition` holds."""
    limit = time.monotonic() + 60
    while not condition():
        if time.monotonic() > limit:
            raise AssertionError(f"not within 60 s\n{deployment.logs()}")
        time.sleep(POLL_SECONDS)
    return time.monotonic()


# --- faults ------------------------------------------------------------------------------------


def rank_dies(watched: Watched, figures: Figures, trial: int, *, hangs: bool = False) -> None:
    """A rank, each in its turn, is killed; or it hangs for T and then a liveness probe kills it."""
    deployment = watched.deployment
    ranks = [w for name, w in deployment.workers.items() if name.startswith("rank")]
    streams, before = watched.streams(), watched.meeting()[b"incarnation"]
    victim, fault = ranks[trial % len(ranks)], time.monotonic()
    if hangs:
        victim.signal(signal.SIGSTOP)
        time.sleep(T)
    victim.signal(signal.SIGKILL)
    formed = watched.formed_after(before)
    start_up = formed - max(rank.started[-1] for rank in ranks)
    figures.add(watched.last_gap(streams, fault, formed), start_up + (T if hangs else 0))


def rank_hangs(watched: Watched, figures: Figures, trial: int) -> None:
    """See `rank_dies`."""
    rank_dies(watched, figures, trial, hangs=True)


def detokenizer_dies(
    watched: Watched, figures: Figures, trial: int, *, for_good: bool = False
) -> None:
    """A detokenizer is killed, and comes back or does not."""
    number = trial % 2
    victim, id = watched.deployment[f"detokenizer{number}"], f"d{number}"
    streams, boot = watched.streams(), watched.boot("detokenizer", id)
    victim.stays_away, fault = for_good, time.monotonic()
    victim.signal(signal.SIGKILL)
    if for_good:
        gap = watched.last_gap(streams, fault, fault + T + 1)
        victim.stays_away = False
        watched.shown_after("detokenizer", id, boot)
        figures.add(gap, T)
    else:
        shown = watched.shown_after("detokenizer", id, boot)
        figures.add(watched.last_gap(streams, fault, shown), shown - fault)


def detokenizer_goes(watched: Watched, figures: Figures, trial: int) -> None:
    """See `detokenizer_dies`."""
    detokenizer_dies(watched, figures, trial, for_good=True)


def tokenizer_dies(
    watched: Watched, figures: Figures, trial: int, *, for_good: bool = False
) -> None:
    """A tokenizer is killed that has taken a request and done nothing about it yet."""
    deployment, number = watched.deployment, trial % 2
    victim, id, other = deployment[f"tokenizer{number}"], f"t{number}", 1 - number
    streams, boot = watched.streams(STREAMS - 1), watched.boot("tokenizer", id)
    for n in (number, other):
        deployment[f"tokenizer{n}"].signal(signal.SIGSTOP)
    time.sleep(0.2)  # until what they wait for in Redis has run out
    body = {"messages": [{"role": "user", "content": "Well?"}], "max_tokens": WARM}
    late = deployment.stream([body | {"ignore_eos": True}])
    taken: Any = None
    while not taken:  # in the name of the victim: it got no further
        taken = watched.redis.xreadgroup("tokenizers", id, {f"{KEYS}tok": ">"}, block=1000)
    victim.stays_away, fault = for_good, time.monotonic()
    victim.signal(signal.SIGKILL)
    deployment[f"tokenizer{other}"].signal(signal.SIGCONT)
    owed = T if for_good else watched.shown_after("tokenizer", id, boot) - fault
    moment(lambda: bool(late.times[0]), deployment)
    figures.add(late.times[0][0] - fault, owed)
    wrong = [end for end in (*late.results(), *streams.leave()) if end.error]
    assert not wrong, wrong
    victim.stays_away = False
    watched.shown_after("tokenizer", id, boot)


def tokenizer_goes(watched: Watched, figures: Figures, trial: int) -> None:
    """See `tokenizer_dies`."""
    tokenizer_dies(watched, figures, trial, for_good=True)


@dataclass(frozen=True)
class Row:
    """One fault."""

    size: int
    """Ranks of the group."""
    what: str
    without: str
    trial: Callable[[Watched, Figures, int], None]


FAULTS = {
    "rank1": Row(1, "the rank is killed (TP 1)", "the rank's start", rank_dies),
    "rank2": Row(2, "a rank is killed (TP 2)", "the ranks' start", rank_dies),
    "hang1": Row(1, "the rank hangs (TP 1)", "T and the rank's start", rank_hangs),
    "hang2": Row(2, "a rank hangs (TP 2)", "T and the ranks' start", rank_hangs),
    "detok": Row(1, "a detokenizer is killed", "its restart", detokenizer_dies),
    "detok-gone": Row(1, "a detokenizer is killed for good", "T", detokenizer_goes),
    "tok": Row(1, "a tokenizer is killed", "its restart", tokenizer_dies),
    "tok-gone": Row(1, "a tokenizer is killed for good", "T", tokenizer_goes),
}


# --- starts ------------------------------------------------------------------------------------


def import_seconds(role: str, trials: int) -> float:
    """Median of what an interpreter takes that imports what this role needs, and ends."""
    command = [sys.executable, "-c", f"import os, {IMPORTS[role]}; os._exit(0)"]
    times = []
    for _ in range(trials):
        began = time.monotonic()
        subprocess.run(command, check=True)
        times.append(time.monotonic() - began)
    return statistics.median(times)


def starts(model: Path, trials: int) -> None:
    """Print how long each role takes from the start of its process, with nothing else running."""
    header = f"{'start of':<20}{'imports':>9}{'at work':>9}{'worst':>9}"
    print(f"{header}   at work: when", flush=True)
    with service(model, 1) as watched:
        for role, id, when in (
            ("gateway", "gw0", "its state is shown and /health answers"),
            ("tokenizer", "t0", "its state is shown"),
            ("detokenizer", "d0", "its state is shown"),
        ):
            times = [start_seconds(watched, role, id) for _ in range(trials)]
            show_start(role, import_seconds(role, trials), times, when)
    imports = import_seconds("rank", trials)
    for size in (1, 2):
        with service(model, size) as watched:
            times = [group_seconds(watched) for _ in range(trials)]
            show_start(f"group of {size}", imports, times, "it has formed")


def show_start(name: str, imports: float, times: Sequence[float], when: str) -> None:
    """One line of `starts`."""
    middle = statistics.median(times)
    print(f"{name:<20}{imports:>9.2f}{middle:>9.2f}{max(times):>9.2f}   {when}", flush=True)


def start_seconds(watched: Watched, role: str, id: str) -> float:
    """Kill one process and see it start."""
    worker, boot = watched.deployment[f"{role}0"], watched.boot(role, id)
    worker.signal(signal.SIGKILL)
    shown = watched.shown_after(role, id, boot)
    if role == "gateway":
        shown = moment(lambda: healthy(watched.deployment.urls[0]), watched.deployment)
    return shown - worker.started[-1]


def healthy(url: str) -> bool:
    """Whether a gateway answers."""
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    return False


def group_seconds(watched: Watched) -> float:
    """Kill all ranks and see them form."""
    ranks = [w for name, w in watched.deployment.workers.items() if name.startswith("rank")]
    before = watched.meeting()[b"incarnation"]
    for rank in ranks:
        rank.signal(signal.SIGKILL)
    return watched.formed_after(before) - max(rank.started[-1] for rank in ranks)


# --- the command -------------------------------------------------------------------------------


@contextlib.contextmanager
def service(model: Path, size: int) -> Iterator[Watched]:
    """A deployment that serves, whose group has `size` ranks."""
    with RedisServer() as server, Deployment(model, server, sizes=(size,)) as deployment:
        deployment.wait_ready()
        watched = Watched(deployment)
        watched.streams().leave()  # what is slow only once
        yield watched


def measure(row: Row, model: Path, trials: int) -> None:
    """Print the line of one fault."""
    figures = Figures(row.what, row.without)
    with service(model, row.size) as watched:
        for trial in range(trials):
            row.trial(watched, figures, trial)
            wait_until(watched.deployment.ready, 60, watched.deployment.logs)
    figures.show()


def main() -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=20, help="of each fault (default: 20)")
    parser.add_argument("--model", type=Path, help="model folder (default: a tiny random one)")
    names = ["starts", *FAULTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME",
                        help=f"which rows, of {', '.join(names)} (default: all)")  # fmt: skip
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model
        if model is None:
            from tests.tiny import build_tiny

            model = build_tiny(Path(folder), max_position_embeddings=4096)
        if "starts" in arguments.only:
            starts(model, arguments.trials)
        print(f"{'fault':<44}{'':>4}{'to the next token':>16}{'beyond':>16}")
        print(f"{'':<44}{'n':>4}{'median':>8}{'worst':>8}{'median':>8}{'worst':>8}  without")
        for name in arguments.only:
            if name in FAULTS:
                measure(FAULTS[name], model, arguments.trials)
    return 0


if __name__ == "__main__":
    sys.exit(main())
