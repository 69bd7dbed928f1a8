"""What to do about one object now: pure decisions over what is seen."""

from minisgl_operator.plan.decide import decide
from minisgl_operator.plan.groups import Group, Life, Phase, Survey

__all__ = ["Group", "Life", "Phase", "Survey", "decide"]
