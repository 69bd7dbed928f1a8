"""What to do about one object now: pure decisions over what is seen."""

from minisgl_operator.desired import group_set
from minisgl_operator.observed import Desired, Observed, Plan
from minisgl_operator.plan.decide import decide
from minisgl_operator.plan.groups import Group, Life, Phase, Survey

__all__ = ["Group", "Life", "Phase", "Survey", "decide", "plan"]


def plan(observed: Observed, desired: Desired) -> Plan:
    """What to do, in order, and when to look again. `decide` with the project's own sets."""
    return decide(observed, desired, group_set)
