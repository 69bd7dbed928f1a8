"""A real model's text: bfloat16 on a GPU against float32 on the CPU.

MINISGL_TEST_MODEL is the model's folder, such as SmolLM2-135M-Instruct's.
"""

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from minisgl import LLM, SamplingParams
from tests.gpu.test_engine import agreement

FOLDER = os.environ.get("MINISGL_TEST_MODEL")
ROOT = Path(__file__).resolve().parents[2]
OUTPUT = 64
PAGES = 512
"""Of the KV cache: enough for all prompts, and little of a device that other tests share."""


def prompts() -> list[str]:
    """Paragraphs of the project's own pages, cut before their end."""
    text = "\n\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
    paragraphs = [p for p in text.split("\n\n") if len(p) > 300 and p[0].isalpha()]
    return [p[: 150 + 20 * i] for i, p in enumerate(paragraphs[:24])]


@pytest.mark.skipif(FOLDER is None, reason="MINISGL_TEST_MODEL names no model")
def test_a_real_model_writes_on_a_gpu_what_it_writes_in_float32() -> None:
    assert FOLDER is not None
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    results = []
    for options in (
        {"device": "cpu", "dtype": "float32", "attention_backend": "torch"},
        {"device": "cuda", "dtype": "bfloat16", "num_pages": PAGES},
        {"device": "cuda", "dtype": "float16", "num_pages": PAGES},
    ):
        with LLM(Path(FOLDER), **options) as llm:
            results.append(llm.generate(prompts(), params))
    exact, *others = ([o.token_ids for o in outputs] for outputs in results)
    shares = [agreement(exact, other) for other in others]
    print(f"equal prefixes: bfloat16 {shares[0]:.3f}, float16 {shares[1]:.3f}")
    print(repr(prompts()[0]), "->", repr(results[1][0].text))
    assert shares[0] > 0.4 and shares[1] > 0.7
