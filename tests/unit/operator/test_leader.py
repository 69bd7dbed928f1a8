"""Who acts: only who holds the Lease, and it is given up whatever ends the work."""

import asyncio

import pytest

from minisgl_operator import lease
from minisgl_operator.kube import ApiError
from minisgl_operator.lease import LOST_SECONDS, LeaderLease, Lost
from minisgl_operator.main import act, until
from minisgl_operator.observed import Manifest


class Server:
    """Holds one Lease."""

    held: Manifest | None = None

    async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        return self.held

    async def request(self, method: str, path: str, *, body: Manifest) -> Manifest:
        if body["metadata"].get("resourceVersion", 0) != self.version:
            raise ApiError(409, "Conflict", "it has changed")
        self.held = {
            **body, "metadata": {**body["metadata"], "resourceVersion": self.version + 1}
        }  # fmt: skip
        return self.held

    @property
    def version(self) -> int:
        return int(self.held["metadata"]["resourceVersion"]) if self.held else 0

    @property
    def holder(self) -> str:
        return str(self.held["spec"]["holderIdentity"]) if self.held else ""


def candidate(server: Server, name: str) -> LeaderLease:
    return LeaderLease(server, "ns", "operator", name)  # type: ignore[arg-type]


async def for_ever() -> None:
    await asyncio.Event().wait()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.01)


async def test_a_lease_is_given_up_though_the_answer_of_its_last_renewal_was_lost() -> None:
    server = Server()
    first = candidate(server, "a")
    await first.acquire()
    assert server.held is not None
    await server.request("PUT", "", body=server.held)  # the renewal
    await first.release()
    assert server.holder == ""


async def test_the_lease_of_another_is_left_alone() -> None:
    server = Server()
    await candidate(server, "a").acquire()
    await candidate(server, "b").release()
    assert server.holder == "a"


async def test_a_renewal_counts_from_when_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Clock:
        now = 1000.0

        def monotonic(self) -> float:
            return self.now

    class Slow(Server):
        took = (LOST_SECONDS / 2, LOST_SECONDS / 2)
        asked = 0

        async def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
            clock.now += self.took[self.asked]
            self.asked += 1
            if self.asked > 1:
                raise ApiError(0, "NoAnswer", "away")
            return self.held

    clock = Clock()
    monkeypatch.setattr(lease, "time", clock)
    server = Slow()
    with pytest.raises(Lost):
        await candidate(server, "a").keep()
    assert server.asked == 2


async def test_who_loses_the_lease_has_ended_the_work_before_that_is_told() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await for_ever()
        finally:
            await asyncio.sleep(0)
            ended.append("work")

    server = Server()
    first = candidate(server, "a")
    await first.acquire()
    assert server.held is not None
    server.held["spec"]["holderIdentity"] = "b"
    with pytest.raises(Lost):
        await act(first, asyncio.Event(), work())
    assert ended == ["work"]


async def test_the_lease_is_kept_while_the_work_ends() -> None:
    server = Server()
    first = candidate(server, "a")
    await first.acquire()
    stop = asyncio.Event()

    async def work() -> None:
        try:
            await for_ever()
        finally:
            before = server.version
            while server.version < before + 3:
                await asyncio.sleep(0.005)

    acting = asyncio.create_task(act(first, stop, work()))
    await asyncio.sleep(0)
    stop.set()
    await asyncio.wait_for(acting, 20)


async def test_what_fails_is_told_and_does_not_count_as_done() -> None:
    async def work() -> None:
        raise KeyError("spec")

    with pytest.raises(KeyError):
        await until(asyncio.Event(), work())
    with pytest.raises(KeyError):
        await act(candidate(Server(), "a"), asyncio.Event(), work())


async def test_work_that_never_ends_ends_when_asked_to() -> None:
    stop = asyncio.Event()
    stop.set()
    async with asyncio.timeout(20):
        assert not await until(stop, for_ever())
