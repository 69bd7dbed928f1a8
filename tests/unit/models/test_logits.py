"""Every family computes what transformers computes, however the work is cut into steps."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minisgl.attention.base import AttentionContext
from minisgl.attention.registry import make_backend
from minisgl.models.config import load_model_config
from tests.tiny import FAMILIES, VOCAB, reference_logits
from tests.unit.models.stepper import CPU, LENGTH, ROWS, Stepper

Tiny = Callable[[str], Path]


def random_prompts(*lengths: int, seed: int = 3) -> list[list[int]]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(4, VOCAB, (n,), generator=random).tolist() for n in lengths]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_chunks_and_decode_give_the_logits_of_transformers(family: str, tiny: Tiny) -> None:
    a, b, c = random_prompts(70, 9, 150)
    want_a, want_b, want_c = reference_logits(tiny(family), [a, b, c])
    stepper = Stepper(tiny(family))
    whole = stepper.step((0, a[:64], 0), (1, b[:1], 0))
    close(whole, torch.stack((want_a[63], want_b[0])))
    mixed = stepper.step((0, a[64:65], 64), (2, c[:40], 0), (1, b[1:8], 1))
    close(mixed, torch.stack((want_a[64], want_c[39], want_b[7])))
    chunk = stepper.step((2, c[40:149], 40), (1, b[8:], 8), (0, a[65:69], 65))
    close(chunk, torch.stack((want_c[148], want_b[8], want_a[68])))
    decode = stepper.step((0, a[69:], 69), (2, c[149:], 149))
    close(decode, torch.stack((want_a[69], want_c[149])))


@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_the_page_size_does_not_change_the_logits(page_size: int, tiny: Tiny) -> None:
    (prompt,) = random_prompts(100)
    (want,) = reference_logits(tiny("llama-9-3"), [prompt])
    stepper = Stepper(tiny("llama-9-3"), page_size=page_size)
    close(stepper.step((1, prompt[:50], 0))[0], want[49])
    close(stepper.step((1, prompt[50:99], 50))[0], want[98])
    close(stepper.step((1, prompt[99:], 99))[0], want[99])


def test_a_prefix_in_the_slots_of_another_request_is_used(tiny: Tiny) -> None:
    (prompt,) = random_prompts(40)
    (want,) = reference_logits(tiny("llama"), [prompt])
    stepper = Stepper(tiny("llama"))
    stepper.step((0, prompt[:30], 0))
    stepper.page_table[3, :30] = stepper.page_table[0, :30]
    close(stepper.step((3, prompt[30:], 30))[0], want[39])


def test_a_pair_of_backends_shares_the_work_by_phase(tiny: Tiny) -> None:
    (prompt,) = random_prompts(20)
    (want,) = reference_logits(tiny("qwen3"), [prompt])
    config = load_model_config(tiny("qwen3"))
    context = AttentionContext(
        device=CPU, dtype=torch.float32, num_qo_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, page_size=1,
        max_running=ROWS, max_seq_len=LENGTH,
    )  # fmt: skip
    stepper = Stepper(tiny("qwen3"), backend=make_backend(("torch", "torch"), context))
    close(stepper.step((0, prompt[:19], 0))[0], want[18])
    close(stepper.step((0, prompt[19:], 19))[0], want[19])


def test_a_token_at_either_end_of_the_vocabulary_is_embedded(tiny: Tiny) -> None:
    prompt = [VOCAB - 1, 0, VOCAB - 1]
    (want,) = reference_logits(tiny("llama-tied"), [prompt])
    got = Stepper(tiny("llama-tied")).step((0, prompt, 0))
    assert got.shape == (1, VOCAB)
    assert got.dtype == torch.float32
    close(got[0], want[2])
