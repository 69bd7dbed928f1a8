"""What is logged of a Redis that is away."""

import logging
from pathlib import Path

import pytest
from redis.exceptions import ConnectionError

from minisgl.bus import connect, detok_queue
from minisgl.bus.base import BusError
from minisgl.bus.outage import Outage
from tests.redis_server import RedisServer


class Away:
    """An outage by a clock of the test's own, and what it logged."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        self._caplog = caplog
        self.now = 100.0
        self._outage = Outage("nobody", lambda: self.now)

    def fail(self, what: str) -> None:
        with pytest.raises(BusError, match="gone"), self._outage.during(what):
            raise ConnectionError("gone")

    def succeed(self, what: str) -> None:
        with self._outage.during(what):
            pass

    @property
    def lines(self) -> list[str]:
        return [record.getMessage() for record in self._caplog.records]


@pytest.fixture
def away(caplog: pytest.LogCaptureFixture) -> Away:
    return Away(caplog)


def test_an_outage_is_logged_at_its_start_each_ten_seconds_and_at_its_end(away: Away) -> None:
    for _ in range(50):
        away.fail("writing")
        away.fail("reading")
        away.now += 0.5
    away.succeed("reading")
    away.succeed("writing")
    assert away.lines == [
        "Redis cannot be used: writing: gone",
        "Redis cannot be used for 10 s now: writing: gone",
        "Redis cannot be used for 20 s now: writing: gone",
        "Redis can be used again, after 25 s",
    ]


def test_a_redis_that_can_be_read_and_takes_nothing_is_not_well(away: Away) -> None:
    for _ in range(5):
        away.fail("publishing")
        away.succeed("reading")
    assert away.lines == ["Redis cannot be used: publishing: gone"]


def test_a_call_that_nobody_repeats_does_not_keep_an_outage_open(away: Away) -> None:
    away.fail("acknowledging")
    away.succeed("reading")
    assert away.lines[1:] == ["Redis can be used again, after 0 s"]


def test_what_works_is_not_worth_a_line(away: Away) -> None:
    away.succeed("writing")
    assert away.lines == []


@pytest.mark.redis
def test_a_refused_password_is_said_with_the_user_and_where_it_comes_from(
    tmp_path: Path,
) -> None:
    file = tmp_path / "password"
    file.write_text("wrong")
    with RedisServer() as server:
        place = f"127.0.0.1:{server.port}/0"
        for url, path, words in (
            (f"redis://me@{place}", str(file), f"'me' with .* --bus-password-file {str(file)!r}"),
            (f"redis://{place}", str(file), "'default' with the password in --bus-password-file"),
            (f"redis://:no@{place}", None, r"'default' with the password in --bus \("),
            (f"redis://{place}", None, "without a password: give --bus-password-file"),
        ):  # fmt: skip
            bus = connect(url, "svc", password_file=path)
            bus.subscribe(detok_queue("0"))
            with pytest.raises(BusError, match=f"Redis refuses the user .*{words}"):
                bus.receive(0)
            bus.close()
