"""Many objects at once; `tests.operator.scale` measures more of them."""

import asyncio

from tests.cluster.apiserver import ApiServer
from tests.operator.fleet import CHANGES, NAMESPACES, Fleet
from tests.operator.running import Operator, settle


async def test_children_follow_the_changes_of_many_objects_and_then_nothing_is_written(
    installed: ApiServer, operator: Operator
) -> None:
    async with await Fleet.connect(installed.kubeconfig, 30) as fleet:
        await fleet.create()
        shown = await fleet.changes(60, rate=20)
        assert len({kind for kind, _ in shown}) == len(CHANGES)
        await asyncio.to_thread(settle, installed, 60, NAMESPACES)
