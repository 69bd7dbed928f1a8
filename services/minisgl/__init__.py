"""MiniSGLang: an LLM inference service that Kubernetes operates and a laptop can run."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minisgl.llm import LLM, GenerationOutput
    from minisgl.messages import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "GenerationOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Lazy: a gateway or tokenizer imports this package too, and must not import torch for it.
    if name in ("LLM", "GenerationOutput"):
        from minisgl import llm

        return getattr(llm, name)
    if name == "SamplingParams":
        from minisgl.messages import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'minisgl' has no attribute {name!r}")
