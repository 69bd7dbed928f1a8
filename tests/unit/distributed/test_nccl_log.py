"""What NCCL's log says of the ways between ranks."""

import os

import pytest

from minisgl.distributed.nccl_log import NcclLog, nccl_transport

LOG = """\
n1:981:981 [0] NCCL INFO NCCL version 2.28.9+cuda13.0
n1:981:1267 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to =eth0
n1:981:1267 [0] NCCL INFO Channel 00/04 : 0 1 2 3
n1:981:1267 [0] NCCL INFO Channel 00/0 : 3[1] -> 0[0] [receive] via NET/IB/2/GDRDMA
n1:981:1267 [0] NCCL INFO Channel 01/0 : 0[0] -> 2[0] [send] via NET/IBext_v8/7
n1:981:1267 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
n1:982:1268 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0
n1:982:1268 [1] NCCL INFO Channel 01 : 1[1] -> 0[1af000] via SHM/direct/direct
n1:982:1268 [1] NCCL INFO Connected all rings
"""


@pytest.mark.parametrize(
    ("rank", "here", "told"),
    [
        (0, [1], "P2P, SHM, IB between nodes, IBext_v8 between nodes"),
        (1, [0], "P2P, SHM, Socket between nodes"),
        (1, [0, 2], "P2P, SHM, Socket"),
        (2, [], "IBext_v8 between nodes, Socket between nodes"),
        (3, [0, 1, 2], "IB"),
        (4, [], ""),
    ],
)
def test_a_rank_is_told_its_own_connections(rank: int, here: list[int], told: str) -> None:
    assert nccl_transport(LOG, rank, here) == told


def test_a_log_without_connections_tells_nothing() -> None:
    assert nccl_transport("n1:981:981 [0] NCCL INFO NCCL version 2.28.9\n", 0, [1]) == ""


def test_a_log_is_caught_and_the_users_settings_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    monkeypatch.setenv("NCCL_DEBUG_SUBSYS", "NET")
    with NcclLog() as log:
        assert os.environ["NCCL_DEBUG"] == "INFO"
        assert os.environ["NCCL_DEBUG_SUBSYS"] == "NET,INIT"
        with open(os.environ["NCCL_DEBUG_FILE"], "w") as file:  # as NCCL does
            file.write(LOG)
    assert log.text == LOG
    assert "NCCL_DEBUG" not in os.environ and "NCCL_DEBUG_FILE" not in os.environ
    assert os.environ["NCCL_DEBUG_SUBSYS"] == "NET"


def test_a_user_who_asked_for_the_log_sees_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "info")
    with NcclLog(), open(os.environ["NCCL_DEBUG_FILE"], "w") as file:
        file.write(LOG)
    assert capfd.readouterr().err == LOG
    assert os.environ["NCCL_DEBUG"] == "info"
