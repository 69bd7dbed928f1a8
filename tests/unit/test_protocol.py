"""The delivery protocol against every fault that its bus and its processes may have.

Gateways, tokenizers, rank 0 of one or two groups and detokenizers are the real ones, without
threads, sockets or a clock. A seed decides who acts next, between any two of their actions, and
what goes wrong: killed, paused and replaced processes whose last words come late, entries that are
lost, repeated or brought back, an empty bus, a bus that is away. Whatever happens each client gets
the tokens, log probabilities and text that the engine computes for its prompt, in order, once, and
one end; and afterwards nobody holds anything of it.

`MINISGL_PROTOCOL_RUNS` says how many seeds are tried, `MINISGL_PROTOCOL_SEED` runs a single one.
"""

import logging
import os
from collections.abc import Iterator

import pytest

from tests.unit.protocol.world import World

RUNS = int(os.environ.get("MINISGL_PROTOCOL_RUNS", "5000"))
PARTS = 10


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Replays are the point here: thousands of lines about them help nobody."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def run(seed: int) -> World:
    """One interleaving; a failure says its seed and what had gone wrong."""
    world = World(seed)
    try:
        world.run()
    except Exception as error:
        story = "\n  ".join(world.log)
        raise AssertionError(f"MINISGL_PROTOCOL_SEED={seed}: {error}\n  {story}") from error
    return world


@pytest.mark.parametrize("part", range(PARTS))
def test_each_client_gets_the_engines_output_once_whatever_goes_wrong(part: int) -> None:
    only = os.environ.get("MINISGL_PROTOCOL_SEED")
    for seed in [int(only)] if only else range(part, RUNS, PARTS):
        run(seed)


def test_a_seed_says_all_of_a_run() -> None:
    first, second = run(17), run(17)
    assert first.log == second.log and first.now == second.now
    assert [str(client) for client in first.clients] == [str(client) for client in second.clients]
