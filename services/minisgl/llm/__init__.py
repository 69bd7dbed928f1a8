"""Offline inference: `LLM` and what it returns."""

from minisgl.llm.answers import GenerationOutput
from minisgl.llm.offline import LLM

__all__ = ["LLM", "GenerationOutput"]
