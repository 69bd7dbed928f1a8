"""What rank 0 says of its group."""

from minisgl.messages import WorkerState
from minisgl.scheduler.feed import SingleFeed
from minisgl.scheduler.rank import Rank

from .test_replies import Group


def test_the_load_tells_what_runs_and_what_tensors_travel_by() -> None:
    group = Group(overlap_scheduling=False)
    group.ask(b"a" * 16, [2, 3], max_tokens=50, ignore_eos=True)
    state = WorkerState(role="rank", id="g0/0", boot=1, beat=0)
    rank = Rank(
        group.scheduler, SingleFeed(), group="g0", incarnation=77, state=lambda _: state,
        publish=lambda _: None, transport="gloo/10.0.0.1", busy=lambda: 2.5,
    )  # fmt: skip
    assert (rank.load().running, rank.load().waiting) == (0, 1)
    group.scheduler.step()
    load = rank.load()
    assert (load.running, load.waiting, load.transport) == (1, 0, "gloo/10.0.0.1")
    assert load.busy_seconds == 2.5
    assert load.pages_free + load.pages_evictable < load.pages_total
